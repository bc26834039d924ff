"""Sessions, models, samplers, losses, checkpoints, keys and the audit trail."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import sqlalchemy as sa

from tests.server.store.making import (
    DONE,
    MODEL,
    SAMPLER,
    Clock,
    add_model,
    at_once,
    new_checkpoint,
    new_model,
    sample,
    seq_ids,
    training,
)
from tinsmith.errors import InvalidInputError
from tinsmith.server.store import Store, schema
from tinsmith.server.store.keys import KeyRefusedError
from tinsmith.server.store.records import (
    Abandoned,
    Cancelled,
    CheckpointKey,
    Failed,
    Heartbeat,
    Lora,
    NewEvent,
    NewLoss,
    NewSampler,
    NewSession,
    SessionQuery,
    SnapshotChange,
    Snapshots,
    StatusFilter,
    Storage,
    Submission,
)
from tinsmith.server.store.samplers import publish

HOUR = timedelta(hours=1)
ANN = NewSession(owner="ann")


# Sessions


def test_a_session_comes_back_as_it_was_made(store: Store) -> None:
    made = store.sessions.create(
        NewSession(
            owner="ann",
            tags=("a", "ü"),
            user_metadata={"run": "1", "nested": {"x": [1]}},
            sdk_version="1.0",
            project_id="p",
            display_name="My run",
        )
    )
    assert store.sessions.get(made.session_id, "ann") == made
    assert store.sessions.get(made.session_id, "bob") is None


def test_a_heartbeat_moves_the_time_and_tells_the_state(store: Store) -> None:
    made = store.sessions.create(ANN)
    assert store.sessions.heartbeats([Heartbeat(made.session_id, "ann")]) == ["active"]
    assert store.sessions.heartbeats([Heartbeat(made.session_id, "bob")]) == [None]
    found = store.sessions.get(made.session_id, "ann")
    assert found is not None
    assert found.heartbeat > made.heartbeat


def test_the_first_end_of_a_session_stands(store: Store) -> None:
    session_id, heard = store.sessions.create(ANN).session_id, store.sessions.heard()
    assert store.sessions.finish(session_id, "ann", "errored", "boom")
    assert store.sessions.finish(session_id, "ann", "success")
    assert store.sessions.end_silent(heard) == []
    found = store.sessions.get(session_id, "ann")
    assert found is not None
    assert (found.state, found.finish_reason, found.finish_detail) == ("client_finished", "errored", "boom")
    assert store.sessions.heartbeats([Heartbeat(session_id, "ann")]) == ["client_finished"]


def test_nobody_ends_or_moves_the_session_of_another(store: Store) -> None:
    session_id = store.sessions.create(ANN).session_id
    assert not store.sessions.finish(session_id, "bob", "success")
    assert not store.sessions.set_project(session_id, "bob", "p")
    assert store.sessions.set_project(session_id, "ann", "p")
    found = store.sessions.get(session_id, "ann")
    assert found is not None
    assert (found.state, found.project_id) == ("active", "p")


def test_sessions_are_listed_newest_first_in_pages(store: Store) -> None:
    made = [store.sessions.create(ANN).session_id for _ in range(5)]
    store.sessions.create(NewSession(owner="bob"))
    assert store.sessions.page("ann", limit=2) == [made[4], made[3]]
    assert store.sessions.page("ann", limit=10, offset=4) == [made[0]]


def test_a_session_knows_its_models_and_samplers(store: Store) -> None:
    session_id = store.sessions.create(ANN).session_id
    add_model(store, new_model(model_id="m1", session_id=session_id))
    sampler = store.samplers.create(
        NewSampler(session_id=session_id, sampling_session_seq_id=0, owner="ann", base_model="tiny")
    )
    members = store.sessions.members(session_id, "ann")
    assert (members.model_ids, members.sampler_ids) == (["m1"], [sampler.sampler_id])


def found_by(store: Store, **wanted: object) -> list[str]:
    query = msgspec.structs.replace(SessionQuery(reader="ann"), **wanted)
    return [summary.session.session_id for summary in store.sessions.search(query).sessions]


def test_a_search_narrows_by_everything_that_is_given(store: Store) -> None:
    plain = store.sessions.create(ANN).session_id
    special = store.sessions.create(
        NewSession(owner="ann", project_id="p", display_name="My Long 100% run", user_metadata={"a": "1", "b": "2"})
    ).session_id
    foreign = store.sessions.create(NewSession(owner="bob", display_name="run")).session_id
    assert found_by(store) == [special, plain]
    assert found_by(store, session_id=foreign) == found_by(store, owners=("bob",)) == []
    assert found_by(store, project_ids=("p", "q")) == [special]
    assert found_by(store, project_ids=()) == []
    assert found_by(store, display_name="RUN my") == found_by(store, display_name="100%") == [special]
    assert found_by(store, display_name="my short") == found_by(store, display_name="1_0") == []
    assert found_by(store, display_name="long", session_id=plain) == [special, plain]
    assert found_by(store, user_metadata={"a": "1", "b": "2"}) == [special]
    assert found_by(store, user_metadata={"a": "1", "b": "3"}) == []


def test_of_others_only_sessions_with_something_published_are_found_and_never_by_what_they_say(store: Store) -> None:
    shared = store.sessions.create(NewSession(owner="bob", display_name="x", user_metadata={"a": "1"})).session_id
    private = store.sessions.create(NewSession(owner="bob")).session_id
    for session_id, model_id in ((shared, "m1"), (shared, "m2"), (private, "m3")):
        add_model(store, new_model(model_id=model_id, owner="bob", session_id=session_id))
        key = CheckpointKey(run_id=model_id, kind="weights", name="one")
        store.checkpoints.save(new_checkpoint(key=key, owner="bob"))
    store.checkpoints.set_public(CheckpointKey(run_id="m1", kind="weights", name="one"), "bob", True)
    own = store.sessions.create(ANN).session_id

    assert found_by(store) == [own]
    assert found_by(store, scope="accessible") == [own, shared]
    assert found_by(store, scope="accessible", owners=("bob",)) == [shared]
    assert found_by(store, scope="accessible", display_name="x") == []
    assert found_by(store, scope="accessible", user_metadata={"a": "1"}) == []
    (summary,) = store.sessions.search(SessionQuery(reader="ann", scope="accessible", session_id=shared)).sessions
    assert (summary.checkpoints_count, summary.checkpoint_bytes) == (1, 100)
    assert store.sessions.page("ann", limit=10, scope="accessible") == [own, shared]
    assert store.sessions.get(shared, "ann") is None
    assert store.sessions.get(shared, "ann", "accessible") is not None
    assert store.sessions.get(private, "ann", "accessible") is None
    assert store.sessions.members(shared, "ann").model_ids == ["m1"]
    assert store.sessions.members(shared, "bob").model_ids == ["m1", "m2"]


def test_heartbeats_that_arrive_together_are_told_apart(store: Store) -> None:
    mine, ended = (store.sessions.create(ANN).session_id for _ in range(2))
    store.sessions.finish(ended, "ann", "success")
    beats = [Heartbeat(ended, "ann"), Heartbeat(mine, "bob"), Heartbeat(mine, "ann"), Heartbeat("nobody", "ann")]
    assert store.sessions.heartbeats(beats) == ["client_finished", None, "active", None]


def test_a_session_ends_when_its_client_is_not_heard_of_any_more(store: Store, clock: Clock) -> None:
    silent, alive = (store.sessions.create(ANN).session_id for _ in range(2))
    heard = store.sessions.heard()
    assert heard.keys() == {silent, alive}
    clock.pass_(HOUR)
    store.sessions.heartbeats([Heartbeat(alive, "ann")])
    assert store.sessions.end_silent(heard) == [silent]
    assert store.sessions.end_silent(heard) == []
    assert store.sessions.heartbeats([Heartbeat(silent, "ann")]) == ["cancelled"]
    assert store.sessions.heartbeats([Heartbeat(alive, "ann")]) == ["active"]


def test_the_samples_of_a_session_that_ended_in_silence_are_cancelled(store: Store) -> None:
    lost = store.sessions.create(ANN).session_id
    store.jobs.enqueue_many([Submission(job=sample(number, session_id=lost)) for number in range(3)])
    store.jobs.enqueue(training(0, session_id=lost))
    store.jobs.claim("tiny", "w", sample=1)
    store.sessions.end_silent(store.sessions.heard())
    alive = store.sessions.create(ANN).session_id
    store.jobs.enqueue(sample(3, session_id=alive))
    abandoned = store.jobs.cancel_abandoned()
    assert (sorted(abandoned.cancelled), abandoned.asked) == ([f"{SAMPLER}:1", f"{SAMPLER}:2"], ["tiny"])
    assert store.jobs.cancel_asked("tiny", "w") == [f"{SAMPLER}:0"]
    assert seq_ids(store.jobs.claim("tiny", "w", sample=10)) == [3]
    assert seq_ids(store.jobs.claim("tiny", "w", train=10)) == [0]
    assert store.jobs.cancel_abandoned() == Abandoned(cancelled=[], asked=[])


@pytest.mark.parametrize("text", ['a"b', "a.b", "$", "a'b", "a]b", "\\", "%", "ü", ""])
def test_a_search_takes_any_text_in_metadata(store: Store, text: str) -> None:
    session_id = store.sessions.create(NewSession(owner="ann", user_metadata={text: text})).session_id
    store.sessions.create(NewSession(owner="ann", user_metadata={"other": text}))
    assert found_by(store, user_metadata={text: text}) == [session_id]


def test_a_search_by_status(store: Store) -> None:
    lost = store.sessions.create(ANN).session_id
    assert store.sessions.end_silent(store.sessions.heard()) == [lost]
    active = store.sessions.create(ANN).session_id
    good = store.sessions.create(ANN).session_id
    bad = store.sessions.create(ANN).session_id
    store.sessions.finish(good, "ann", "success")
    store.sessions.finish(bad, "ann", "errored")
    assert found_by(store, statuses=(StatusFilter(state="active"),)) == [active]
    assert found_by(store, statuses=(StatusFilter(state="client_finished"),)) == [bad, good]
    errored = StatusFilter(state="client_finished", reasons=("errored", "interrupted"))
    assert found_by(store, statuses=(errored, StatusFilter(state="cancelled"))) == [bad, lost]
    assert found_by(store, statuses=()) == []


def test_a_search_continues_at_its_cursor(store: Store) -> None:
    made = [store.sessions.create(ANN).session_id for _ in range(5)]
    query = SessionQuery(reader="ann", limit=2)
    pages = []
    while True:
        found = store.sessions.search(query)
        pages.append([summary.session.session_id for summary in found.sessions])
        if found.next_cursor is None:
            break
        query = msgspec.structs.replace(query, cursor=found.next_cursor)
    assert pages == [[made[4], made[3]], [made[2], made[1]], [made[0]]]


def test_a_search_tells_how_much_a_session_stores(store: Store) -> None:
    session_id = store.sessions.create(ANN).session_id
    add_model(store, new_model(session_id=session_id))
    store.checkpoints.save(new_checkpoint("one", size_bytes=3))
    store.checkpoints.save(new_checkpoint("two", size_bytes=4))
    (summary,) = store.sessions.search(SessionQuery(reader="ann")).sessions
    assert (summary.checkpoints_count, summary.checkpoint_bytes) == (2, 7)


# Models


def test_a_model_comes_back_as_it_was_made(store: Store) -> None:
    lora = Lora(rank=4, seed=2**40, train_attn=False, train_mlp=True, train_unembed=False)
    store.jobs.enqueue(training(0, kind="create_model"), model=new_model(lora=lora, user_metadata={"a": "b"}))
    model = store.models.get(MODEL, "ann")
    assert model is not None
    assert (model.lora, model.optimizer_config, model.user_metadata) == (lora, {"type": "adamw"}, {"a": "b"})
    assert (model.session_id, model.trainable, model.corrupted) == ("s", True, None)


def test_every_submission_moves_the_time_of_the_last_request(store: Store) -> None:
    store.jobs.enqueue(training(0, kind="create_model"), model=new_model())
    before = store.models.get(MODEL, "ann")
    store.jobs.enqueue(training(1))
    after = store.models.get(MODEL, "ann")
    assert before is not None
    assert after is not None
    assert after.last_request > before.last_request


def test_models_are_listed_newest_first_with_their_number(store: Store) -> None:
    for number in range(5):
        add_model(store, new_model(model_id=f"m{number}"))
    add_model(store, new_model(model_id="foreign", owner="bob"))
    page = store.models.page("ann", limit=2, offset=1)
    assert ([model.model_id for model in page.items], page.total) == (["m3", "m2"], 5)


def test_models_of_a_project_are_those_of_its_sessions(store: Store) -> None:
    session_id = store.sessions.create(NewSession(owner="ann", project_id="p")).session_id
    add_model(store, new_model(model_id="inside", session_id=session_id))
    add_model(store, new_model(model_id="outside"))
    page = store.models.page("ann", limit=10, project_id="p")
    assert ([model.model_id for model in page.items], page.total) == (["inside"], 1)


def test_a_published_checkpoint_makes_its_run_accessible_and_not_owned(store: Store) -> None:
    add_model(store, new_model())
    store.checkpoints.save(new_checkpoint())
    assert store.models.get(MODEL, "bob", "accessible") is None
    store.checkpoints.set_public(new_checkpoint().key, "ann", True)
    assert store.models.get(MODEL, "bob", "accessible") is not None
    assert store.models.get(MODEL, "bob") is None
    assert store.models.page("bob", limit=10, scope="accessible").total == 1
    assert store.models.page("bob", limit=10).total == 0


def test_the_first_reason_for_corruption_stands_until_the_model_goes_on(store: Store) -> None:
    add_model(store, new_model())
    store.models.mark_corrupted(MODEL, "snapshot unreadable")
    store.models.mark_corrupted(MODEL, "later")
    model = store.models.get(MODEL, "ann")
    assert model is not None
    assert model.corrupted == "snapshot unreadable"
    store.models.clear_corrupted(MODEL)
    mended = store.models.get(MODEL, "ann")
    assert mended is not None
    assert mended.corrupted is None


# Samplers and losses


def test_a_repeated_sampling_session_finds_its_first(store: Store) -> None:
    new = NewSampler(
        session_id="s", sampling_session_seq_id=3, owner="ann", base_model="tiny", model_id=MODEL, model_seq_id=9
    )
    made = at_once(8, lambda place: store.samplers.create(msgspec.structs.replace(new, model_seq_id=place)))
    assert made[0].sampler_id == "s:sample:3"
    assert all(sampler == made[0] for sampler in made)
    assert store.samplers.get("s:sample:3", "ann") == made[0]
    assert store.samplers.get("s:sample:3", "bob") is None


def test_a_snapshot_gives_way_to_later_ones_only(store: Store) -> None:
    add_model(store, new_model())
    assert store.models.snapshots() == {MODEL: Snapshots()}
    both = Snapshots(last=9, previous=5)
    assert store.models.set_snapshot(MODEL, 5) == SnapshotChange(is_newest=True, kept=Snapshots(last=5))
    assert store.models.set_snapshot(MODEL, 9) == SnapshotChange(is_newest=True, kept=both)
    assert store.models.set_snapshot(MODEL, 9) == SnapshotChange(is_newest=True, kept=both)
    assert store.models.set_snapshot(MODEL, 7) == SnapshotChange(is_newest=False, kept=both)
    assert store.models.snapshots() == {MODEL: both}


def test_a_damaged_snapshot_is_forgotten_and_never_becomes_the_previous_one(store: Store) -> None:
    add_model(store, new_model())
    for seq_id in (5, 9):
        store.models.set_snapshot(MODEL, seq_id)
    store.models.forget_snapshots(MODEL, [9])
    assert store.models.snapshots() == {MODEL: Snapshots(last=5)}
    assert store.models.set_snapshot(MODEL, 9).kept == Snapshots(last=9, previous=5)
    store.models.forget_snapshots(MODEL, [9, 5])
    assert store.models.snapshots() == {MODEL: Snapshots()}, "what it has loaded is still needed"


def test_a_snapshot_of_a_model_that_was_given_up_is_not_wanted(store: Store, clock: Clock) -> None:
    session_id = store.sessions.create(ANN).session_id
    add_model(store, new_model(session_id=session_id))
    store.sessions.finish(session_id, "ann", "success")
    clock.pass_(HOUR)
    assert store.models.remove_idle(idle_since=clock()) == [MODEL]
    assert store.models.set_snapshot(MODEL, 5) == SnapshotChange(is_newest=False, kept=Snapshots())
    assert store.models.set_snapshot("unknown", 5).is_newest is False
    assert store.models.snapshots() == {}


def test_a_model_is_given_up_long_after_its_session_unless_somebody_works_on_it(store: Store, clock: Clock) -> None:
    ended, active = (store.sessions.create(ANN).session_id for _ in range(2))
    for model_id, session_id in (("idle", ended), ("waited-for", ended), ("used", ended), ("active", active)):
        add_model(store, new_model(model_id=model_id, session_id=session_id))
        store.jobs.enqueue(training(0, model_id=model_id))
    add_model(store, new_model(model_id="copies", session_id=None, trainable=False))
    store.models.set_snapshot("idle", 0)
    store.jobs.enqueue(training(5, model_id="idle"))  # the numbers before it never come
    store.sessions.finish(ended, "ann", "success")
    done = {f"{name}:0": DONE for name in ("idle", "used", "active")}
    store.jobs.claim("tiny", "w", train=10)
    store.jobs.complete("w", done)
    clock.pass_(HOUR)
    since = clock()
    assert len(store.jobs.history("idle", -1, 10)) == 1
    store.jobs.enqueue(training(1, model_id="used"), outcome=DONE)

    assert store.models.remove_idle(idle_since=since) == ["idle"]
    assert store.models.remove_idle(idle_since=since) == []
    assert store.results.statuses(["idle:5"])["idle:5"].outcome == Cancelled()
    removed, used = store.models.get("idle", "ann"), store.models.get("used", "ann")
    assert removed is not None
    assert used is not None
    assert (removed.removed is not None, removed.snapshots, used.removed) == (True, Snapshots(), None)
    assert store.jobs.history("idle", -1, 10) == []
    assert len(store.jobs.history("used", -1, 10)) == 1


def copied(store: Store, session_id: str, number: int) -> str:
    """A sampler with weights copied from a model."""
    sampler = NewSampler(
        session_id=session_id,
        sampling_session_seq_id=number,
        owner="ann",
        base_model="tiny",
        model_id=MODEL,
        model_seq_id=1,
    )
    return store.samplers.create(sampler).sampler_id


def test_copied_weights_are_given_up_with_their_session_unless_somebody_waits_for_them(store: Store) -> None:
    session_id = store.sessions.create(ANN).session_id
    idle, asked = copied(store, session_id, 0), copied(store, session_id, 1)
    named = store.samplers.create(
        NewSampler(session_id=session_id, sampling_session_seq_id=2, owner="ann", base_model="tiny", model_path="x")
    ).sampler_id
    store.jobs.enqueue(sample(0, sampler_id=asked))
    long_ago = datetime(2000, 1, 1, tzinfo=UTC)
    assert store.samplers.remove_copies(long_ago, most=9, unused_since=long_ago) == []
    store.sessions.finish(session_id, "ann", "success")
    assert store.samplers.remove_copies(long_ago, most=9, unused_since=long_ago) == [idle]
    assert store.samplers.kept([idle, asked, named]) == {asked}
    store.jobs.cancel(f"{asked}:0", "ann")
    assert store.samplers.remove_copies(long_ago, most=9, unused_since=long_ago) == [asked]
    removed, still_there = store.samplers.get(idle, "ann"), store.samplers.get(named, "ann")
    assert removed is not None
    assert still_there is not None
    assert (removed.removed is not None, removed.session_state) == (True, "client_finished")
    assert still_there.removed is None


def test_copied_weights_are_given_up_when_nobody_asked_for_them_for_long(store: Store, clock: Clock) -> None:
    session_id = store.sessions.create(ANN).session_id
    idle, used = copied(store, session_id, 0), copied(store, session_id, 1)
    clock.pass_(HOUR)
    since = clock()
    store.jobs.enqueue(sample(0, sampler_id=used), outcome=DONE)
    new = copied(store, session_id, 2)
    assert store.samplers.remove_copies(since, most=9, unused_since=since) == [idle]
    assert store.samplers.kept([idle, used, new]) == {used, new}
    assert sorted(store.samplers.copies_of(MODEL, upto_seq=1)) == sorted([used, new])
    assert store.samplers.copies_of(MODEL, upto_seq=0) == store.samplers.copies_of("other", upto_seq=9) == []


def test_of_many_copied_weights_those_used_longest_ago_are_given_up(store: Store, clock: Clock) -> None:
    session_id = store.sessions.create(ANN).session_id
    sampler_ids = [copied(store, session_id, number) for number in range(6)]
    waited_for, oldest, asked, *newer = sampler_ids
    store.jobs.enqueue(sample(0, sampler_id=waited_for))
    for each in (oldest, *newer, asked):
        clock.pass_(HOUR)
        store.jobs.enqueue(sample(0, sampler_id=each), outcome=DONE)

    def given_up(most: int, unused_for: float) -> list[str]:
        since = clock() - unused_for * HOUR
        return sorted(store.samplers.remove_copies(clock() - 99 * HOUR, most, since))

    assert given_up(most=6, unused_for=0) == []
    assert given_up(most=2, unused_for=9) == []
    assert given_up(most=4, unused_for=0) == [oldest], "the one that is waited for stays"
    assert given_up(most=2, unused_for=2.5) == [newer[0]]
    assert store.samplers.kept(sampler_ids) == {waited_for, asked, *newer[1:]}


def test_an_owner_with_many_copied_weights_takes_none_of_anothers(store: Store, clock: Clock) -> None:
    session_id = store.sessions.create(ANN).session_id
    of_ann = [copied(store, session_id, number) for number in range(2)]
    of_bob = NewSampler(
        session_id=store.sessions.create(NewSession(owner="bob")).session_id,
        sampling_session_seq_id=0,
        owner="bob",
        base_model="tiny",
        model_id="m",
        model_seq_id=1,
    )
    store.samplers.create(of_bob)
    clock.pass_(HOUR)
    assert len(store.samplers.remove_copies(clock() - 9 * HOUR, most=1, unused_since=clock())) == 1
    assert len(store.samplers.kept(of_ann)) == 1


def test_a_sampler_that_follows_a_model_has_no_copied_weights_to_give_up(store: Store, clock: Clock) -> None:
    session_id = store.sessions.create(ANN).session_id
    follows = NewSampler(
        session_id=session_id, sampling_session_seq_id=9, owner="ann", base_model="tiny", model_id=MODEL
    )
    follower = store.samplers.create(follows).sampler_id
    clock.pass_(HOUR)
    of_ann = [copied(store, session_id, number) for number in range(2)]
    clock.pass_(HOUR)
    assert sorted(store.samplers.remove_copies(clock(), most=1, unused_since=clock())) == of_ann
    found = store.samplers.get(follower, "ann")
    assert found is not None
    assert found.removed is None, "its client would be refused for as long as it goes on asking"


def published(store: Store, session_id: str, number: int, **changes: object) -> str:
    """An inflight sampler with the weights of a model after operation `number`."""
    sampler_id = made(store, session_id, number, **changes)
    done = msgspec.structs.replace(DONE, publishes=sampler_id)
    store._database.write(lambda connection: publish(connection, {"its save": done}))
    return sampler_id


def made(store: Store, session_id: str, number: int, **changes: object) -> str:
    """What a worker makes before its job is done."""
    sampler = NewSampler(
        session_id=session_id,
        sampling_session_seq_id=number,
        owner="ann",
        base_model="tiny",
        model_id=MODEL,
        model_seq_id=number,
    )
    return store.samplers.create(msgspec.structs.replace(sampler, **changes)).sampler_id


def source(store: Store, sampler_id: str, owner: str = "ann") -> str:
    sampler = store.samplers.get(sampler_id, owner)
    assert sampler is not None
    return store.samplers.source(sampler).sampler_id


def test_an_inflight_sampler_draws_with_the_newest_weights_that_were_published_for_its_model(store: Store) -> None:
    first, second = published(store, "s", 3), published(store, "s", 5)
    other = published(store, "s", 7, model_id="other")
    snapshot = made(store, "s", 9)
    assert [source(store, each) for each in (first, second, other, snapshot)] == [second, second, other, snapshot]
    newest = published(store, "s", 11)
    assert [source(store, each) for each in (first, second, other, snapshot)] == [newest, newest, other, snapshot]


def test_an_inflight_sampler_draws_with_nothing_of_another_owner(store: Store) -> None:
    of_ann, of_bob = published(store, "s", 3), published(store, "t", 5, owner="bob")
    assert source(store, of_ann) == of_ann
    assert source(store, of_bob, "bob") == of_bob
    assert store.samplers.published(MODEL, "carol") is None


def test_an_inflight_sampler_that_is_made_again_is_the_first(store: Store) -> None:
    first = published(store, "s", 3)
    assert published(store, "s", 3) == first
    assert source(store, first) == first


def test_weights_are_published_when_their_save_is_done_and_not_before(store: Store) -> None:
    first = published(store, "s", 3)
    for number in range(4):
        store.jobs.enqueue(training(number, kind="save_weights_for_sampler"))
    stolen, failed, unwanted, done = (f"{MODEL}:{number}" for number in range(4))
    outcomes = {
        each: msgspec.structs.replace(DONE, publishes=made(store, "s", 4 + n)) for n, each in enumerate([stolen, done])
    }
    store.jobs.claim("tiny", "w", train=9)
    made(store, "s", 7)
    made(store, "s", 8)
    store.jobs.complete("w", {failed: Failed(error="no", category="server"), unwanted: Cancelled()})
    assert store.jobs.complete("another", {stolen: outcomes[stolen]}) == []
    assert source(store, first) == first
    assert store.jobs.complete("w", {done: outcomes[done]}) == [done]
    assert source(store, first) == outcomes[done].publishes
    assert [source(store, f"s:sample:{number}") for number in (4, 7, 8)] == ["s:sample:4", "s:sample:7", "s:sample:8"]


def test_what_is_published_late_is_kept_although_it_was_given_up_meanwhile(store: Store, clock: Clock) -> None:
    session_id = store.sessions.create(ANN).session_id
    late = made(store, session_id, 3)
    clock.pass_(HOUR)
    since = clock()
    assert store.samplers.remove_copies(since, most=9, unused_since=since) == [late]
    assert published(store, session_id, 3) == late
    assert store.samplers.kept([late]) == {late}
    assert source(store, late) == late


def test_published_weights_stay_while_an_older_sampler_may_draw_with_them(store: Store, clock: Clock) -> None:
    session_id = store.sessions.create(ANN).session_id
    used, unused, newest = (published(store, session_id, number) for number in (1, 2, 3))
    clock.pass_(HOUR)
    since = clock()
    store.jobs.enqueue(sample(0, sampler_id=used), outcome=DONE)
    assert store.samplers.remove_copies(since, most=9, unused_since=since) == [unused]
    assert source(store, used) == newest
    assert store.samplers.kept([used, unused, newest]) == {newest}, "nobody asks for the weights of the older ones"
    clock.pass_(HOUR)
    since = clock()
    assert store.samplers.remove_copies(since, most=9, unused_since=since) == [used]
    assert store.samplers.remove_copies(since, most=9, unused_since=since) == [newest]


def test_published_weights_outlive_their_session_until_the_last_sample_is_drawn(store: Store) -> None:
    session_id = store.sessions.create(ANN).session_id
    asked, newest = published(store, session_id, 1), published(store, session_id, 2)
    store.jobs.enqueue(sample(0, sampler_id=asked))
    store.sessions.finish(session_id, "ann", "success")
    long_ago = datetime(2000, 1, 1, tzinfo=UTC)
    assert store.samplers.remove_copies(long_ago, most=9, unused_since=long_ago) == []
    assert store.samplers.kept([newest]) == {newest}
    store.jobs.cancel(f"{asked}:0", "ann")
    assert store.samplers.remove_copies(long_ago, most=9, unused_since=long_ago) == [asked]
    assert store.samplers.remove_copies(long_ago, most=9, unused_since=long_ago) == [newest]


def test_inflight_samplers_without_weights_of_their_own_push_no_weights_out(store: Store, clock: Clock) -> None:
    session_id = store.sessions.create(ANN).session_id
    snapshot, *_, newest = (made(store, session_id, 0), *(published(store, session_id, n) for n in range(1, 6)))
    clock.pass_(HOUR)
    assert store.samplers.remove_copies(clock() - 9 * HOUR, most=2, unused_since=clock()) == []
    assert store.samplers.kept([snapshot, newest]) == {snapshot, newest}


def test_inflight_samplers_without_weights_of_their_own_live_as_long_as_they_may_be_used(
    store: Store, clock: Clock
) -> None:
    session_id = store.sessions.create(ANN).session_id
    seldom_used, *others = (published(store, session_id, number) for number in range(6))
    store.jobs.enqueue(sample(0, sampler_id=seldom_used), outcome=DONE)
    clock.pass_(HOUR)
    assert store.samplers.remove_copies(clock() - 9 * HOUR, most=1, unused_since=clock()) == []
    assert source(store, seldom_used) == others[-1]
    idle_since = clock()
    store.jobs.enqueue(sample(1, sampler_id=seldom_used), outcome=DONE)
    assert sorted(store.samplers.remove_copies(idle_since, most=1, unused_since=idle_since)) == others[:-1]
    assert source(store, seldom_used) == others[-1]


def test_every_clone_gets_its_own_number(store: Store) -> None:
    new = NewSampler(session_id="s", sampling_session_seq_id=0, owner="ann", base_model="tiny")
    sampler_id = store.samplers.create(new).sampler_id
    numbers = at_once(8, lambda _: store.samplers.join(sampler_id, "ann"))
    assert sorted(number or 0 for number in numbers) == list(range(1, 9))
    assert store.samplers.join(sampler_id, "bob") is None


def test_a_repeated_loss_finds_its_first(store: Store) -> None:
    new = NewLoss(session_id="s", custom_loss_seq_id=0, owner="ann", name="mine", definition=b"{}")
    made = store.losses.create(new)
    assert store.losses.create(msgspec.structs.replace(new, definition=b"other")) == made
    assert store.losses.get(made.loss_id, "ann") == made
    assert store.losses.get(made.loss_id, "bob") is None


# Checkpoints


def test_a_checkpoint_comes_back_as_it_was_saved(store: Store, clock: Clock) -> None:
    new = new_checkpoint(user_metadata={"step": "10"}, expires=clock() + HOUR)
    saved = store.checkpoints.save(new)
    assert store.checkpoints.get(new.key, "ann") == saved
    assert saved.key.tinker_path == "tinker://s:train:0/weights/one"
    assert (saved.user_metadata, saved.expires, saved.public) == ({"step": "10"}, new.expires, False)


def test_a_taken_name_is_refused_unless_overwritten(store: Store) -> None:
    store.checkpoints.save(new_checkpoint(user_metadata={"a": "1"}))
    store.checkpoints.set_public(new_checkpoint().key, "ann", True)
    other = new_checkpoint(request_id="later", size_bytes=5)
    with pytest.raises(InvalidInputError, match="exists already"):
        store.checkpoints.save(other)
    replaced = store.checkpoints.save(other, overwrite=True)
    assert (replaced.size_bytes, replaced.user_metadata, replaced.public) == (5, None, False)
    assert store.checkpoints.get(other.key, "ann") == replaced


def test_a_job_that_saves_again_after_a_crash_finds_its_checkpoint(store: Store) -> None:
    first = store.checkpoints.save(new_checkpoint())
    assert store.checkpoints.save(new_checkpoint()) == first


def test_of_many_that_save_one_name_one_succeeds(store: Store) -> None:
    def save(place: int) -> bool:
        try:
            store.checkpoints.save(new_checkpoint(request_id=str(place)))
        except InvalidInputError:
            return False
        return True

    assert sum(at_once(8, save)) == 1


def test_kinds_have_names_of_their_own(store: Store) -> None:
    weights = new_checkpoint()
    sampler = new_checkpoint(key=msgspec.structs.replace(weights.key, kind="sampler_weights"))
    store.checkpoints.save(weights)
    store.checkpoints.save(sampler)
    assert store.checkpoints.page("ann", limit=10).total == 2


def test_only_a_published_checkpoint_can_be_read_by_others(store: Store) -> None:
    key = store.checkpoints.save(new_checkpoint()).key
    assert store.checkpoints.get(key, "bob") is None
    assert store.checkpoints.of_run(MODEL, "bob") == []
    assert not store.checkpoints.set_public(key, "bob", True)
    assert store.checkpoints.set_public(key, "ann", True)
    assert store.checkpoints.set_public(key, "ann", True)
    assert store.checkpoints.get(key, "bob") is not None
    assert len(store.checkpoints.of_run(MODEL, "bob")) == 1
    assert store.checkpoints.page("bob", limit=10).items == []
    store.checkpoints.set_public(key, "ann", False)
    assert store.checkpoints.get(key, "bob") is None


def test_a_published_checkpoint_cannot_be_changed_by_others(store: Store, clock: Clock) -> None:
    key = store.checkpoints.save(new_checkpoint()).key
    store.checkpoints.set_public(key, "ann", True)
    assert not store.checkpoints.delete(key, "bob")
    assert not store.checkpoints.set_expiry(key, "bob", clock())
    assert store.checkpoints.get(key, "ann") is not None


def test_a_checkpoint_past_its_time_is_gone_at_once_and_removed_later(store: Store, clock: Clock) -> None:
    key = store.checkpoints.save(new_checkpoint()).key
    store.checkpoints.set_public(key, "ann", True)
    assert store.checkpoints.set_expiry(key, "ann", clock() + HOUR)
    assert store.checkpoints.expired() == []
    clock.pass_(HOUR)
    assert store.checkpoints.get(key, "ann") is None
    assert store.checkpoints.of_run(MODEL, "ann") == []
    assert store.checkpoints.page("ann", limit=10).total == 0
    assert not store.checkpoints.set_public(key, "ann", False)
    (expired,) = store.checkpoints.expired()
    assert store.checkpoints.delete(expired.key, expired.owner)
    assert store.checkpoints.expired() == []


def test_the_name_of_an_expired_checkpoint_is_free(store: Store, clock: Clock) -> None:
    store.checkpoints.save(new_checkpoint(expires=clock() + HOUR))
    clock.pass_(HOUR)
    saved = store.checkpoints.save(new_checkpoint(request_id="later"))
    assert saved.expires is None
    assert store.checkpoints.expired() == []


def test_checkpoints_are_listed_newest_first_with_their_number(store: Store) -> None:
    for name in ("one", "two", "three"):
        store.checkpoints.save(new_checkpoint(name))
    page = store.checkpoints.page("ann", limit=2)
    assert ([checkpoint.key.name for checkpoint in page.items], page.total) == (["three", "two"], 3)
    assert [checkpoint.key.name for checkpoint in store.checkpoints.of_run(MODEL, "ann")] == ["three", "two", "one"]


def test_the_latest_checkpoint_of_many_runs_in_one_query(store: Store) -> None:
    for run, name in (("r1", "old"), ("r1", "new"), ("r2", "only")):
        key = msgspec.structs.replace(new_checkpoint(name).key, run_id=run)
        store.checkpoints.save(new_checkpoint(name, key=key))
    latest = store.checkpoints.latest(["r1", "r2", "r3"], "weights", "ann")
    assert {run: checkpoint.key.name for run, checkpoint in latest.items()} == {"r1": "new", "r2": "only"}
    assert store.checkpoints.latest(["r1"], "sampler_weights", "ann") == {}
    assert store.checkpoints.latest(["r1"], "weights", "bob") == {}


def test_storage_is_counted_by_project(store: Store) -> None:
    session_id = store.sessions.create(NewSession(owner="ann", project_id="p")).session_id
    add_model(store, new_model(session_id=session_id))
    store.checkpoints.save(new_checkpoint("one", size_bytes=2**40))
    store.checkpoints.save(new_checkpoint("two", size_bytes=1))
    assert store.checkpoints.storage("ann") == [Storage(project_id="p", count=2, size_bytes=2**40 + 1)]
    assert store.checkpoints.storage("bob") == []


def test_a_run_of_copies_has_a_project_of_its_own(store: Store) -> None:
    session_id = store.sessions.create(NewSession(owner="ann", project_id="old")).session_id
    add_model(store, new_model(model_id="trained", session_id=session_id))
    add_model(store, new_model(model_id="copied", session_id=None, project_id="team", trainable=False))
    key = CheckpointKey(run_id="copied", kind="weights", name="one")
    store.checkpoints.save(new_checkpoint(key=key, size_bytes=7))

    def runs(project_id: str) -> list[str]:
        return [model.model_id for model in store.models.page("ann", limit=10, project_id=project_id).items]

    assert (runs("old"), runs("team")) == (["trained"], ["copied"])
    store.sessions.set_project(session_id, "ann", "team")
    assert runs("team") == ["copied", "trained"]
    assert store.checkpoints.storage("ann") == [Storage(project_id="team", count=1, size_bytes=7)]


# Keys


def test_a_key_is_shown_once_and_verified_by_its_hash(store: Store) -> None:
    new = store.keys.create("ann", "laptop", note="mine")
    assert new.plain.startswith("tml-")
    assert store.keys.verify(new.plain) == new.key
    assert store.keys.verify(new.plain + "x") is None
    assert new.plain not in repr(new)
    assert new.plain not in repr(store.keys.all())
    assert new.key.hint == new.plain[-4:]


def test_a_name_and_the_last_free_place_are_given_once_however_many_ask_at_once(store: Store) -> None:
    store.keys.create("ann", "first")

    def create(name: str) -> bool:
        try:
            store.keys.create("ann", name, most=3)
        except KeyRefusedError:
            return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(create, 6 * ["same"])) == 1
        assert sum(threads.map(create, "abcdef")) == 1
    assert not create("one more")
    assert store.keys.create("bob", "same").key.owner == "bob"


def test_half_a_hash_proves_nothing(store: Store) -> None:
    new = store.keys.create("ann", "laptop")
    similar = sa.update(schema.keys).values(hash=schema.keys.c.prefix + "0" * 56)
    store._database.write(lambda connection: connection.execute(similar))
    assert store.keys.verify(new.plain) is None


def test_a_revoked_key_is_refused_at_once(store: Store) -> None:
    new = store.keys.create("ann", "laptop")
    assert store.keys.revoke(new.key.key_id)
    assert store.keys.verify(new.plain) is None
    assert not store.keys.revoke(new.key.key_id)
    assert not store.keys.revoke(999)


def test_a_configured_key_keeps_its_owner_over_restarts(store: Store) -> None:
    first = store.keys.register("tml-team", "config")
    assert store.keys.register("tml-team", "config") == first
    other = store.keys.register("tml-other", "config")
    assert first.owner != other.owner
    assert store.keys.verify("tml-team") == first


def test_a_revoked_key_does_not_come_back_by_configuration(store: Store) -> None:
    key = store.keys.register("tml-team", "config")
    store.keys.revoke(key.key_id)
    store.keys.register("tml-team", "config")
    assert store.keys.verify("tml-team") is None


def test_keys_are_listed_by_owner(store: Store) -> None:
    ann = store.keys.create("ann", "a").key
    bob = store.keys.create("bob", "b").key
    assert store.keys.all() == [ann, bob]
    assert store.keys.all("bob") == [bob]


# Audit


def test_the_audit_trail_is_the_owners_and_can_be_narrowed(store: Store, clock: Clock) -> None:
    published = NewEvent(
        owner="ann", event="checkpoint_publish", details={"by": "ann"}, tinker_path="tinker://r/weights/x"
    )
    store.audit.record(published)
    clock.pass_(timedelta(days=1))
    store.audit.record(NewEvent(owner="ann", event="session_end"))
    store.audit.record(NewEvent(owner="ann", event="session_end", outcome="refused"))
    store.audit.record(NewEvent(owner="bob", event="checkpoint_publish"))
    assert [event.event for event in store.audit.events("ann")] == ["session_end", "checkpoint_publish"]
    (shown,) = store.audit.events("ann", resource="checkpoint")
    assert (shown.details, shown.tinker_path) == ({"by": "ann"}, "tinker://r/weights/x")
    assert [event.event for event in store.audit.events("ann", day=shown.time.date())] == ["checkpoint_publish"]


# Values no database takes


@pytest.mark.parametrize(
    "session",
    [
        NewSession(owner="ann", user_metadata={"a": "\ud800"}),
        NewSession(owner="ann", user_metadata={"a": "nul\x00"}),
        NewSession(owner="ann", display_name="\ud800"),
    ],
)
def test_text_that_cannot_be_stored_is_refused(store: Store, session: NewSession) -> None:
    with pytest.raises(InvalidInputError):
        store.sessions.create(session)
    assert store.sessions.page("ann", limit=1) == []
