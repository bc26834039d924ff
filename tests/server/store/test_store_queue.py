"""Submissions: every number once, a model's jobs in order, fair turns."""

from __future__ import annotations

import itertools
import uuid
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.store.making import DONE, MODEL, SAMPLER, Clock, at_once, new_model, sample, seq_ids, training
from tinsmith.errors import InvalidInputError
from tinsmith.server.store import Store
from tinsmith.server.store.jobs import _OWNERS
from tinsmith.server.store.records import Cancelled, Done, Expired, Failed, NewJob, Outcome, Submission

EVERYTHING = 10_000


def claim(store: Store, limit: int = EVERYTHING, worker: str = "w") -> list[int]:
    return seq_ids(store.jobs.claim("tiny", worker, train=limit))


def run(store: Store, outcome: Outcome = DONE) -> list[int]:
    """Claim all training that is ready and give it this outcome."""
    jobs = store.jobs.claim("tiny", "w", train=EVERYTHING)
    store.jobs.complete("w", {job.request_id: outcome for job in jobs})
    return seq_ids(jobs)


def requeue(store: Store, base_model: str = "tiny", max_attempts: int = 3) -> list[str]:
    return store.jobs.requeue(base_model, max_attempts=max_attempts, error="it killed its worker")


def test_a_repeated_number_finds_the_first_submission(store: Store) -> None:
    first = store.jobs.enqueue(training(0))
    again = store.jobs.enqueue(training(0, payload=b"other"))
    assert (first.is_new, again.is_new, again.request_id) == (True, False, first.request_id)
    (job,) = store.jobs.claim("tiny", "w", train=10)
    assert (job.kind, job.payload) == ("forward_backward", b"train 0")


def test_a_number_that_was_used_for_another_kind_of_operation_is_refused(store: Store) -> None:
    store.jobs.enqueue(training(0))
    store.jobs.enqueue(training(2))
    for seq_id in (0, 2):
        with pytest.raises(InvalidInputError, match="is a forward_backward already, so this optim_step is not done"):
            store.jobs.enqueue(training(seq_id, kind="optim_step"))


def test_many_threads_with_one_number_make_one_job(store: Store) -> None:
    answers = at_once(16, lambda _: store.jobs.enqueue(training(0)))
    assert len({answer.request_id for answer in answers}) == 1
    assert sum(answer.is_new for answer in answers) == 1
    assert claim(store) == [0]


def test_many_threads_with_different_numbers_leave_no_hole(store: Store) -> None:
    at_once(16, lambda place: [store.jobs.enqueue(training(seq_id)) for seq_id in range(place, 160, 16)])
    assert claim(store) == list(range(160))


def test_batches_that_lock_the_same_streams_from_both_ends_all_arrive(store: Store) -> None:
    def submit(place: int) -> None:
        order = range(8) if place % 2 else reversed(range(8))
        store.jobs.enqueue_many([Submission(job=training(place, model_id=f"s:train:{model}")) for model in order])

    at_once(8, submit)
    claimed = store.jobs.claim("tiny", "w", train=EVERYTHING)
    assert sorted((job.model_id, job.seq_id) for job in claimed) == [
        (f"s:train:{model}", seq_id) for model in range(8) for seq_id in range(8)
    ]


def test_answers_come_in_the_order_of_the_submissions(store: Store) -> None:
    jobs = [sample(3, sampler_id="s:sample:9"), training(1), sample(2, sampler_id="s:sample:1"), training(0)]
    answers = store.jobs.enqueue_many([Submission(job=job) for job in jobs])
    assert [answer.request_id for answer in answers] == [
        "s:sample:9:3",
        "s:train:0:1",
        "s:sample:1:2",
        "s:train:0:0",
    ]


def test_a_model_is_created_with_its_first_job(store: Store) -> None:
    store.jobs.enqueue(training(0, kind="create_model"), model=new_model())
    store.jobs.enqueue(training(0, kind="create_model"), model=new_model(base_model="other"))
    model = store.models.get(MODEL, "ann")
    assert model is not None
    assert model.base_model == "tiny"


def test_a_later_number_waits_for_the_missing_one(store: Store) -> None:
    for seq_id in (0, 2, 3):
        store.jobs.enqueue(training(seq_id))
    assert claim(store) == [0]
    store.jobs.enqueue(training(1))
    assert claim(store) == [1, 2, 3]


def test_a_refused_number_is_passed(store: Store) -> None:
    store.jobs.enqueue(training(0))
    store.jobs.enqueue(training(2))
    refused = store.jobs.enqueue(training(1), outcome=Failed(error="rank 0", category="user"))
    assert claim(store) == [0, 2]
    assert store.results.statuses([refused.request_id])[refused.request_id].outcome == Failed(
        error="rank 0", category="user"
    )


def test_a_number_refused_ahead_of_a_missing_one_is_passed_later(store: Store) -> None:
    store.jobs.enqueue(training(1), outcome=Failed(error="no", category="user"))
    store.jobs.enqueue(training(2))
    assert claim(store) == []
    store.jobs.enqueue(training(0))
    assert claim(store) == [0, 2]


def test_a_repeated_number_does_not_undo_a_refusal(store: Store) -> None:
    store.jobs.enqueue(training(0), outcome=Failed(error="no", category="user"))
    assert not store.jobs.enqueue(training(0)).is_new
    assert claim(store) == []


def test_a_cancelled_number_is_passed(store: Store) -> None:
    for seq_id in (0, 1, 3):
        store.jobs.enqueue(training(seq_id))
    assert store.jobs.cancel(f"{MODEL}:1", "ann") == "cancelled"
    assert store.jobs.cancel(f"{MODEL}:3", "ann") == "cancelled"
    store.jobs.enqueue(training(2))
    store.jobs.enqueue(training(4))
    assert claim(store) == [0, 2, 4]


def test_samples_never_wait_for_missing_numbers(store: Store) -> None:
    for seq_id in (7_000_000_000, 3, 999_999_999_999_999_999):
        store.jobs.enqueue(sample(seq_id))
    assert seq_ids(store.jobs.claim("tiny", "w", sample=10)) == [7_000_000_000, 3, 999_999_999_999_999_999]


def test_a_job_without_a_number_runs_when_it_comes_and_leaves_no_payload(store: Store, clock: Clock) -> None:
    unload = training(None, kind="unload_model", model_id=None)
    assert [store.jobs.enqueue(unload).request_id for _ in range(2)] == ["s:unload:0", "s:unload:1"]
    assert claim(store) == [0, 1]
    store.jobs.complete("w", {"s:unload:0": DONE, "s:unload:1": DONE})
    assert store.results.expire(clock() + timedelta(days=1)) == 2


def test_a_job_that_needs_no_worker_is_over_on_arrival(store: Store) -> None:
    loss = NewJob(kind="create_custom_loss", owner="ann", payload=b"", session_id="s", seq_id=0)
    answer = store.jobs.enqueue(loss, outcome=DONE)
    assert answer.request_id == "s:loss:0"
    assert store.results.statuses(["s:loss:0"])["s:loss:0"].outcome == DONE
    assert not store.jobs.enqueue(loss, outcome=Done(result=b"other", content_type="x")).is_new
    assert store.results.statuses(["s:loss:0"])["s:loss:0"].outcome == DONE


def test_a_job_that_nobody_could_run_is_refused(store: Store) -> None:
    with pytest.raises(InvalidInputError, match="no worker"):
        store.jobs.enqueue(sample(0, base_model=None))


@pytest.mark.parametrize("seq_id", [-1, 2**63])
def test_an_impossible_number_is_refused_and_leaves_nothing(store: Store, seq_id: int) -> None:
    with pytest.raises(InvalidInputError):
        store.jobs.enqueue(sample(seq_id))
    assert store.jobs.depths() == []


def test_work_goes_only_to_the_worker_of_its_base_model(store: Store) -> None:
    store.jobs.enqueue(sample(0))
    store.jobs.enqueue(sample(1, base_model="other", sampler_id="s:sample:1"))
    assert seq_ids(store.jobs.claim("other", "w", sample=10)) == [1]
    assert store.jobs.claim("tiny", "w", train=10) == []


def test_a_claim_takes_no_more_than_its_limit_and_nothing_twice(store: Store) -> None:
    for seq_id in range(5):
        store.jobs.enqueue(training(seq_id))
    assert [claim(store, 2), claim(store, 2), claim(store, 2), claim(store, 2)] == [[0, 1], [2, 3], [4], []]


def test_a_claim_takes_no_more_once_its_bytes_are_many(store: Store) -> None:
    for seq_id, size in enumerate((40, 40, 40, 500, 10)):
        store.jobs.enqueue(training(seq_id, payload=bytes(size)))
        store.jobs.enqueue(sample(seq_id, payload=bytes(size)))

    def claim_bytes(train: int, sample: int) -> list[int]:
        rooms = {"train_bytes": train, "sample_bytes": sample}
        return seq_ids(store.jobs.claim("tiny", "w", train=EVERYTHING, sample=EVERYTHING, **rooms))

    assert claim_bytes(0, 0) == []
    assert claim_bytes(60, 1) == [0, 1, 0], "each kind has room of its own"
    assert claim_bytes(41, 0) == [2, 3], "what is larger than the room has its turn too"
    assert claim_bytes(1000, 1000) == [4, 1, 2, 3, 4]


def test_a_claim_takes_no_more_once_there_is_no_room_for_samples(store: Store) -> None:
    for seq_id, number in enumerate((16, 16, 16, 500, 1)):
        store.jobs.enqueue(sample(seq_id, samples=number))

    def claim_samples(room: int) -> list[tuple[int, int]]:
        return [(job.seq_id, job.samples) for job in store.jobs.claim("tiny", "w", sample=room)]

    assert claim_samples(0) == []
    assert claim_samples(32) == [(0, 16), (1, 16)]
    assert claim_samples(17) == [(2, 16), (3, 500)], "what is larger than the room has its turn too"
    assert claim_samples(-400) == []
    assert claim_samples(256) == [(4, 1)]


def test_owners_get_equal_parts_of_the_room_however_much_a_request_asks_for(store: Store) -> None:
    for owner, number in (("ann", 16), ("ben", 1), ("cat", 3)):
        few = [sample(seq_id, owner=owner, sampler_id=f"{owner}:sample:0", samples=number) for seq_id in range(99)]
        store.jobs.enqueue_many([Submission(job=job) for job in few])
    claimed = store.jobs.claim("tiny", "w", sample=144)
    parts = {owner: sum(job.samples for job in claimed if job.owner == owner) for owner in ("ann", "ben", "cat")}
    assert parts == {"ann": 48, "ben": 48, "cat": 48}


def test_what_an_owner_leaves_of_its_part_is_for_the_others(store: Store) -> None:
    store.jobs.enqueue_many([Submission(job=sample(seq_id, samples=4)) for seq_id in range(30)])
    store.jobs.enqueue(sample(0, owner="ben", sampler_id="ben:sample:0", samples=5))
    owners = [job.owner for job in store.jobs.claim("tiny", "w", sample=61)]
    assert sorted(owners) == ["ann"] * 14 + ["ben"]


def test_owners_whose_requests_are_larger_than_the_room_take_turns(store: Store) -> None:
    for owner, seq_id in itertools.product(("ann", "ben", "cat"), range(2)):
        store.jobs.enqueue(sample(seq_id, owner=owner, sampler_id=f"{owner}:sample:0", samples=300))
    claims = [store.jobs.claim("tiny", "w", sample=256) for _ in range(6)]
    assert [[job.owner for job in claim] for claim in claims] == [["ann"], ["ben"], ["cat"]] * 2


def test_an_owner_who_has_enough_leaves_the_room_to_others(store: Store) -> None:
    for owner in ("ann", "ben"):
        few = [sample(seq_id, owner=owner, sampler_id=f"{owner}:sample:0", samples=4) for seq_id in range(9)]
        store.jobs.enqueue_many([Submission(job=job) for job in few])

    def claimed(**held: int) -> list[str]:
        return [job.owner for job in store.jobs.claim("tiny", "w", sample=32, sample_of_owner=12, held=held)]

    assert claimed(ann=12) == ["ben"] * 3
    assert claimed(ann=500, ben=5) == ["ben"] * 2, "the last one may be larger than what was left"
    assert claimed(ann=12, ben=12) == []
    assert sorted(claimed(cat=12)) == ["ann"] * 3 + ["ben"] * 3
    assert sorted(claimed(ann=8)) == ["ann", "ben"]


def test_owners_with_large_payloads_take_turns(store: Store) -> None:
    for owner in ("ann", "ben", "cat"):
        for seq_id in range(3):
            model_id = f"{owner}:train:0"
            store.jobs.enqueue(training(seq_id, owner=owner, model_id=model_id, payload=bytes(100)))
    claims = [store.jobs.claim("tiny", "w", train=EVERYTHING, train_bytes=150) for _ in range(3)]
    assert [{job.owner for job in claim} for claim in claims] == [{"ann"}, {"ben"}, {"cat"}]
    assert all(seq_ids(claim) == [0, 1] for claim in claims)


def test_an_owner_with_a_long_queue_does_not_delay_another(store: Store) -> None:
    store.jobs.enqueue_many([Submission(job=sample(seq_id)) for seq_id in range(100)])
    store.jobs.enqueue_many(
        [Submission(job=sample(seq_id, owner="bob", sampler_id="b:sample:0")) for seq_id in range(3)]
    )
    owners = [job.owner for job in store.jobs.claim("tiny", "w", sample=10)]
    assert sorted(owners) == ["ann"] * 7 + ["bob"] * 3


@pytest.mark.parametrize(
    "names", [[f"owner-{number}" for number in range(5)], ["Zoe", "ann", "Ärger", "_x", "bob"]], ids=["plain", "odd"]
)
def test_when_owners_outnumber_the_limit_all_come_to_their_turn(store: Store, names: list[str]) -> None:
    for owner, seq_id in itertools.product(names, range(4)):
        store.jobs.enqueue(sample(seq_id, owner=owner, sampler_id=f"{owner}:sample:0"))
    rounds = [store.jobs.claim("tiny", "w", sample=2)[:] for _ in range(5)]
    assert sorted(job.owner for jobs in rounds for job in jobs) == sorted(names * 2)


def test_a_claim_looks_for_no_more_owners_than_can_get_something(store: Store) -> None:
    """With ten thousand of them, finding all took most of the time of a claim."""
    for number in range(50):
        store.jobs.enqueue(sample(0, owner=f"owner-{number:02}", sampler_id=f"{number}:sample:0"))
    where = {"base_model": "tiny", "lane": "sample", "replica": "", "after": "owner-40"}
    found = store._database.read(lambda connection: [*connection.scalars(_OWNERS, {**where, "count": 3})])
    assert found == ["owner-41", "owner-42", "owner-43"]
    rest = store._database.read(lambda connection: [*connection.scalars(_OWNERS, {**where, "count": 100})])
    assert rest == [f"owner-{number}" for number in range(41, 50)]


def test_a_model_with_a_long_queue_does_not_delay_another_of_its_owner(store: Store) -> None:
    store.jobs.enqueue_many([Submission(job=training(seq_id, size=10)) for seq_id in range(100)])
    claim(store, 4)
    store.jobs.enqueue(training(0, model_id="s:train:1", size=10))
    claimed = store.jobs.claim("tiny", "w", train=2)
    assert "s:train:1" in [job.model_id for job in claimed]


def test_a_stream_that_was_idle_has_saved_up_no_turns(store: Store) -> None:
    store.jobs.enqueue_many([Submission(job=training(seq_id)) for seq_id in range(50)])
    run(store)
    fresh = [Submission(job=training(seq_id, model_id="s:train:1")) for seq_id in range(50)]
    store.jobs.enqueue_many([*fresh, *(Submission(job=training(seq_id)) for seq_id in range(50, 60))])
    claimed = store.jobs.claim("tiny", "w", train=20)
    assert [job.model_id for job in claimed].count(MODEL) >= 8


def test_a_worker_that_died_leaves_its_jobs_in_their_old_places(store: Store) -> None:
    for seq_id in range(6):
        store.jobs.enqueue(training(seq_id))
    claim(store, 4, worker="first")
    store.jobs.complete("first", {f"{MODEL}:0": DONE})
    assert requeue(store) == []
    assert claim(store, worker="second") == [1, 2, 3, 4, 5]


def test_a_worker_taken_for_dead_cannot_complete_what_another_has(store: Store) -> None:
    store.jobs.enqueue(sample(0))
    store.jobs.claim("tiny", "first", sample=1)
    requeue(store)
    assert store.jobs.complete("first", {f"{SAMPLER}:0": DONE}) == []
    store.jobs.claim("tiny", "second", sample=1)
    assert store.jobs.complete("first", {f"{SAMPLER}:0": DONE}) == []
    assert store.jobs.complete("second", {f"{SAMPLER}:0": DONE}) == [f"{SAMPLER}:0"]


def test_a_job_that_was_begun_too_often_fails_and_the_others_wait_again(store: Store) -> None:
    for seq_id in range(3):
        store.jobs.enqueue(training(seq_id))
    for tried in range(3):
        assert [job.attempts for job in store.jobs.claim("tiny", "w", train=10)] == [tried, 0, 0]
        store.jobs.begin("w", [f"{MODEL}:0"])
        assert requeue(store) == ([f"{MODEL}:0"] if tried == 2 else [])
    assert store.results.statuses([f"{MODEL}:0"])[f"{MODEL}:0"].outcome == Failed(
        error="it killed its worker", category="server"
    )
    assert claim(store) == [1, 2]


def test_a_try_that_is_forgiven_does_not_count_however_often(store: Store) -> None:
    for seq_id in range(2):
        store.jobs.enqueue(training(seq_id))
    for _ in range(5):
        assert [job.attempts for job in store.jobs.claim("tiny", "w", train=10)] == [0, 0]
        store.jobs.begin("w", [f"{MODEL}:0"])
        both = [f"{MODEL}:0", f"{MODEL}:1"]  # of the second nobody knows whether it was begun
        assert store.jobs.requeue("tiny", max_attempts=1, error="it killed its worker", forgiven=both) == []


def test_tries_are_counted_for_the_worker_that_has_the_job_alone(store: Store) -> None:
    store.jobs.enqueue(sample(0))
    store.jobs.claim("tiny", "first", sample=1)
    requeue(store)
    store.jobs.begin("first", [f"{SAMPLER}:0"])
    (job,) = store.jobs.claim("tiny", "second", sample=1)
    store.jobs.begin("first", [f"{SAMPLER}:0"])
    requeue(store)
    assert job.attempts == 0
    assert store.jobs.claim("tiny", "third", sample=1)[0].attempts == 0


def test_a_worker_that_ends_in_peace_blames_nobody(store: Store) -> None:
    for seq_id in range(3):
        store.jobs.enqueue(sample(seq_id))
    store.jobs.claim("tiny", "other", sample=1)
    store.jobs.claim("tiny", "w", sample=2)
    store.jobs.begin("w", [f"{SAMPLER}:1"])
    store.jobs.release("tiny", "w", begun=[f"{SAMPLER}:1"])
    assert [(job.seq_id, job.attempts) for job in store.jobs.claim("tiny", "next", sample=10)] == [(1, 0), (2, 0)]


def test_without_a_worker_everything_that_waits_for_one_fails(store: Store) -> None:
    for seq_id in (0, 1, 3):
        store.jobs.enqueue(training(seq_id))
    store.jobs.enqueue_many([Submission(job=sample(seq_id)) for seq_id in range(600)])
    store.jobs.enqueue(sample(0, base_model="other", sampler_id="s:sample:1"))
    store.jobs.claim("tiny", "w", train=1)
    failed = store.jobs.fail_all("tiny", "no model")
    assert len(set(failed)) == 603
    assert store.results.statuses(failed)[f"{MODEL}:3"].outcome == Failed(error="no model", category="server")
    assert store.jobs.fail_all("tiny", "no model") == []
    store.jobs.enqueue(training(2))
    assert claim(store) == [2]
    assert len(store.jobs.claim("other", "w", sample=10)) == 1


def test_only_the_first_outcome_counts(store: Store) -> None:
    store.jobs.enqueue(sample(0))
    store.jobs.claim("tiny", "w", sample=1)
    store.jobs.complete("w", {f"{SAMPLER}:0": DONE})
    assert store.jobs.complete("w", {f"{SAMPLER}:0": Failed(error="late", category="server")}) == []
    assert store.results.statuses([f"{SAMPLER}:0"])[f"{SAMPLER}:0"].outcome == DONE


def test_a_running_job_is_cancelled_by_its_worker(store: Store) -> None:
    store.jobs.enqueue(sample(0))
    store.jobs.enqueue(sample(1))
    store.jobs.claim("tiny", "w", sample=2)
    assert store.jobs.cancel(f"{SAMPLER}:0", "ann") == "asked"
    assert store.jobs.cancel_asked("tiny", "w") == [f"{SAMPLER}:0"]
    store.jobs.complete("w", {f"{SAMPLER}:0": Cancelled()})
    assert store.jobs.cancel_asked("tiny", "w") == []
    assert store.jobs.cancel(f"{SAMPLER}:0", "ann") == "finished"


def test_a_cancelled_job_of_a_dead_worker_is_not_run_again(store: Store) -> None:
    store.jobs.enqueue(sample(0))
    store.jobs.claim("tiny", "w", sample=1)
    store.jobs.cancel(f"{SAMPLER}:0", "ann")
    assert requeue(store) == [f"{SAMPLER}:0"]
    assert store.jobs.claim("tiny", "w", sample=1) == []
    assert store.results.statuses([f"{SAMPLER}:0"])[f"{SAMPLER}:0"].outcome == Cancelled()


def test_nobody_cancels_what_belongs_to_another(store: Store) -> None:
    store.jobs.enqueue(sample(0))
    assert store.jobs.cancel(f"{SAMPLER}:0", "bob") is None
    assert store.jobs.cancel("nothing:0", "ann") is None
    assert len(store.jobs.claim("tiny", "w", sample=1)) == 1


def test_training_can_be_replayed_until_it_is_forgotten(store: Store) -> None:
    for seq_id in range(4):
        store.jobs.enqueue(training(seq_id))
    claim(store)
    bad = Failed(error="bad", category="user")
    store.jobs.complete("w", {f"{MODEL}:0": DONE, f"{MODEL}:1": bad, f"{MODEL}:2": DONE})
    assert [(job.seq_id, job.payload) for job in store.jobs.history(MODEL, -1, 10)] == [
        (0, b"train 0"),
        (2, b"train 2"),
    ]
    store.jobs.forget_payloads(MODEL, 0)
    assert seq_ids(store.jobs.history(MODEL, -1, 10)) == [2]


def test_forgetting_spares_what_has_not_run(store: Store) -> None:
    store.jobs.enqueue(training(0))
    store.jobs.forget_payloads(MODEL, 0)
    (job,) = store.jobs.claim("tiny", "w", train=1)
    assert job.payload == b"train 0"


def test_depths_tell_what_waits_and_what_runs(store: Store) -> None:
    for seq_id in range(3):
        store.jobs.enqueue(sample(seq_id))
    store.jobs.enqueue(training(1))
    store.jobs.claim("tiny", "w", sample=1)
    assert {(depth.kind, depth.state): depth.count for depth in store.jobs.depths()} == {
        ("sample", "running"): 1,
        ("sample", "queued"): 2,
        ("forward_backward", "queued"): 1,
    }


# What a client, the API and a worker may do to one model, in any order.
steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 8)),
        st.tuples(st.just("refuse"), st.integers(0, 8)),
        st.tuples(st.just("cancel"), st.integers(0, 8)),
        st.tuples(st.just("claim"), st.integers(1, 4)),
        st.tuples(st.just("finish"), st.integers(1, 4)),
        st.tuples(st.just("crash"), st.just(0)),
        st.tuples(st.just("expire"), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_whatever_happens_a_model_runs_in_order_and_every_number_once(
    store: Store, clock: Clock, steps: list[tuple[str, int]]
) -> None:
    model = f"{uuid.uuid4()}:train:0"
    base_model = model  # its own worker, as all examples share a database
    arrived: dict[int, str] = {}
    running: list[int] = []
    finished: list[int] = []
    for action, number in steps:
        job = training(number, model_id=model, base_model=base_model)
        match action:
            case "submit":
                assert store.jobs.enqueue(job).is_new == (number not in arrived)
                arrived.setdefault(number, "runs")
            case "refuse":
                refused = store.jobs.enqueue(job, outcome=Failed(error="no", category="user"))
                assert refused.is_new == (number not in arrived)
                arrived.setdefault(number, "passed")
            case "cancel":
                if store.jobs.cancel(f"{model}:{number}", "ann") == "cancelled":
                    arrived[number] = "passed"
            case "claim":
                claimed = seq_ids(store.jobs.claim(base_model, "w", train=number))
                waiting = _ready(arrived, finished, running)
                assert claimed == waiting[:number]
                running += claimed
            case "finish":
                over, running = running[:number], running[number:]
                assert len(store.jobs.complete("w", {f"{model}:{seq_id}": DONE for seq_id in over})) == len(over)
                finished += over
            case "crash":
                requeue(store, base_model)
                asked = store.results.statuses([f"{model}:{seq_id}" for seq_id in running])
                for status in asked.values():
                    if status.outcome == Cancelled():
                        arrived[int(status.request_id.rpartition(":")[2])] = "passed"
                running = []
            case "expire":
                clock.pass_(timedelta(days=2))
                store.results.expire(clock() - timedelta(days=1))
    assert finished == sorted(set(finished))
    for status in store.results.statuses([f"{model}:{seq_id}" for seq_id in finished]).values():
        assert status.outcome in (DONE, Expired())


def _ready(arrived: dict[int, str], finished: list[int], running: list[int]) -> list[int]:
    """What may be claimed: the numbers before the first missing one that are neither passed, done nor claimed."""
    contiguous = itertools.takewhile(arrived.__contains__, itertools.count())
    return [n for n in contiguous if arrived[n] == "runs" and n not in finished and n not in running]


def test_what_waits_and_runs_is_counted_by_owner(store: Store) -> None:
    for seq_id in (0, 1, 3):
        store.jobs.enqueue(training(seq_id))
    store.jobs.enqueue(training(0, model_id="other:train:0", owner="ben"))
    store.jobs.enqueue(training(4), outcome=Failed(error="bad", category="user"))
    counted = {one.owner: (one.requests, one.size_bytes) for one in store.jobs.queued()}
    assert counted == {training(0).owner: (3, 3 * len(b"train 0")), "ben": (1, len(b"train 0"))}
    assert sorted(run(store)) == [0, 0, 1]
    assert [(one.requests, one.size_bytes) for one in store.jobs.queued()] == [(1, len(b"train 3"))]


def test_the_number_that_later_ones_wait_for_is_known(store: Store) -> None:
    stream = training(0).stream
    assert not store.jobs.is_awaited(stream, 0)
    store.jobs.enqueue(training(0))
    assert not store.jobs.is_awaited(stream, 1), "nothing came after it"
    store.jobs.enqueue(training(3))
    assert [store.jobs.is_awaited(stream, seq_id) for seq_id in range(5)] == [False, True, False, False, False]
