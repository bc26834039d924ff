"""Models leave the memory and come back, from their snapshots or from what was done, as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.server.workbench import Workbench
from tinsmith.server import live_models
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.live_models import LiveModels
from tinsmith.server.snapshots import snapshot_path, tidy_snapshots
from tinsmith.server.store.records import Failed, Job
from tinsmith.server.trainer import Trainer

MODEL, WHOLE = "s:train:0", "s:train:1"
Constants = Callable[[str, float], None]


@pytest.fixture
def constant(monkeypatch: pytest.MonkeyPatch) -> Constants:
    return lambda name, value: monkeypatch.setattr(live_models, name, value)


@pytest.fixture
def always(constant: Constants) -> None:
    """A snapshot after every operation, however quick."""
    constant("SNAPSHOT_SECONDS", 0.0)
    constant("WRITING_SHARE", float("inf"))


def snapshots(bench: Workbench) -> list[str]:
    root = Path(bench.settings.state) / "snapshots"
    return sorted(folder.name for folder in root.glob("s_train_0/weights/*"))


def uninterrupted(bench: Workbench, steps: range) -> list[float]:
    bench.create(WHOLE)
    return bench.losses(bench.train(WHOLE, steps))


@pytest.mark.usefixtures("always")
def test_a_model_goes_on_from_its_snapshot_and_its_data_are_forgotten(bench: Workbench) -> None:
    bench.create(MODEL)
    with bench.worker():
        expected = uninterrupted(bench, range(1, 9))
        losses = bench.losses(bench.train(MODEL, range(1, 6)))  # ends with a gradient that no step has used
    assert snapshots(bench) == ["5"]
    assert bench.store.jobs.history(MODEL, -1, 100) == []
    with bench.worker():
        bench.result(bench.step(MODEL, 6))
        losses += bench.losses(bench.train(MODEL, range(7, 9)))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert snapshots(bench) == ["8"]


def test_a_snapshot_is_written_when_building_again_would_take_long(bench: Workbench, constant: Constants) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 4)))
        assert snapshots(bench) == []
        constant("SNAPSHOT_SECONDS", 0.0)
        bench.result(bench.step(MODEL, 4))
        bench.losses(bench.train(MODEL, range(5, 6)))
    assert snapshots(bench) in (["4"], ["5"])


def test_a_model_that_nobody_uses_leaves_the_memory_and_comes_back(bench: Workbench, constant: Constants) -> None:
    constant("IDLE_SECONDS", -1.0)
    bench.create(MODEL)
    with bench.worker():
        expected = uninterrupted(bench, range(1, 7))
        losses = []
        for seq_id in range(1, 7, 2):
            losses += bench.losses([bench.data(MODEL, seq_id, first=seq_id)])
            bench.result(bench.step(MODEL, seq_id + 1))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert snapshots(bench) == ["6"]


def test_a_worker_that_ends_in_peace_leaves_little_to_do_again(bench: Workbench, constant: Constants) -> None:
    constant("WORTH_SECONDS", 0.0)
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 4)))
        assert snapshots(bench) == []
    assert snapshots(bench) == ["3"]


@pytest.mark.usefixtures("always")
def test_a_copy_of_an_earlier_state_outlives_the_data_it_was_made_from(bench: Workbench) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.train(MODEL, range(1, 5))
        sampler_id = msgspec.json.decode(bench.result(bench.copy(MODEL, 5)))["sampling_session_id"]
        before = bench.tokens(bench.sample(sampler_id, 0, max_tokens=10, temperature=0.5))
        bench.losses([bench.data(MODEL, 6)])
    assert bench.store.jobs.history(MODEL, -1, 100) == []
    with bench.worker():
        assert bench.tokens(bench.sample(sampler_id, 1, max_tokens=10, temperature=0.5)) == before


@pytest.mark.usefixtures("always")
def test_a_copy_that_was_lost_with_its_worker_outlives_the_next_snapshot(bench: Workbench, constant: Constants) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 4)))
        constant("SNAPSHOT_SECONDS", 1e9)
        sampler_id = msgspec.json.decode(bench.result(bench.copy(MODEL, 4)))["sampling_session_id"]
        before = bench.tokens(bench.sample(sampler_id, 0, max_tokens=10, temperature=0.5))
    assert snapshots(bench) == ["3"]
    constant("SNAPSHOT_SECONDS", 0.0)
    with bench.worker():
        bench.losses([bench.data(MODEL, 5)])
    assert snapshots(bench) == ["5"]
    with bench.worker():
        assert bench.tokens(bench.sample(sampler_id, 1, max_tokens=10, temperature=0.5)) == before


@pytest.mark.usefixtures("always")
def test_no_snapshot_is_written_while_a_copy_of_an_earlier_state_cannot_be(bench: Workbench) -> None:
    (Path(bench.settings.state) / "samplers").write_text("in the way")
    bench.create(MODEL)
    with bench.worker():
        bench.result(bench.copy(MODEL, 1))
        bench.losses([bench.data(MODEL, 2)])
    assert snapshots(bench) == ["0"]


def test_a_model_whose_creation_failed_says_so(bench: Workbench) -> None:
    job = {"session_id": "s", "model_seq_id": 0, "path": "tinker://s:train:9/weights/gone", "optimizer": False}
    bench.submit("load_weights", MODEL, seq_id=0, payload=msgspec.json.encode(job), makes_model=True)
    with bench.worker():
        failed = bench.outcome(bench.step(MODEL, 1))
    assert isinstance(failed, Failed)
    assert failed.category == "user"
    assert "it was never made: tinker://s:train:9/weights/gone does not exist any more. Make a new" in failed.error


@pytest.mark.usefixtures("always")
def test_a_model_whose_snapshot_is_gone_is_given_up_for_good(bench: Workbench) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 4)))
    shutil.rmtree(Path(bench.settings.state) / "snapshots")
    with bench.worker():
        outcomes = [bench.outcome(bench.step(MODEL, 4)), bench.outcome(bench.data(MODEL, 5))]
    for outcome in outcomes:
        assert isinstance(outcome, Failed)
        assert "cannot go on: its snapshot cannot be read" in outcome.error
    model = bench.store.models.get(MODEL, "ann")
    assert model is not None
    assert "its snapshot cannot be read" in str(model.corrupted)


def test_a_checkpoint_that_was_loaded_may_be_deleted(bench: Workbench) -> None:
    bench.create(MODEL)
    with bench.worker():
        bench.train(MODEL, range(1, 5))
        path = bench.save(MODEL, 5, "kept")
        expected = bench.losses([bench.data(MODEL, 6)])
        bench.result(bench.load(MODEL, 7, path, optimizer=True))
    shutil.rmtree(Path(bench.settings.state) / "checkpoints")
    with bench.worker():
        assert bench.losses([bench.data(MODEL, 8)]) == pytest.approx(expected, rel=1e-6)


def test_a_checkpoint_that_was_loaded_may_be_overwritten_even_if_the_worker_died_right_after(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.create(MODEL)
    with monkeypatch.context() as killed, bench.worker():
        killed.setattr(LiveModels, "_write", lambda *_: False)  # it did not come so far
        bench.train(MODEL, range(1, 5))
        path = bench.save(MODEL, 5, "latest")
        bench.result(bench.load(MODEL, 6, path, optimizer=True))
    assert snapshots(bench) == []
    with bench.worker():
        bench.train(MODEL, range(7, 11))
        bench.save(MODEL, 11, "latest", overwrite=True)
        expected = bench.losses([bench.data(MODEL, 12)])
    with bench.worker():
        assert bench.losses([bench.data(MODEL, 13)]) == pytest.approx(expected, rel=1e-6)


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
    CheckpointFolders(Path(bench.settings.state) / "checkpoints").delete(path)
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
        (
            Path(bench.settings.state) / "checkpoints" / "s_train_0" / "weights" / "early" / "optimizer.safetensors"
        ).unlink()
        bench.train(MODEL, range(3, 5))
        bench.data(MODEL, 2)
        expected = bench.losses([bench.data(MODEL, 5)])
        assert isinstance(bench.outcome(bench.load(MODEL, 6, path, optimizer=True)), Failed)
        assert bench.losses([bench.data(MODEL, 7)]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("always")
def test_without_room_on_the_disk_training_goes_on(bench: Workbench) -> None:
    (Path(bench.settings.state) / "snapshots").write_text("in the way")
    bench.create(MODEL)
    with bench.worker():
        bench.losses(bench.train(MODEL, range(1, 5)))
    assert len(bench.store.jobs.history(MODEL, -1, 100)) == 5


def test_what_a_killed_process_left_of_snapshots_is_removed(tmp_path: Path) -> None:
    for run, name in (("s_train_0", "7"), ("s_train_0", "6"), ("s_train_0", ".unfinished-x"), ("s_train_1", "3")):
        (tmp_path / run / "weights" / name).mkdir(parents=True)
    tidy_snapshots(tmp_path, {MODEL: 7})
    assert [folder.relative_to(tmp_path).as_posix() for folder in tmp_path.glob("*/weights/*")] == [
        "s_train_0/weights/7"
    ]
    assert [folder.name for folder in tmp_path.iterdir()] == ["s_train_0"]
    assert snapshot_path(MODEL, 7) == "tinker://s:train:0/weights/7"
