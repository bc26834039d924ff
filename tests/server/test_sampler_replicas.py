"""A worker that only trains and one that only samples, on one store: together they give what one worker gives."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.server.workbench import WAIT_SECONDS, Workbench, hold_up
from tinsmith.server import sampling_weights, weights_exchange, weights_sources
from tinsmith.server.engine.adapter_files import PackedAdapter, pack
from tinsmith.server.engine.adapters import FrozenAdapter
from tinsmith.server.full_disk import WaitError
from tinsmith.server.live_models import LiveModels
from tinsmith.server.messages import Role
from tinsmith.server.store.records import Failed, NewJob
from tinsmith.server.weights_exchange import Answer, Parcel, PublishedWeights, ReceivedWeights, WeightsWanted
from tinsmith.wire import proto

REPLICA = "sample-0"


class Pair:
    """The trainer's bench and the replica's, each with an engine of its own. Samples are for the replica."""

    def __init__(self, state: Path, folder: Path) -> None:
        self.trainer, self.replica = Workbench(state, folder), Workbench(state, folder)
        _take_role(self.trainer, "train", "train")
        _take_role(self.replica, "sample", REPLICA)
        self.put: list[PackedAdapter] = []
        self.asked: list[WeightsWanted] = []
        self.published: PublishedWeights | None = None
        self.received = ReceivedWeights(self._ask, self.replica.ring)
        self.is_sent = True
        self.has_arrived = threading.Event()

    @contextmanager
    def training(self) -> Iterator[None]:
        self.published = PublishedWeights(self._put, self._send, self.trainer.ring)
        with self.trainer.worker(published=self.published):
            yield
        self.published = None

    @contextmanager
    def sampling(self) -> Iterator[None]:
        with self.replica.worker(received=self.received):
            yield
        self.received = ReceivedWeights(self._ask, self.replica.ring)

    def sample(self, sampler_id: str, seq_id: int, **params: Any) -> str:
        request_id = self.replica.sample(sampler_id, seq_id, max_tokens=8, temperature=0.5, **params)
        self.replica.store.jobs.deal({request_id: REPLICA})
        self.replica.ring()
        return request_id

    def _put(self, frozen: FrozenAdapter) -> PackedAdapter:
        self.put.append(pack(frozen))
        return self.put[-1]

    def _send(self, parcel: Parcel) -> None:
        if self.is_sent:
            self.received.take(parcel)
            self.has_arrived.set()

    def _ask(self, wanted: WeightsWanted) -> Future[Answer]:
        self.asked.append(wanted)
        if self.published is not None:
            return self.published.ask(wanted)
        away: Future[Answer] = Future()
        away.set_exception(ConnectionError("the trainer is gone"))
        return away


def _take_role(bench: Workbench, role: Role, place: str) -> None:
    bench.settings = msgspec.structs.replace(bench.settings, role=role, place=place)


@pytest.fixture
def pair(tmp_path: Path, tiny_folder: Path) -> Pair:
    return Pair(tmp_path, tiny_folder)


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("alone"), tiny_folder)


def trained(bench: Workbench) -> str:
    model = bench.create("s:train:0")
    train(bench, model, range(1, 5))
    return model


def train(bench: Workbench, model: str, seq_ids: range) -> None:
    """To the end of the last step, which the losses do not wait for."""
    bench.losses(bench.train(model, seq_ids))
    bench.result(f"{model}:{seq_ids[-1]}")


def test_each_claims_its_own_kind(pair: Pair) -> None:
    sampler = pair.replica.base_sampler()
    job = pair.sample(sampler, 0)
    with pair.training():
        trained(pair.trainer)
        assert pair.trainer.store.results.statuses([job])[job].state == "queued"
        with pair.sampling():
            assert len(pair.replica.tokens(job)) == 8


def test_the_samples_are_those_that_one_worker_draws(pair: Pair, alone: Workbench) -> None:
    with alone.worker():
        sampler = alone.copied_sampler(trained(alone), 5)
        expected = alone.tokens(alone.sample(sampler, 0, max_tokens=8, temperature=0.5))
        base = alone.tokens(alone.sample(alone.base_sampler(), 1, max_tokens=8, temperature=0.5))
    assert expected != base
    with pair.training(), pair.sampling():
        sampler = pair.trainer.copied_sampler(trained(pair.trainer), 5)
        assert pair.replica.tokens(pair.sample(sampler, 0)) == expected
        assert pair.replica.tokens(pair.sample(pair.replica.base_sampler(), 1)) == base


def test_weights_are_put_once_and_sent_before_anybody_asks(pair: Pair) -> None:
    with pair.training():
        sampler = pair.trainer.copied_sampler(trained(pair.trainer), 5)
        assert pair.has_arrived.wait(60)
        with pair.sampling():
            assert len({tuple(pair.replica.tokens(pair.sample(sampler, number))) for number in range(3)}) == 1
    assert len(pair.put) == 1
    assert pair.asked == []


def test_a_replica_that_came_later_asks_once_and_gets_what_was_put(pair: Pair) -> None:
    pair.is_sent = False
    with pair.training(), pair.sampling():
        sampler = pair.trainer.copied_sampler(trained(pair.trainer), 5)
        assert len({tuple(pair.replica.tokens(pair.sample(sampler, number))) for number in range(3)}) == 1
    assert len(pair.put) == 1
    assert len(pair.asked) == 1


def test_what_cannot_be_put_now_is_asked_for_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = pair._put, iter([False, False, True])
    monkeypatch.setattr(pair, "_put", lambda frozen: real(frozen) if next(tries) else 1 / 0)
    with pair.training(), pair.sampling():
        sampler = pair.trainer.copied_sampler(trained(pair.trainer), 5)
        assert len(pair.replica.tokens(pair.sample(sampler, 0))) == 8
    assert len(pair.asked) == 2


def test_a_sampler_that_follows_a_model_has_its_newest_weights(pair: Pair, alone: Workbench) -> None:
    with alone.worker():
        model = trained(alone)
        follower = alone.following_sampler(model)
        expected = [alone.tokens(alone.sample(follower, 0, max_tokens=8, temperature=0.5))]
        train(alone, model, range(5, 9))
        expected.append(alone.tokens(alone.sample(follower, 1, max_tokens=8, temperature=0.5)))
    with pair.training(), pair.sampling():
        model = trained(pair.trainer)
        follower = pair.trainer.following_sampler(model)
        found = [pair.replica.tokens(pair.sample(follower, 0))]
        assert pair.replica.tokens(pair.sample(follower, 5)) == found[0]
        assert len(pair.put) == 1
        train(pair.trainer, model, range(5, 9))
        found.append(pair.replica.tokens(pair.sample(follower, 1)))
    assert found == expected
    assert len(pair.put) == 2


def test_a_refused_operation_does_not_keep_a_follower_waiting(pair: Pair) -> None:
    """Its number is used up without that the trainer hears of it."""
    with pair.training(), pair.sampling():
        model = trained(pair.trainer)
        whose = {"owner": "ann", "session_id": "s", "base_model": "tiny", "model_id": model}
        refused = NewJob(kind="optim_step", payload=b"", seq_id=5, **whose)
        pair.trainer.store.jobs.enqueue(refused, outcome=Failed(error="no", category="user"))
        assert len(pair.replica.tokens(pair.sample(pair.trainer.following_sampler(model), 0))) == 8


def test_a_new_trainer_makes_again_what_the_last_one_had_published(pair: Pair) -> None:
    with pair.training():
        sampler = pair.trainer.copied_sampler(trained(pair.trainer), 5)
    with pair.training(), pair.sampling():
        first = pair.replica.tokens(pair.sample(sampler, 0))
    with pair.training(), pair.sampling():
        assert pair.replica.tokens(pair.sample(sampler, 1)) == first


def test_without_its_trainer_a_replica_reads_the_weights_that_were_written(pair: Pair) -> None:
    with pair.training(), pair.sampling():
        sampler = pair.trainer.copied_sampler(trained(pair.trainer), 5)
        first = pair.replica.tokens(pair.sample(sampler, 0))
    # Ending in good order, the trainer has written its models, and before that what cannot be built from them.
    with pair.sampling():
        assert pair.replica.tokens(pair.sample(sampler, 1)) == first


def test_a_sample_waits_for_a_trainer_that_is_away_and_others_do_not(pair: Pair) -> None:
    with pair.training():
        follower = pair.trainer.following_sampler(trained(pair.trainer))
    with pair.sampling():
        waits = pair.sample(follower, 0)
        assert len(pair.replica.tokens(pair.sample(pair.replica.base_sampler(), 1))) == 8
        assert "is being started again" in pair.replica.no_room[follower]
        assert pair.replica.store.results.statuses([waits])[waits].outcome is None
        with pair.training():
            assert len(pair.replica.tokens(waits)) == 8
            while follower in pair.replica.no_room:  # which is told once a second
                time.sleep(0.01)


def test_a_sample_waits_for_a_busy_trainer_and_others_do_not(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair.training(), pair.sampling():
        model = trained(pair.trainer)
        follower = pair.trainer.following_sampler(model)
        reached, go_on = hold_up(monkeypatch, pair.trainer.engine, "forward_backward")
        pair.trainer.data(model, 5)
        assert reached.wait(60)
        waits = pair.sample(follower, 0)
        assert len(pair.replica.tokens(pair.sample(pair.replica.base_sampler(), 1))) == 8
        assert "on their way" in pair.replica.no_room[follower]
        go_on.set()
        assert len(pair.replica.tokens(waits)) == 8


def test_weights_that_are_lost_are_a_failure_of_the_server(pair: Pair) -> None:
    with pair.training(), pair.sampling():
        sampler = pair.trainer.following_sampler("s:train:7")
        outcome = pair.replica.outcome(pair.sample(sampler, 0))
        assert isinstance(outcome, Failed)
        assert "is not kept any more" in outcome.error


def parcel(name: str, seq_id: int = -1, size: int = 8) -> Parcel:
    return Parcel(name, PackedAdapter({}, "float32", np.zeros(size, np.uint8)), seq_id)


def received(answers: dict[str, Answer]) -> tuple[ReceivedWeights, list[str]]:
    """A replica's end whose trainer has these, and the names that it is asked for."""
    asked: list[str] = []

    def ask(wanted: WeightsWanted) -> Future[Answer]:
        asked.append(wanted.name)
        answer: Future[Answer] = Future()
        if wanted.name in answers:
            answer.set_result(answers[wanted.name])
        return answer

    return ReceivedWeights(ask, lambda: None), asked


def test_a_replica_keeps_a_bounded_number_of_unused_weights_and_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_exchange, "MAX_UNUSED", 3)
    monkeypatch.setattr(weights_exchange, "MAX_UNUSED_BYTES", 100)
    weights, asked = received({})
    for name in "abcde":
        weights.take(parcel(name))
    assert [weights.get(WeightsWanted(name, "ann")).done() for name in "edcba"] == [True, True, True, False, False]
    for name in "fgh":
        weights.take(parcel(name, size=90))
    assert [weights.get(WeightsWanted(name, "ann")).done() for name in "hgf"] == [True, False, False]
    assert asked == ["b", "a", "g", "f"]


def test_of_a_model_as_it_was_only_what_is_new_enough_counts() -> None:
    weights, asked = received({})
    weights.take(parcel("model", 5))
    answer = weights.get(WeightsWanted("s", "ann", "model", 6))
    assert asked == ["model"]
    weights.take(parcel("model", 4))
    assert not answer.done()
    weights.take(parcel("model", 7))
    found = answer.result(0)
    assert isinstance(found, Parcel)
    assert found.seq_id == 7
    assert weights.get(WeightsWanted("s", "ann", "model", 5)).done(), "the older ones were not handed out"


def test_what_is_taken_is_a_copy() -> None:
    """What lies in the memory that all share is needed for others."""
    weights, _ = received({})
    sent = parcel("a")
    weights.take(sent)
    taken = weights.get(WeightsWanted("a", "ann")).result(0)
    assert isinstance(taken, Parcel)
    assert not np.shares_memory(taken.weights.flat, sent.weights.flat)


def test_weights_that_come_just_after_their_first_sample_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, asked = received({})

    def wait_while_they_come(answers: list[Future[Answer]], seconds: float) -> object:
        weights.take(parcel("a"))
        return wait(answers, seconds)

    monkeypatch.setattr(weights_exchange, "wait", wait_while_they_come)
    weights.take(parcel("another"))
    assert weights.get(WeightsWanted("a", "ann"), 60.0).done()
    assert asked == []


def test_weights_are_not_waited_for_where_nothing_was_ever_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, asked = received({"a": parcel("a")})
    monkeypatch.setattr(weights_exchange, "wait", lambda *_: pytest.fail("it waits in vain"))
    assert weights.get(WeightsWanted("a", "ann"), 60.0).done()
    weights.get(WeightsWanted("b", "ann"), 60.0)
    assert asked == ["a", "b"], "an answer is not sent unasked"


def test_weights_that_were_made_again_take_the_place_of_those_before() -> None:
    """By the worker after one that had sent them and died before it had written down that it was done."""
    weights, _ = received({})
    weights.take(parcel("a", size=8))
    weights.take(parcel("a", size=9))
    taken = weights.get(WeightsWanted("a", "ann")).result(0)
    assert isinstance(taken, Parcel)
    assert taken.weights.flat.size == 9


def test_only_new_samplers_wait_for_weights_that_nobody_has_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others would wait in vain, and everybody with them."""
    patience: dict[str, float] = {}
    get = ReceivedWeights.get

    def note(received: ReceivedWeights, wanted: WeightsWanted, seconds: float = 0.0) -> Future[Answer]:
        patience[wanted.sampler_id] = seconds
        return get(received, wanted, seconds)

    monkeypatch.setattr(ReceivedWeights, "get", note)
    with pair.training(), pair.sampling():
        model = trained(pair.trainer)
        new, old = (pair.trainer.copied_sampler(model, seq_id) for seq_id in (5, 6))
        follower = pair.trainer.following_sampler(model)
        for sampler, age in ((new, timedelta(days=1)), (old, timedelta(0)), (follower, timedelta(days=1))):
            monkeypatch.setattr(weights_sources, "NEW", age)
            pair.replica.tokens(pair.sample(sampler, 0))
    assert patience == {new: weights_sources.ON_THEIR_WAY_SECONDS, old: 0.0, follower: 0.0}


# --- inflight samplers ---


def logprobs(bench: Workbench, request_id: str) -> list[float]:
    found = proto.decode_sample_response(bench.result(request_id)).sequences[0].logprobs
    assert found is not None
    return list(found)


def go_on(bench: Workbench, model: str) -> None:
    bench.losses([bench.data(model, 6)])
    bench.result(bench.step(model, 7))


@pytest.fixture
def expected(alone: Workbench) -> list[list[float]]:
    """What is drawn after the first and after the second part of a training."""
    with alone.worker():
        model = trained(alone)
        samplers = [alone.copied_sampler(model, 5)]
        go_on(alone, model)
        samplers.append(alone.copied_sampler(model, 8))
        return [logprobs(alone, alone.sample(each, 0, max_tokens=8, temperature=0.5)) for each in samplers]


def test_replicas_draw_with_what_was_published_last(pair: Pair, expected: list[list[float]]) -> None:
    with pair.training(), pair.sampling():
        model = trained(pair.trainer)
        first = pair.trainer.copied_sampler(model, 5, "inflight")
        assert logprobs(pair.replica, pair.sample(first, 0)) == pytest.approx(expected[0], abs=1e-5)
        go_on(pair.trainer, model)
        assert logprobs(pair.replica, pair.sample(first, 1)) == pytest.approx(expected[0], abs=1e-5)
        second = pair.trainer.copied_sampler(model, 8, "inflight")
        for sampler, number in ((first, 2), (second, 0)):
            assert logprobs(pair.replica, pair.sample(sampler, number)) == pytest.approx(expected[1], abs=1e-5)
    assert len(pair.put) == 2


def test_a_sample_that_waits_in_the_queue_begins_with_what_was_published_meanwhile(
    pair: Pair, expected: list[list[float]]
) -> None:
    with pair.training():
        model = trained(pair.trainer)
        job = pair.sample(pair.trainer.copied_sampler(model, 5, "inflight"), 0)
        go_on(pair.trainer, model)
        pair.trainer.copied_sampler(model, 8, "inflight")
        with pair.sampling():
            assert logprobs(pair.replica, job) == pytest.approx(expected[1], abs=1e-5)


def test_who_publishes_faster_than_weights_travel_keeps_no_sample_waiting(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, expected: list[list[float]]
) -> None:
    """It wants the weights that were the newest when it was to begin, not those that are the newest now."""
    pair.is_sent = False
    with pair.training(), pair.sampling():
        model = trained(pair.trainer)
        first = pair.trainer.copied_sampler(model, 5, "inflight")
        held: list[Future[Any]] = []
        monkeypatch.setattr(pair, "published", _HeldBack(pair.published, held))
        waits = pair.sample(first, 0)
        until_waiting(pair, first)
        go_on(pair.trainer, model)
        second = pair.trainer.copied_sampler(model, 8, "inflight")
        ((answer, real),) = held
        answer.set_result(real.result(60))
        assert logprobs(pair.replica, waits) == pytest.approx(expected[0], abs=1e-5)
        assert [wanted.sampler_id for wanted in pair.asked] == [first]
        later = pair.sample(first, 1)
        until(lambda: len(held) == 2)
        held[1][0].set_result(held[1][1].result(60))
        assert logprobs(pair.replica, later) == pytest.approx(expected[1], abs=1e-5)
        assert [wanted.sampler_id for wanted in pair.asked] == [first, second]


def test_a_new_trainer_and_nobody_at_all_have_what_was_published_last(pair: Pair, expected: list[list[float]]) -> None:
    with pair.training():
        model = trained(pair.trainer)
        first = pair.trainer.copied_sampler(model, 5, "inflight")
        go_on(pair.trainer, model)
        pair.trainer.copied_sampler(model, 8, "inflight")
    with pair.training(), pair.sampling():
        assert logprobs(pair.replica, pair.sample(first, 0)) == pytest.approx(expected[1], abs=1e-5)
    with pair.sampling():
        assert logprobs(pair.replica, pair.sample(first, 1)) == pytest.approx(expected[1], abs=1e-5)


# --- weights that come late, or not at all ---


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end, "that has not come about"
        time.sleep(0.01)


def until_waiting(pair: Pair, sampler: str) -> None:
    until(lambda: sampler in pair.replica.no_room)


def test_a_late_answer_is_not_for_samples_that_came_after_it(
    pair: Pair, alone: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone.worker():
        model = trained(alone)
        train(alone, model, range(5, 9))
        expected = logprobs(alone, alone.sample(alone.following_sampler(model), 1, max_tokens=8, temperature=0.5))
    with pair.training(), pair.sampling():
        model = trained(pair.trainer)
        follower = pair.trainer.following_sampler(model)
        reached, go_on = hold_up(monkeypatch, pair.trainer.engine, "forward_backward")
        data = pair.trainer.data(model, 5, first=5)
        assert reached.wait(60)
        given_up = pair.sample(follower, 0)
        until_waiting(pair, follower)
        assert pair.replica.store.jobs.cancel(given_up, "ann") == "cancelled"
        go_on.set()
        pair.trainer.result(data)
        pair.trainer.step(model, 6)
        train(pair.trainer, model, range(7, 9))
        # The steps are done, and their client knows it.
        assert logprobs(pair.replica, pair.sample(follower, 1)) == pytest.approx(expected, abs=1e-5)


def test_weights_that_nobody_waits_for_any_more_are_let_go(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy stays in memory for each sampler whose sample was given up, or went to another replica."""
    monkeypatch.setattr(weights_sources, "MAX_IN_MEMORY", 2)
    pair.is_sent = False
    with pair.training(), pair.sampling():
        model = trained(pair.trainer)
        samplers = [pair.trainer.copied_sampler(model, seq_id) for seq_id in range(5, 9)]
        asked: list[Future[Any]] = []
        monkeypatch.setattr(pair, "published", _HeldBack(pair.published, asked))
        for number, sampler in enumerate(samplers):
            job = pair.sample(sampler, number)
            until_waiting(pair, sampler)
            assert pair.replica.store.jobs.cancel(job, "ann") == "cancelled"
        sources = [each for each in gc.get_objects() if type(each) is weights_sources.SentWeights]
        for answer, real in asked:
            answer.set_result(real.result(60))
        pair.replica.tokens(pair.sample(pair.replica.base_sampler(), 9))
        left = sum(len(each._coming) for each in sources)
        assert left <= 2, f"{left} sets of weights that nobody waits for"


class _HeldBack:
    """Answers when a test lets it."""

    def __init__(self, published: Any, asked: list[Any]) -> None:
        self._published, self._asked = published, asked

    def ask(self, wanted: WeightsWanted) -> Future[Any]:
        answer: Future[Any] = Future()
        self._asked.append((answer, self._published.ask(wanted)))
        return answer


def test_weights_that_cannot_be_made_fail_their_sample_and_not_the_trainer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with one worker, whose error is that of the sample."""
    with pair.training():
        follower = pair.trainer.following_sampler(trained(pair.trainer))

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(LiveModels, "rebuilt", fail)
    with pair.training(), pair.sampling():
        failing = pair.sample(follower, 0)
        assert isinstance(pair.replica.outcome(failing), Failed)
        assert pair.trainer.died_of is None


def test_weights_that_have_to_wait_are_asked_for_again_and_who_waits_hears_why(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No question stays open: a replica can have only so many, and others ask, too."""

    class Away(WaitError):
        promise = "it is done when that is back"

    with pair.training():
        follower = pair.trainer.following_sampler(trained(pair.trainer))
    real, is_away = LiveModels.rebuilt, True

    def rebuilt(*arguments: Any, **options: Any) -> Any:
        if is_away:
            raise Away("the storage is out of reach")
        return real(*arguments, **options)

    monkeypatch.setattr(LiveModels, "rebuilt", rebuilt)
    with pair.training(), pair.sampling():
        waiting = pair.sample(follower, 0)
        until(lambda: "the storage is out of reach" in pair.replica.no_room.get(follower, ""))
        assert pair.published is not None
        assert pair.published.wanted() == []
        is_away = False
        assert len(pair.replica.tokens(waiting)) == 8
    assert len(pair.asked) > 1


def test_an_answer_that_does_not_fit_into_memory_is_an_error() -> None:
    class Heavy(np.ndarray):  # type: ignore[type-arg]
        def copy(self, order: Any = "C") -> Any:
            raise MemoryError

    flat = np.zeros(8, np.uint8).view(Heavy)
    weights, _ = received({"a": Parcel("a", PackedAdapter({}, "float32", flat))})
    answer = weights.get(WeightsWanted("a", "ann"))
    with pytest.raises(MemoryError):
        answer.result(1)


def test_the_trainer_does_not_hold_on_to_weights_that_it_has_put_where_replicas_read_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is put is a copy; on a GPU those that it was made from would take memory that nobody counts."""
    monkeypatch.setattr(sampling_weights, "MAX_IN_MEMORY", 2)
    made: list[weakref.ref[FrozenAdapter]] = []
    monkeypatch.setattr(pair, "_put", lambda frozen: (made.append(weakref.ref(frozen)), pack(frozen))[1])
    with pair.training():
        model = trained(pair.trainer)
        for seq_id in range(5, 13):
            pair.trainer.copied_sampler(model, seq_id)
        until(lambda: len(made) == 8)
        gc.collect()
        assert sum(each() is not None for each in made) <= 3
