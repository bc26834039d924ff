"""A worker that only trains and one that only samples, on one store: together they give what one worker gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.workbench import Workbench
from tinsmith.server.engine.adapter_files import PackedAdapter
from tinsmith.server.messages import Role
from tinsmith.server.store.records import Failed, NewJob
from tinsmith.server.weights_exchange import Answer, AskedTrainer, PublishedWeights, WeightsWanted

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

    @contextmanager
    def training(self) -> Iterator[None]:
        self.published = PublishedWeights(self._put, self.trainer.ring)
        with self.trainer.worker(published=self.published):
            yield
        self.published = None

    @contextmanager
    def sampling(self) -> Iterator[None]:
        with self.replica.worker(trainer=AskedTrainer(self._ask, self.replica.ring)):
            yield

    def sample(self, sampler_id: str, seq_id: int, **params: Any) -> str:
        request_id = self.replica.sample(sampler_id, seq_id, max_tokens=8, temperature=0.5, **params)
        self.replica.store.jobs.deal({request_id: REPLICA})
        self.replica.ring()
        return request_id

    def _put(self, packed: PackedAdapter) -> PackedAdapter:
        self.put.append(packed)
        return packed

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
    bench.losses(bench.train(model, range(1, 5)))
    return model


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


def test_weights_are_put_once_and_asked_for_once(pair: Pair) -> None:
    with pair.training(), pair.sampling():
        sampler = pair.trainer.copied_sampler(trained(pair.trainer), 5)
        assert len({tuple(pair.replica.tokens(pair.sample(sampler, number))) for number in range(3)}) == 1
    assert len(pair.put) == 1
    assert len(pair.asked) == 1


def test_a_sampler_that_follows_a_model_has_its_newest_weights(pair: Pair, alone: Workbench) -> None:
    with alone.worker():
        model = trained(alone)
        follower = alone.following_sampler(model)
        expected = [alone.tokens(alone.sample(follower, 0, max_tokens=8, temperature=0.5))]
        alone.losses(alone.train(model, range(5, 9)))
        expected.append(alone.tokens(alone.sample(follower, 1, max_tokens=8, temperature=0.5)))
    with pair.training(), pair.sampling():
        model = trained(pair.trainer)
        follower = pair.trainer.following_sampler(model)
        found = [pair.replica.tokens(pair.sample(follower, 0))]
        assert pair.replica.tokens(pair.sample(follower, 5)) == found[0]
        assert len(pair.put) == 1
        pair.trainer.losses(pair.trainer.train(model, range(5, 9)))
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
    assert follower not in pair.replica.no_room


def test_a_sample_waits_for_a_busy_trainer_and_others_do_not(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    real = pair.trainer.engine.forward_backward

    def slow(rows: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return real(rows)

    with pair.training(), pair.sampling():
        model = trained(pair.trainer)
        follower = pair.trainer.following_sampler(model)
        monkeypatch.setattr(pair.trainer.engine, "forward_backward", slow)
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
