"""What those who wait get to see, and for how long."""

from __future__ import annotations

import threading
from datetime import timedelta

from tests.server.store.making import DONE, MODEL, SAMPLER, Clock, at_once, sample, seq_ids, training
from tinsmith.server.store import Store
from tinsmith.server.store.records import Cancelled, Done, Expired, Failed, Outcome, Status, Submission

DAY = timedelta(days=1)


def finish_sample(store: Store, seq_id: int, outcome: Outcome = DONE, sampler_id: str = SAMPLER) -> str:
    request_id = store.jobs.enqueue(sample(seq_id, sampler_id=sampler_id)).request_id
    store.jobs.claim("tiny", "w", sample=1)
    assert store.jobs.complete("w", {request_id: outcome}) == [request_id]
    return request_id


def status(store: Store, request_id: str) -> Status:
    return store.results.statuses([request_id])[request_id]


def test_one_query_tells_all_who_wait(store: Store) -> None:
    done = finish_sample(store, 0, Done(result=b"\x00\xff", content_type="application/x-protobuf"))
    failed = finish_sample(store, 1, Failed(error="too long", category="user"))
    running = store.jobs.enqueue(sample(2)).request_id
    store.jobs.claim("tiny", "w", sample=1)
    queued = store.jobs.enqueue(training(1)).request_id
    statuses = store.results.statuses([done, failed, running, queued, "unknown:0"])
    assert {request_id: (status.state, status.outcome) for request_id, status in statuses.items()} == {
        done: ("done", Done(result=b"\x00\xff", content_type="application/x-protobuf")),
        failed: ("failed", Failed(error="too long", category="user")),
        running: ("running", None),
        queued: ("queued", None),
    }


def test_waiting_for_nothing_is_answered_with_nothing(store: Store) -> None:
    assert store.results.statuses([]) == {}
    assert store.results.newest([]) == {}


def test_a_status_tells_whose_it_is_and_whether_a_lower_number_is_missing(store: Store) -> None:
    found = status(store, finish_sample(store, 0))
    assert (found.owner, found.kind, found.base_model, found.is_held_up) == ("ann", "sample", "tiny", False)
    ahead, first = (store.jobs.enqueue(training(seq_id)).request_id for seq_id in (1, 0))
    assert [status(store, request_id).is_held_up for request_id in (first, ahead)] == [False, False]
    assert status(store, store.jobs.enqueue(training(3)).request_id).is_held_up


def test_an_empty_result_is_a_result(store: Store) -> None:
    request_id = finish_sample(store, 0, Done(result=b"", content_type="x"))
    assert status(store, request_id).outcome == Done(result=b"", content_type="x")


def test_a_result_can_be_fetched_again(store: Store) -> None:
    request_id = finish_sample(store, 0)
    assert status(store, request_id) == status(store, request_id)


def test_a_cursor_sees_every_completion_once_in_the_order_of_finishing(store: Store) -> None:
    store.jobs.enqueue_many([Submission(job=sample(seq_id)) for seq_id in range(4)])
    store.jobs.claim("tiny", "w", sample=4)
    store.jobs.complete("w", {f"{SAMPLER}:2": DONE})
    store.jobs.complete("w", {f"{SAMPLER}:0": Failed(error="no", category="user")})
    first = store.results.completions(SAMPLER, 0, 0)
    assert [(item.request_id, item.state, item.size) for item in first.items] == [
        (f"{SAMPLER}:2", "finished", len(DONE.result)),
        (f"{SAMPLER}:0", "failed", 0),
    ]
    store.jobs.complete("w", {f"{SAMPLER}:1": DONE})
    second = store.results.completions(SAMPLER, 0, first.cursor)
    assert [item.request_id for item in second.items] == [f"{SAMPLER}:1"]
    assert store.results.completions(SAMPLER, 0, second.cursor) == type(second)(items=[], cursor=second.cursor)


def test_a_cancelled_and_a_refused_sample_count_as_failed_completions(store: Store) -> None:
    store.jobs.enqueue(sample(0))
    store.jobs.cancel(f"{SAMPLER}:0", "ann")
    store.jobs.enqueue(sample(1), outcome=Failed(error="no", category="user"))
    assert [item.state for item in store.results.completions(SAMPLER, 0, 0).items] == ["failed", "failed"]


def test_clones_of_a_sampling_client_see_their_own_completions(store: Store) -> None:
    mine = finish_sample(store, 5)
    theirs = finish_sample(store, 3_000_000_007)
    assert [item.request_id for item in store.results.completions(SAMPLER, 0, 0).items] == [mine]
    assert [item.request_id for item in store.results.completions(SAMPLER, 3, 0).items] == [theirs]


def test_one_query_tells_which_sampling_sessions_have_news(store: Store) -> None:
    finish_sample(store, 0)
    before = store.results.newest([SAMPLER, "s:sample:1"])
    finish_sample(store, 0, sampler_id="s:sample:1")
    after = store.results.newest([SAMPLER, "s:sample:1"])
    assert after[SAMPLER] == before[SAMPLER]
    assert after["s:sample:1"] > before.get("s:sample:1", 0)


def test_a_poller_who_saw_everything_has_no_news(store: Store) -> None:
    store.jobs.enqueue_many([Submission(job=sample(0)), Submission(job=sample(0, sampler_id="s:sample:1"))])
    store.jobs.claim("tiny", "w", sample=2)
    store.jobs.complete("w", {f"{SAMPLER}:0": DONE, "s:sample:1:0": DONE})
    store.jobs.cancel(f"{SAMPLER}:0", "bob")
    for clone in (0, 1, 2, 5):  # the third counts to beyond 32 bits
        assert store.results.completions(SAMPLER, clone, 0).cursor == store.results.newest([SAMPLER])[SAMPLER]


def test_more_completions_than_one_answer_holds_come_in_several(store: Store) -> None:
    store.jobs.enqueue_many([Submission(job=sample(seq_id), outcome=DONE) for seq_id in range(1500)])
    first = store.results.completions(SAMPLER, 0, 0)
    second = store.results.completions(SAMPLER, 0, first.cursor)
    seen = [item.request_id for item in [*first.items, *second.items]]
    assert seen == [f"{SAMPLER}:{seq_id}" for seq_id in range(1500)]


def test_a_poller_among_many_finishing_threads_misses_nothing(store: Store) -> None:
    total = 120
    store.jobs.enqueue_many([Submission(job=sample(seq_id)) for seq_id in range(total)])
    store.jobs.claim("tiny", "w", sample=total)
    finished = threading.Event()
    seen: list[str] = []

    def poll() -> None:
        cursor, is_last = 0, False
        while not is_last:
            is_last = finished.is_set()
            completions = store.results.completions(SAMPLER, 0, cursor)
            seen.extend(item.request_id for item in completions.items)
            cursor = completions.cursor

    poller = threading.Thread(target=poll)
    poller.start()
    at_once(6, lambda place: [store.jobs.complete("w", {f"{SAMPLER}:{n}": DONE}) for n in range(place, total, 6)])
    finished.set()
    poller.join(timeout=60)
    assert sorted(seen) == sorted(f"{SAMPLER}:{seq_id}" for seq_id in range(total))


def test_freed_samples_are_gone_but_their_numbers_stay_used(store: Store) -> None:
    request_id = finish_sample(store, 0)
    store.results.free("bob", [request_id, *map(str, range(70_000))])
    assert status(store, request_id).outcome == DONE
    store.results.free("ann", [request_id])
    assert status(store, request_id).outcome == Expired()
    assert store.results.completions(SAMPLER, 0, 0).items == []
    assert not store.jobs.enqueue(sample(0)).is_new


def test_results_are_kept_for_their_time_and_then_removed(store: Store, clock: Clock) -> None:
    old = finish_sample(store, 0)
    clock.pass_(DAY)
    new = finish_sample(store, 1)
    waiting = store.jobs.enqueue(sample(2)).request_id
    assert store.results.expire(clock() - DAY / 2) == 1
    assert sorted(store.results.statuses([old, new, waiting])) == sorted([new, waiting])


def test_many_results_expire_in_small_transactions(store: Store, clock: Clock) -> None:
    store.jobs.enqueue_many([Submission(job=sample(seq_id), outcome=DONE) for seq_id in range(1200)])
    assert store.results.expire(clock()) == 1200
    assert store.results.statuses([f"{SAMPLER}:0"]) == {}


def test_training_that_may_be_replayed_outlives_its_result(store: Store, clock: Clock) -> None:
    request_id = store.jobs.enqueue(training(0)).request_id
    store.jobs.claim("tiny", "w", train=1)
    store.jobs.complete("w", {request_id: DONE})
    store.results.expire(clock())
    assert status(store, request_id).outcome == Expired()
    assert seq_ids(store.jobs.history(MODEL, -1, 10)) == [0]
    store.jobs.forget_payloads(MODEL, 0)
    store.results.expire(clock())
    assert store.results.statuses([request_id]) == {}


def test_training_that_failed_changed_nothing_and_is_not_kept_for_replay(store: Store, clock: Clock) -> None:
    request_id = store.jobs.enqueue(training(0)).request_id
    store.jobs.claim("tiny", "w", train=1)
    store.jobs.complete("w", {request_id: Failed(error="no", category="user")})
    store.results.expire(clock())
    assert store.results.statuses([request_id]) == {}


def test_a_number_stays_used_after_its_job_was_removed(store: Store, clock: Clock) -> None:
    request_id = store.jobs.enqueue(training(0), outcome=Failed(error="no", category="user")).request_id
    store.results.expire(clock())
    assert store.results.statuses([request_id]) == {}
    assert not store.jobs.enqueue(training(0)).is_new
    assert store.jobs.claim("tiny", "w", train=1) == []


def test_a_number_refused_ahead_of_a_missing_one_is_not_forgotten(store: Store, clock: Clock) -> None:
    store.jobs.enqueue(training(1), outcome=Failed(error="no", category="user"))
    store.jobs.enqueue(training(2))
    store.results.expire(clock())
    store.jobs.enqueue(training(0))
    assert seq_ids(store.jobs.claim("tiny", "w", train=10)) == [0, 2]


def test_records_show_no_prompts() -> None:
    assert "secret" not in repr(sample(0, payload=b"secret"))
    assert "secret" not in repr(Done(result=b"secret", content_type="x"))
    assert repr(Cancelled()) == "Cancelled()"
