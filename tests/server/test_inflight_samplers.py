"""All inflight samplers of a model draw with the weights that were published last, and with nothing in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from tests.server.workbench import Workbench, hold_up
from tinsmith.server import sampling_weights
from tinsmith.server.sampling_weights import SamplingWeights
from tinsmith.server.store.schema import jobs
from tinsmith.server.trainer import Trainer
from tinsmith.server.weights_sources import OwnWeights
from tinsmith.server.worker import Worker
from tinsmith.wire import proto

MODEL = "s:train:0"
CLOSE = 1e-5
Drawn = Callable[..., list[float]]


@pytest.fixture
def drawn(bench: Workbench) -> Drawn:
    """What is drawn with a sampler, as the probabilities of the tokens: they tell one set of weights from another."""
    numbers = itertools.count()

    def draw(sampler_id: str, max_tokens: int = 8) -> list[float]:
        job = bench.sample(sampler_id, next(numbers), max_tokens=max_tokens, temperature=0.0)
        found = proto.decode_sample_response(bench.result(job)).sequences[0].logprobs
        assert found is not None
        return list(found)

    return draw


def train(bench: Workbench, *seq_ids: int) -> None:
    """A gradient and a step."""
    bench.losses([bench.data(MODEL, seq_ids[0], first=seq_ids[0])])
    bench.result(bench.step(MODEL, seq_ids[1]))


def kill(bench: Workbench, monkeypatch: pytest.MonkeyPatch, seq_id: int) -> None:
    """The worker dies at the operation with this number, and nothing in memory is written."""

    def die(*_: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as deadly:
        deadly.setattr(Trainer, "run", die)
        bench.data(MODEL, seq_id)
        bench.wait_for_its_death()
    bench.died_of = None


def test_inflight_samplers_draw_with_what_was_published_last_and_with_nothing_else(
    bench: Workbench, drawn: Drawn
) -> None:
    bench.create(MODEL)
    with bench.worker():
        train(bench, 1, 2)
        snapshot, first = bench.copied_sampler(MODEL, 3), bench.copied_sampler(MODEL, 4, "inflight")
        before = drawn(snapshot)
        assert drawn(first) == pytest.approx(before, abs=CLOSE)
        train(bench, 5, 6)
        assert drawn(first) == pytest.approx(before, abs=CLOSE), "a step publishes nothing"
        later = bench.copied_sampler(MODEL, 7)
        after = drawn(later)
        assert after != pytest.approx(before, abs=CLOSE)
        assert drawn(first) == pytest.approx(before, abs=CLOSE), "nor does a snapshot"
        second = bench.copied_sampler(MODEL, 8, "inflight")
        assert second != first
        assert drawn(first) == drawn(second) == pytest.approx(after, abs=CLOSE)
        train(bench, 9, 10)
        bench.copied_sampler(MODEL, 11, "inflight")
        assert drawn(snapshot) == pytest.approx(before, abs=CLOSE), "snapshots stay what they are"
        assert drawn(later) == pytest.approx(after, abs=CLOSE)


def test_each_model_has_published_weights_of_its_own(bench: Workbench, drawn: Drawn) -> None:
    bench.create(MODEL)
    other = bench.create("s:train:1")
    with bench.worker():
        of_other = bench.copied_sampler(other, 1, "inflight")
        before = drawn(of_other)
        train(bench, 1, 2)
        published = bench.copied_sampler(MODEL, 3, "inflight")
        assert drawn(published) != pytest.approx(before, abs=CLOSE)
        assert drawn(of_other) == pytest.approx(before, abs=CLOSE)


def test_old_and_new_inflight_samplers_share_one_adapter_and_so_what_is_cached_of_prompts(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, drawn: Drawn
) -> None:
    found: list[Any] = []
    real = OwnWeights.of
    monkeypatch.setattr(OwnWeights, "of", lambda *each: found.append(real(*each)) or found[-1])
    bench.create(MODEL)
    with bench.worker():
        first = bench.copied_sampler(MODEL, 1, "inflight")
        drawn(first)
        train(bench, 2, 3)
        second = bench.copied_sampler(MODEL, 4, "inflight")
        for sampler in (first, second):
            drawn(sampler)
    assert found[0] is not found[1]
    assert found[1] is found[2]


def test_a_sample_that_has_begun_keeps_its_weights_to_its_end(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, drawn: Drawn
) -> None:
    bench.create(MODEL)
    with bench.worker():
        sampler = bench.copied_sampler(MODEL, 1, "inflight")
        expected = drawn(sampler, max_tokens=120)
        add, published = bench.engine.generator.add, list[str]()

        def add_and_publish(work: Any) -> None:
            add(work)
            if not published:
                bench.data(MODEL, 2)
                bench.step(MODEL, 3)
                published.append(bench.copy(MODEL, 4, "inflight"))

        monkeypatch.setattr(bench.engine.generator, "add", add_and_publish)
        assert drawn(sampler, max_tokens=120) == pytest.approx(expected, abs=CLOSE)
        bench.result(published[0])
        assert drawn(sampler, max_tokens=120) != pytest.approx(expected, abs=CLOSE)
    samples_and_saves = jobs.c.kind.in_(["sample", "save_weights_for_sampler"])
    query = sa.select(jobs.c.kind).where(samples_and_saves).order_by(jobs.c.finished)
    order = bench.store._database.all(query, lambda row: row.kind)
    assert order == ["save_weights_for_sampler", "sample", "save_weights_for_sampler", "sample", "sample"]


def test_what_was_published_last_outlives_a_killed_worker(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, drawn: Drawn
) -> None:
    bench.create(MODEL)
    with bench.worker():
        first = bench.copied_sampler(MODEL, 1, "inflight")
        train(bench, 2, 3)
        second = bench.copied_sampler(MODEL, 4, "inflight")
        published = drawn(second)
        train(bench, 5, 6)
        kill(bench, monkeypatch, 7)
    with bench.worker():
        assert drawn(first) == drawn(second) == pytest.approx(published, abs=CLOSE)
    bench.replay_bound(0.0)
    with bench.worker():  # what it was built from is in the model's snapshot now
        assert drawn(first) == drawn(second) == pytest.approx(published, abs=CLOSE)


def test_a_replay_copies_nothing_that_is_not_drawn_with_any_more(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.create(MODEL)
    with bench.worker():
        for seq_id in (1, 2, 3):
            newest = bench.copied_sampler(MODEL, seq_id, "inflight")
        kill(bench, monkeypatch, 4)
    kept: list[str] = []
    real = SamplingWeights.keep
    monkeypatch.setattr(SamplingWeights, "keep", lambda self, *copy: kept.append(copy[0]) or real(self, *copy))
    with bench.worker():
        bench.losses([bench.data(MODEL, 5)])
    assert kept == [newest]


def cut_short(bench: Workbench, monkeypatch: pytest.MonkeyPatch, seq_id: int) -> str:
    """A save with this number, whose worker dies before it can say that it is done."""

    def die(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as deadly, bench.worker():
        deadly.setattr(Worker, "_complete", die)
        save = bench.copy(MODEL, seq_id, "inflight")
        bench.wait_for_its_death()
        bench.died_of = None
    return save


def test_a_save_whose_worker_died_before_it_could_say_so_is_done_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, drawn: Drawn
) -> None:
    bench.create(MODEL)
    with bench.worker():
        first = bench.copied_sampler(MODEL, 1, "inflight")
        train(bench, 2, 3)
        expected = drawn(bench.copied_sampler(MODEL, 4))
    save = cut_short(bench, monkeypatch, 5)
    with bench.worker():
        bench.result(save)
        published = bench.store.samplers.published(MODEL, "ann")
        assert published is not None
        assert (published.sampler_id, published.model_seq_id) == ("s:sample:5", 5)
        assert drawn(first) == drawn(published.sampler_id) == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("how", ["given up", "cancelled"])
def test_weights_whose_save_was_not_done_are_not_published_and_cost_nobody_those_that_were(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, drawn: Drawn, how: str
) -> None:
    bench.create(MODEL)
    with bench.worker():
        train(bench, 1, 2)
        first = bench.copied_sampler(MODEL, 3, "inflight")
        expected = drawn(first)
        train(bench, 4, 5)
    save = cut_short(bench, monkeypatch, 6)
    bench.store.jobs.requeue("tiny", max_attempts=1 if how == "given up" else 9, error="killed its worker")
    if how == "cancelled":
        assert bench.store.jobs.cancel(save, "ann") == "cancelled"
    bench.replay_bound(0.0)
    with bench.worker():
        assert drawn(first) == pytest.approx(expected, abs=CLOSE)
        train(bench, 7, 8)  # the model's snapshot is newer than that save
        assert drawn(first) == pytest.approx(expected, abs=CLOSE)
    with bench.worker():
        assert drawn(first) == pytest.approx(expected, abs=CLOSE)


def test_published_weights_stay_until_newer_ones_are_in_the_store(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, drawn: Drawn
) -> None:
    bench.create(MODEL)
    with bench.worker():
        first = bench.copied_sampler(MODEL, 1, "inflight")
        expected = drawn(first)
        train(bench, 2, 3)
        dropped: list[str] = []
        monkeypatch.setattr(SamplingWeights, "drop", lambda self, sampler_id: dropped.append(sampler_id))
        reached, go_on = hold_up(monkeypatch, Worker, "_complete")
        save = bench.copy(MODEL, 4, "inflight")
        assert reached.wait(60)
        assert dropped == []
        published = bench.store.samplers.published(MODEL, "ann")
        assert published is not None
        assert published.sampler_id == first
        go_on.set()
        bench.result(save)
        assert drawn(first) != pytest.approx(expected, abs=CLOSE)
        assert dropped == [first]


def test_only_the_newest_published_weights_take_up_room(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, drawn: Drawn
) -> None:
    monkeypatch.setattr(sampling_weights, "MAX_IN_MEMORY", 2)
    bench.create(MODEL)
    with bench.worker():
        samplers = [bench.copied_sampler(MODEL, seq_id, "inflight") for seq_id in range(1, 7)]
        assert not (bench.state / "samplers").exists()
        train(bench, 7, 8)
        drawn(samplers[0])
    assert [file.name for file in (bench.state / "samplers").iterdir()] == ["s_sample_6.safetensors"]
