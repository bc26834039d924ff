"""Models leave the memory and come back, from their snapshots or from what was done, as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from tests.end_to_end.serving import wait_until
from tests.server.workbench import Workbench
from tinsmith.server import live_models, trainer
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.engine.adapters import AdapterSpec
from tinsmith.server.live_models import LiveModels
from tinsmith.server.store.records import Done, Failed, Job
from tinsmith.server.trainer import Trainer

MODEL, WHOLE = "s:train:0", "s:train:1"
Constants = Callable[[str, float], None]


@pytest.fixture
def constant(monkeypatch: pytest.MonkeyPatch) -> Constants:
    return lambda name, value: monkeypatch.setattr(live_models, name, value)


@pytest.fixture
def always(bench: Workbench, constant: Constants) -> None:
    """A snapshot after every operation that changes the model, however quick."""
    bench.replay_bound(0.0)
    constant("WRITING_SHARE", float("inf"))


def snapshots(bench: Workbench) -> list[str]:
    return sorted(folder.name for folder in (bench.state / "snapshots").glob("s_train_0/weights/*"))


def replayed(bench: Workbench) -> int:
    """How many operations were done again since this was asked last."""
    count = sum(each.total for each in bench.replays if each.replayed == each.total)
    bench.replays.clear()
    return count


def uninterrupted(bench: Workbench, steps: range) -> list[float]:
    bench.create(WHOLE)
    return bench.losses(bench.train(WHOLE, steps))


@pytest.mark.usefixtures("always")
def test_a_model_goes_on_from_its_snapshot_and_its_data_are_forgotten(bench: Workbench) -> None:
    bench.create(MODEL)
    with bench.worker():
        expected = uninterrupted(bench, range(1, 9))
        losses = bench.losses(bench.train(MODEL, range(1, 6)))  # ends with a gradient that no step has used
    assert snapshots(bench) == ["4", "5"]
    assert [job.seq_id for job in bench.store.jobs.history(MODEL, -1, 100)] == [5]
    with bench.worker():
        bench.result(bench.step(MODEL, 6))
        losses += bench.losses(bench.train(MODEL, range(7, 9)))
        bench.result(f"{MODEL}:8")
    assert losses == expected
    assert snapshots(bench) == ["7", "8"]
    assert replayed(bench) == 0


def test_snapshots_are_written_when_the_work_in_none_exceeds_the_bound(bench: Workbench, constant: Constants) -> None:
    """That of all models together: what is lost with a worker is all done again by the next one."""
    constant("WRITING_SHARE", float("inf"))
    with bench.worker():
        for number in range(3):
            bench.losses(bench.train(bench.create(f"s:train:{number}"), range(1, 4)))
    assert len(bench.store.models.snapshots()) == 3, "at the end, not before"
    bench.replay_bound(1e-9)
    with bench.worker():
        bench.result(bench.step("s:train:1", 4))
        bench.result(bench.step("s:train:2", 4))
    kept = bench.store.models.snapshots()
    assert [kept[f"s:train:{number}"].last for number in range(3)] == [3, 4, 4]


def test_snapshots_take_a_small_share_of_the_time(bench: Workbench, constant: Constants) -> None:
    bench.replay_bound(0.0)
    constant("WRITING_SHARE", 1e-9)
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 10)))
        assert snapshots(bench) == ["1"], "the first one told what it takes"


@pytest.mark.usefixtures("always")
def test_a_model_that_has_not_changed_is_not_written(bench: Workbench) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 4)))
        bench.losses([bench.data(MODEL, 4, forward_only=True)])
        bench.save(MODEL, 5, "kept")
    assert snapshots(bench) == ["2", "3"]
    assert [job.seq_id for job in bench.store.jobs.history(MODEL, -1, 100)] == [3], "nor are its data kept"


def test_a_model_that_nobody_uses_for_a_while_is_written_but_stays(bench: Workbench, constant: Constants) -> None:
    constant("SETTLED_SECONDS", -1.0)
    constant("WORTH_SECONDS", 0.0)
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 4)))
        wait_until(lambda: snapshots(bench)[-1:] == ["3"], 30, "it was not written")
        bench.losses([bench.data(MODEL, 4, forward_only=True)])
    assert bench.replays == []


def test_a_model_that_nobody_uses_leaves_the_memory_and_comes_back(bench: Workbench, constant: Constants) -> None:
    constant("IDLE_SECONDS", -1.0)
    bench.create(MODEL)
    with bench.worker():
        expected = uninterrupted(bench, range(1, 7))
        losses = []
        for seq_id in range(1, 7, 2):
            losses += bench.losses([bench.data(MODEL, seq_id, first=seq_id)])
            bench.result(bench.step(MODEL, seq_id + 1))
    assert losses == expected
    assert snapshots(bench)[-1] == "6"
    assert replayed(bench) == 0


def test_a_worker_that_ends_in_peace_leaves_nothing_to_do_again(bench: Workbench) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 4)))  # ends with a gradient that no step has used
        assert snapshots(bench) == []
    assert snapshots(bench) == ["3"]
    with bench.worker():
        bench.result(bench.step(MODEL, 4))
    assert replayed(bench) == 0


@pytest.mark.usefixtures("always")
def test_a_copy_of_an_earlier_state_outlives_the_data_it_was_made_from(bench: Workbench) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.train(MODEL, range(1, 5))
        sampler_id = msgspec.json.decode(bench.result(bench.copy(MODEL, 5)))["sampling_session_id"]
        before = bench.tokens(bench.sample(sampler_id, 0, max_tokens=10, temperature=0.5))
        for seq_id in (6, 7):
            bench.losses([bench.data(MODEL, seq_id)])
    assert [job.seq_id for job in bench.store.jobs.history(MODEL, -1, 100)] == [7]
    with bench.worker():
        assert bench.tokens(bench.sample(sampler_id, 1, max_tokens=10, temperature=0.5)) == before


@pytest.mark.usefixtures("always")
def test_a_copy_that_was_lost_with_its_worker_outlives_the_next_snapshot(bench: Workbench, constant: Constants) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 4)))
        constant("WRITING_SHARE", 1e-9)
        sampler_id = msgspec.json.decode(bench.result(bench.copy(MODEL, 4)))["sampling_session_id"]
        before = bench.tokens(bench.sample(sampler_id, 0, max_tokens=10, temperature=0.5))
    assert snapshots(bench) == ["2", "3"]
    constant("WRITING_SHARE", float("inf"))
    with bench.worker():
        bench.losses([bench.data(MODEL, 5), bench.data(MODEL, 6)])
        bench.losses([bench.data(MODEL, 7)])
    assert bench.store.jobs.history(MODEL, -1, 100)[0].seq_id > 4
    with bench.worker():
        assert bench.tokens(bench.sample(sampler_id, 1, max_tokens=10, temperature=0.5)) == before


@pytest.mark.usefixtures("always")
def test_no_snapshot_is_written_while_a_copy_of_an_earlier_state_cannot_be(bench: Workbench) -> None:
    (bench.state / "samplers").write_text("in the way")
    bench.create(MODEL)
    with bench.worker():
        bench.result(bench.copy(MODEL, 1))
        bench.losses([bench.data(MODEL, 2)])
    assert snapshots(bench) == []


def test_a_model_whose_creation_failed_says_so(bench: Workbench) -> None:
    job = {"session_id": "s", "model_seq_id": 0, "path": "tinker://s:train:9/weights/gone", "optimizer": False}
    bench.submit("load_weights", MODEL, seq_id=0, payload=msgspec.json.encode(job), makes_model=True)
    with bench.worker():
        failed = bench.outcome(bench.step(MODEL, 1))
    assert isinstance(failed, Failed)
    assert failed.category == "user"
    assert "it was never made: tinker://s:train:9/weights/gone does not exist any more. Make a new" in failed.error


@pytest.mark.parametrize("cancelled", ["not at all", "with its worker", "in the queue"])
def test_a_load_whose_worker_died_before_it_could_say_so_is_done(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, cancelled: str
) -> None:
    """Its snapshot is there: to be told that it was cancelled would be wrong."""
    has_loaded = LiveModels.has_loaded

    def die(live: LiveModels, model_id: str, seq_id: int) -> None:
        has_loaded(live, model_id, seq_id)
        raise sa.exc.OperationalError(None, None, Exception("the database is out of reach"))

    with bench.worker():
        bench.create(MODEL)
        bench.train(MODEL, range(1, 7))
        path = bench.save(MODEL, 7, "trained")
        trained = bench.losses([bench.data(MODEL, 8, forward_only=True)])
        bench.create("s:train:1")
    monkeypatch.setattr(LiveModels, "has_loaded", die)
    with bench.worker():
        load = bench.load("s:train:1", 1, path, optimizer=False)
        bench.wait_for_its_death()
    monkeypatch.undo()
    bench.died_of = None
    if cancelled == "with its worker":
        assert bench.store.jobs.cancel(load, "ann") == "asked"
    elif cancelled == "in the queue":
        bench.store.jobs.requeue(bench.settings.base_model, max_attempts=9, error="")
        assert bench.store.jobs.cancel(load, "ann") == "finished"
    with bench.worker():
        assert isinstance(bench.outcome(load), Done)
        assert bench.losses([bench.data("s:train:1", 2, forward_only=True)]) == trained


def test_a_model_whose_creation_was_cancelled_says_so(bench: Workbench) -> None:
    bench.create(MODEL)
    assert bench.store.jobs.cancel(f"{MODEL}:0", "ann") == "cancelled"
    with bench.worker():
        failed = bench.outcome(bench.step(MODEL, 1))
    assert isinstance(failed, Failed)
    assert failed.category == "user"
    assert "it was never made: that was cancelled. Make a new model" in failed.error


def test_a_checkpoint_that_was_loaded_may_be_deleted(bench: Workbench) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.train(MODEL, range(1, 5))
        path = bench.save(MODEL, 5, "kept")
        expected = bench.losses([bench.data(MODEL, 6)])
        bench.result(bench.load(MODEL, 7, path, optimizer=True))
    shutil.rmtree(bench.state / "checkpoints")
    with bench.worker():
        assert bench.losses([bench.data(MODEL, 8)]) == pytest.approx(expected, rel=1e-6)


def test_a_load_that_was_written_down_but_not_told_is_not_done_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.train(MODEL, range(1, 5))
        path = bench.save(MODEL, 5, "latest")
        expected = bench.losses([bench.data(MODEL, 6)])
        bench.step(MODEL, 7)
        bench.losses([bench.data(MODEL, 8)])
    with monkeypatch.context() as killed, bench.worker():
        killed.setattr(Trainer, "run", _run_and_die)
        load = bench.load(MODEL, 9, path, optimizer=False)
        bench.wait_for_its_death()
        bench.died_of = None
    CheckpointFolders(bench.state / "checkpoints").delete(path)
    with bench.worker():
        bench.result(load)
        assert bench.losses([bench.data(MODEL, 10)]) == pytest.approx(expected, rel=1e-6)


def _run_and_die(self: Trainer, jobs: Sequence[Job]) -> None:
    for job in jobs:
        self._load_weights(job)
    raise RuntimeError("killed")


def test_a_load_that_fails_halfway_leaves_the_model_as_it_was(bench: Workbench) -> None:
    bench.create(MODEL)
    with bench.worker():
        path = bench.save(MODEL, 1, "early")
        (bench.state / "checkpoints" / "s_train_0" / "weights" / "early" / "optimizer.safetensors").unlink()
        bench.train(MODEL, range(3, 5))
        bench.data(MODEL, 2)
        expected = bench.losses([bench.data(MODEL, 5)])
        assert isinstance(bench.outcome(bench.load(MODEL, 6, path, optimizer=True)), Failed)
        assert bench.losses([bench.data(MODEL, 7)]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("always")
def test_without_room_on_the_disk_training_goes_on(bench: Workbench) -> None:
    (bench.state / "snapshots").write_text("in the way")
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 6)))
    assert len(bench.store.jobs.history(MODEL, -1, 100)) == 6


ROOM = 2  # models that fit into memory


@pytest.fixture
def small_memory(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many models were in memory after each step."""
    adapter = bench.engine.create_adapter(AdapterSpec(rank=2, seed=1))
    room = ROOM * 4 * adapter.weights.nbytes
    monkeypatch.setattr(trainer, "available_memory", lambda device: room / trainer.SHARE_OF_MEMORY)
    counts: list[int] = []
    real = LiveModels.finished

    def counted(self: LiveModels, *step: Any) -> None:
        real(self, *step)
        counts.append(len(self))

    monkeypatch.setattr(LiveModels, "finished", counted)
    return counts


def test_many_more_models_than_fit_are_trained_in_turn(
    bench: Workbench, small_memory: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.engine, "train_token_budget", 1)  # one operation at a time, of whoever had the least
    models = [bench.create(f"s:train:{number}") for number in range(8)]
    jobs = [bench.train(model, range(1, 8)) for model in models]
    with bench.worker():
        losses = [bench.losses(each) for each in jobs]
        expected = bench.losses(bench.train(bench.create("s:train:9"), range(1, 8)))
    assert max(small_memory) == ROOM
    assert losses == [expected] * 8
    assert replayed(bench) == 0, "each came back as it was"


def test_a_batch_with_more_models_than_fit_is_done_in_parts(bench: Workbench, small_memory: list[int]) -> None:
    models = [bench.create(f"s:train:{number}") for number in range(5)]
    with bench.worker():
        for model in models:
            bench.result(bench.data(model, 1))
    jobs = [bench.data(model, 2, first=9) for model in models]  # before there is a worker, so that they meet
    with bench.worker():
        first, *others = bench.losses(jobs)
        steps = [msgspec.json.decode(bench.result(bench.step(model, 3)))["metrics"]["grad_norm"] for model in models]
    assert others == pytest.approx([first] * 4, rel=1e-6)
    assert steps == pytest.approx([steps[0]] * 5, rel=1e-6), "no gradient was lost with a model that left"
    assert max(small_memory) <= ROOM
