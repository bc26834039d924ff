"""Several workers of one base model: each claims what is its own, and the death of one concerns nobody else."""

from __future__ import annotations

import msgspec

from tests.server.store.making import sample, training
from tinsmith.server.store import Store
from tinsmith.server.store.records import Cancelled, Done, Failed

BASE = "tiny"
FIRST, SECOND = "sample-0", "sample-1"


def submit(store: Store, seq_id: int, replica: str = "", **fields: object) -> str:
    return store.jobs.enqueue(msgspec.structs.replace(sample(seq_id, **fields), replica=replica)).request_id


def claim(store: Store, replica: str, worker: str = "", limit: int = 99) -> list[int]:
    return [job.seq_id for job in store.jobs.claim(BASE, worker or replica, sample=limit, train=99, replica=replica)]


def test_a_replica_claims_what_is_for_it_and_a_trainer_what_is_for_none(store: Store) -> None:
    store.jobs.enqueue(training(0))
    submit(store, 1, FIRST)
    submit(store, 2, SECOND)
    submit(store, 3, FIRST)
    assert claim(store, FIRST) == [1, 3]
    assert [job.kind for job in store.jobs.claim(BASE, "train/x", train=99)] == ["forward_backward"]
    assert claim(store, SECOND) == [2]


def test_owners_share_a_replica(store: Store) -> None:
    for seq_id in range(4):
        submit(store, seq_id, FIRST)
    store.jobs.enqueue(msgspec.structs.replace(sample(9, sampler_id="t:sample:0"), owner="bob", replica=FIRST))
    assert 9 in claim(store, FIRST, limit=2)


def test_what_a_dead_replica_had_claimed_waits_again_and_the_work_of_others_goes_on(store: Store) -> None:
    store.jobs.enqueue(training(0))
    (training_job,) = store.jobs.claim(BASE, "train/a", train=9)
    mine, other = submit(store, 1, FIRST), submit(store, 2, SECOND)
    assert claim(store, FIRST, f"{FIRST}/a") == [1]
    assert claim(store, SECOND, f"{SECOND}/a") == [2]
    store.jobs.begin(f"{FIRST}/a", [mine])
    assert store.jobs.requeue(BASE, max_attempts=3, error="", place=FIRST) == []
    assert claim(store, FIRST, f"{FIRST}/b") == [1]
    done = Done(result=b"", content_type="x")
    assert store.jobs.complete(f"{FIRST}/a", {mine: done}) == []
    assert store.jobs.complete(f"{SECOND}/a", {other: done}) == [other]
    assert store.jobs.complete("train/a", {training_job.request_id: done}) == [training_job.request_id]


def test_who_has_something_that_is_not_done_and_what_is_still_open(store: Store) -> None:
    mine, other, gone = submit(store, 1, FIRST), submit(store, 2, "sample-10"), "s:sample:0:99"
    assert not store.jobs.is_busy(BASE, FIRST), "it waits"
    assert claim(store, FIRST, f"{FIRST}/a") == [1]
    assert claim(store, "sample-10", "sample-10/a") == [2]
    assert store.jobs.is_busy(BASE, FIRST)
    assert store.jobs.is_busy(BASE, "sample-10")
    assert not store.jobs.is_busy(BASE, SECOND)
    assert store.jobs.still_open([mine, other, gone]) == {mine, other}
    store.jobs.complete(f"{FIRST}/a", {mine: Done(result=b"", content_type="x")})
    assert not store.jobs.is_busy(BASE, FIRST)
    assert store.jobs.still_open([mine, other, gone]) == {other}
    assert store.jobs.still_open([]) == set()


def test_a_place_is_no_prefix_of_another(store: Store) -> None:
    tenth = submit(store, 1, "sample-10")
    assert claim(store, "sample-10", "sample-10/a") == [1]
    store.jobs.requeue(BASE, max_attempts=3, error="", place="sample-1")
    assert store.jobs.complete("sample-10/a", {tenth: Cancelled()}) == [tenth]


def test_what_killed_a_replica_too_often_is_given_up_and_its_neighbours_are_not(store: Store) -> None:
    killer, neighbour = submit(store, 1, FIRST), submit(store, 2, SECOND)
    claim(store, FIRST, f"{FIRST}/a")
    claim(store, SECOND, f"{SECOND}/a")
    store.jobs.begin(f"{FIRST}/a", [killer])
    store.jobs.begin(f"{SECOND}/a", [neighbour])
    assert store.jobs.requeue(BASE, max_attempts=1, error="no more", place=FIRST) == [killer]
    assert store.results.statuses([killer])[killer].outcome == Failed(error="no more", category="server")
    assert store.results.statuses([neighbour])[neighbour].state == "running"


def test_strays_are_those_for_nobody_who_is_there_and_can_be_dealt_out_again(store: Store) -> None:
    first, second, none = submit(store, 1, FIRST), submit(store, 2, SECOND), submit(store, 3)
    submit(store, 4, "elsewhere", sampler_id="s:sample:8")
    assert claim(store, "elsewhere") == [4]
    assert [stray.request_id for stray in store.jobs.strays(BASE, [SECOND])] == [first, none]
    assert store.jobs.deal({first: SECOND, none: SECOND}) == {first, none}
    assert store.jobs.strays(BASE, [SECOND]) == []
    assert claim(store, SECOND) == [1, 2, 3]
    assert store.jobs.deal({second: FIRST}) == set()
    assert claim(store, FIRST) == [], "what is being worked on stays where it is"


def test_a_stray_counts_as_many_samples_as_it_asks_for(store: Store) -> None:
    submit(store, 1, FIRST, samples=16)
    submit(store, 2, FIRST)
    assert [stray.samples for stray in store.jobs.strays(BASE, [SECOND])] == [16, 1]


def test_without_replicas_everything_is_for_one_worker(store: Store) -> None:
    """As after a start without replicas, of a server that had some."""
    store.jobs.deal({stray.request_id: "" for stray in store.jobs.strays(BASE, [""])})
    lost = submit(store, 1, FIRST)
    store.jobs.deal({stray.request_id: "" for stray in store.jobs.strays(BASE, [""])})
    assert [job.request_id for job in store.jobs.claim(BASE, "worker", train=9, sample=9)] == [lost]
