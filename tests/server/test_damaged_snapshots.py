"""Disks lie: what was written is not what is read. A model goes on from what is whole, or its owner is told."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from tests.server.workbench import Workbench
from tinsmith.server import live_models
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.snapshots import SnapshotFolders
from tinsmith.server.store.records import CheckpointKey, Done, Failed, Model, Snapshots

MODEL, OTHER = "s:train:0", "s:train:1"
WEIGHTS, OPTIMIZER, FACTS = "adapter_model.safetensors", "optimizer.safetensors", "tinsmith.json"


def flip_a_bit(folder: Path, name: str = OPTIMIZER) -> None:
    file = folder / name
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.unlink()  # a checkpoint and the copy that was kept of it may share it
    file.write_bytes(content)


def cut_off(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)


def put_a_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def link_to_itself(folder: Path) -> None:
    (folder / OPTIMIZER).unlink()
    (folder / OPTIMIZER).symlink_to(OPTIMIZER)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip_a_bit,
    "half a file": cut_off,
    "a missing file": lambda folder: (folder / OPTIMIZER).unlink(),
    "an empty file": lambda folder: (folder / WEIGHTS).write_bytes(b""),
    "a file that cannot be opened": put_a_folder,
    "a link that leads nowhere": link_to_itself,
    "missing checksums": lambda folder: (folder / FACTS).unlink(),
    "checksums that are no JSON": lambda folder: (folder / FACTS).write_bytes(b"\0\0"),
    "a missing folder": shutil.rmtree,
}


@pytest.fixture
def often(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot after every operation that changes the model."""
    bench.replay_bound(0.0)
    monkeypatch.setattr(live_models, "WRITING_SHARE", float("inf"))


def snapshot(bench: Workbench, seq_id: int, model: str = MODEL) -> Path:
    return bench.state / "snapshots" / model.replace(":", "_") / "weights" / str(seq_id)


def stored(bench: Workbench) -> Model:
    model = bench.store.models.get(MODEL, "ann")
    assert model is not None
    return model


def last_loss(bench: Workbench, model: str) -> float:
    """What a model does with the gradient that it has, and the loss after that."""
    bench.result(bench.step(model, 6))
    return bench.losses([bench.data(model, 7, first=3)])[0]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_the_snapshot_before_a_damaged_one_is_as_good(bench: Workbench, damage: Callable[[Path], object]) -> None:
    with bench.worker():
        for model in (MODEL, OTHER):
            bench.losses(bench.train(bench.create(model), range(1, 6)))
    damage(snapshot(bench, 5))
    with bench.worker():
        assert last_loss(bench, MODEL) == last_loss(bench, OTHER)
    assert [each.total for each in bench.replays if each.model_id == MODEL] == [1, 1], "told at its begin and end"
    assert stored(bench).corrupted is None
    assert stored(bench).snapshots == Snapshots(last=7, previous=6)


def test_what_is_before_the_first_snapshot_is_the_beginning(bench: Workbench) -> None:
    with bench.worker():
        for model in (MODEL, OTHER):
            bench.losses(bench.train(bench.create(model), range(1, 6)))
    assert stored(bench).snapshots == Snapshots(last=5), "written when the worker ended"
    flip_a_bit(snapshot(bench, 5))
    with bench.worker():
        assert last_loss(bench, MODEL) == last_loss(bench, OTHER)
    assert max(each.total for each in bench.replays) == 5
    assert stored(bench).snapshots == Snapshots(last=7, previous=5), "the damaged one was replaced"
    flip_a_bit(snapshot(bench, 7))
    with bench.worker():
        assert bench.losses([bench.data(MODEL, 8)]) == bench.losses([bench.data(OTHER, 8)])


def test_a_snapshot_that_turns_out_damaged_in_a_later_life_is_not_all_there_is(bench: Workbench) -> None:
    """First one snapshot is damaged, and then the next: each time there is another way."""
    with bench.worker():
        for model in (MODEL, OTHER):
            bench.losses(bench.train(bench.create(model), range(1, 4)))
    flip_a_bit(snapshot(bench, 3))
    with bench.worker():
        for model in (MODEL, OTHER):
            bench.result(bench.step(model, 4))
            bench.losses([bench.data(model, 5, first=5)])
    flip_a_bit(snapshot(bench, 5))
    with bench.worker():
        assert last_loss(bench, MODEL) == last_loss(bench, OTHER)


@pytest.mark.usefixtures("often")
def test_a_model_without_a_whole_snapshot_is_given_up_and_its_owner_told_what_to_load(bench: Workbench) -> None:
    with bench.worker():
        for model in (MODEL, OTHER):
            bench.losses(bench.train(bench.create(model), range(1, 4)))
        path = bench.save(MODEL, 4, "last-good")
        bench.losses([bench.data(MODEL, 5)])
    kept = {seq_id: bench.state / f"kept-{seq_id}" for seq_id in (3, 5)}
    for seq_id, folder in kept.items():
        shutil.copytree(snapshot(bench, seq_id), folder)
    flip_a_bit(snapshot(bench, 5))
    cut_off(snapshot(bench, 3))
    with bench.worker():
        outcomes = [bench.outcome(bench.step(MODEL, 6)), bench.outcome(bench.data(MODEL, 7))]
        bench.result(bench.step(OTHER, 4))
    for outcome in outcomes:
        assert isinstance(outcome, Failed)
        assert outcome.category == "server"
        assert "the snapshot after operation 5: optimizer.safetensors has the checksum" in outcome.error
        assert "the snapshot after operation 3: adapter_model.safetensors has" in outcome.error
        assert f"Make a new model from its last checkpoint, {path}" in outcome.error
    assert "checksum" in str(stored(bench).corrupted)

    for seq_id, folder in kept.items():  # from a backup
        shutil.rmtree(snapshot(bench, seq_id))
        shutil.copytree(folder, snapshot(bench, seq_id))
    with bench.worker():
        assert isinstance(bench.outcome(bench.step(MODEL, 8)), Done)
    assert stored(bench).corrupted is None


@pytest.mark.usefixtures("often")
def test_a_model_without_a_checkpoint_says_that_too(bench: Workbench) -> None:
    with bench.worker():
        bench.losses(bench.train(bench.create(MODEL), range(1, 4)))
    shutil.rmtree(bench.state / "snapshots")
    with bench.worker():
        outcome = bench.outcome(bench.step(MODEL, 4))
    assert isinstance(outcome, Failed)
    assert "the snapshot after operation 3: its folder is missing" in outcome.error
    assert "It has no checkpoint: begin with a new model" in outcome.error


def test_a_snapshot_of_a_release_without_checksums_is_read(bench: Workbench) -> None:
    with bench.worker():
        for model in (MODEL, OTHER):
            bench.losses(bench.train(bench.create(model), range(1, 6)))
    facts = msgspec.json.decode((snapshot(bench, 5) / FACTS).read_bytes())
    del facts["checksums"]
    (snapshot(bench, 5) / FACTS).write_bytes(msgspec.json.encode(facts))
    with bench.worker():
        assert last_loss(bench, MODEL) == last_loss(bench, OTHER)
    assert bench.replays == []


@pytest.mark.parametrize("fate", ["deleted", "overwritten"])
def test_a_checkpoint_that_was_loaded_is_loaded_again_whatever_became_of_it(bench: Workbench, fate: str) -> None:
    with bench.worker():
        for model in (MODEL, OTHER):
            bench.train(bench.create(model), range(1, 4))
            path = bench.save(model, 4, "latest")
            bench.result(bench.load(model, 5, path, optimizer=True))
        if fate == "overwritten":
            bench.result(bench.step(OTHER, 6))
            bench.save(OTHER, 7, "latest", overwrite=True)
    CheckpointFolders(bench.state / "checkpoints").delete(f"tinker://{MODEL}/weights/latest")
    if fate == "overwritten":
        folders = bench.state / "checkpoints"
        shutil.copytree(folders / "s_train_1" / "weights" / "latest", folders / "s_train_0" / "weights" / "latest")
    flip_a_bit(snapshot(bench, 5))
    with bench.worker():
        bench.result(bench.step(MODEL, 6))
        if fate == "deleted":
            bench.result(bench.step(OTHER, 6))
        seq_id = 7 if fate == "deleted" else 8
        found = bench.losses([bench.data(MODEL, 7, first=3), bench.data(OTHER, seq_id, first=3)])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def made_from_a_checkpoint(bench: Workbench) -> str:
    """MODEL, with one snapshot, and the path that it was made from."""
    bench.losses(bench.train(bench.create(OTHER), range(1, 4)))
    path = bench.save(OTHER, 4, "early")
    body = {"model_id": MODEL, "seq_id": 0, "path": path, "optimizer": True}
    bench.result(bench.submit("load_weights", MODEL, makes_model=True, seq_id=0, payload=msgspec.json.encode(body)))
    return path


def test_what_a_model_was_made_from_outlives_its_damaged_snapshot(bench: Workbench) -> None:
    with bench.worker():
        made_from_a_checkpoint(bench)
        expected = bench.losses([bench.data(OTHER, 5, forward_only=True)])
    flip_a_bit(snapshot(bench, 0))
    with bench.worker():
        assert bench.losses([bench.data(MODEL, 1, forward_only=True)]) == expected
    assert stored(bench).snapshots == Snapshots(last=0), "written again at once"

    bench.store.models.forget_snapshots(MODEL, [0])  # as if a kill had come between
    folders = SnapshotFolders(CheckpointFolders(bench.state / "snapshots"))
    folders.remove_unneeded(bench.store.models.snapshots())
    assert not snapshot(bench, 0).exists()
    with bench.worker():
        assert bench.losses([bench.data(MODEL, 2, forward_only=True)]) == expected


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "deleted"])
def test_a_lost_model_that_was_made_from_a_checkpoint_names_it_while_it_is_there(
    bench: Workbench, is_kept: bool
) -> None:
    with bench.worker():
        path = made_from_a_checkpoint(bench)
    if not is_kept:
        assert bench.store.checkpoints.delete(CheckpointKey.of(path), "ann")
    flip_a_bit(snapshot(bench, 0))
    flip_a_bit(snapshot(bench, 0).with_name("0-loaded"), WEIGHTS)
    with bench.worker():
        outcome = bench.outcome(bench.step(MODEL, 1))
    assert isinstance(outcome, Failed)
    assert "optimizer.safetensors has the checksum" in outcome.error
    assert ("make a new model from the one it was made from, " + path in outcome.error) is is_kept
    assert ("begin with a new model" in outcome.error) is not is_kept


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER])
def test_a_damaged_checkpoint_is_refused_and_the_model_goes_on(bench: Workbench, name: str) -> None:
    with bench.worker():
        bench.losses(bench.train(bench.create(MODEL), range(1, 4)))
        path = bench.save(MODEL, 4, "early")
        flip_a_bit(bench.state / "checkpoints" / "s_train_0" / "weights" / "early", name)
        refused = bench.outcome(bench.load(MODEL, 5, path, optimizer=True))
        bench.result(bench.step(MODEL, 6))
    assert isinstance(refused, Failed)
    assert list(bench.state.glob("snapshots/*/*/*-loaded")) == [], "nothing was loaded, and nothing is kept of it"
    assert f"The files of {path} are damaged" in refused.error
    assert "Load another checkpoint" in refused.error


def test_a_sampler_whose_written_weights_are_damaged_says_so(bench: Workbench) -> None:
    bench.replay_bound(0.0)
    with bench.worker():
        bench.create(MODEL)
        sampler_id = msgspec.json.decode(bench.result(bench.copy(MODEL, 1)))["sampling_session_id"]
        for seq_id in (2, 3, 4):
            bench.losses([bench.data(MODEL, seq_id)])
    (file,) = (bench.state / "samplers").iterdir()
    flip_a_bit(file.parent, file.name)
    with bench.worker():
        failed = bench.outcome(bench.sample(sampler_id, 0, max_tokens=2))
    assert isinstance(failed, Failed)
    assert "are damaged" in failed.error
    assert "has the checksum" in failed.error
    assert "Make a new sampling client" in failed.error


# The folders


def test_what_a_killed_process_left_of_snapshots_is_removed(tmp_path: Path) -> None:
    names = ("7", "5", "6", "7-loaded", "6-loaded", "5-loaded", ".unfinished-x")
    for folder in (*(f"s_train_0/weights/{name}" for name in names), "s_train_1/weights/3"):
        (tmp_path / folder).mkdir(parents=True)
    folders = SnapshotFolders(CheckpointFolders(tmp_path))
    folders.tidy()
    folders.remove_unneeded({MODEL: Snapshots(last=7, previous=5)})
    assert sorted(folder.name for folder in tmp_path.glob("*/weights/*")) == ["5", "6-loaded", "7", "7-loaded"]


def test_a_model_that_the_store_does_not_know_is_set_aside_for_some_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = SnapshotFolders(CheckpointFolders(tmp_path))
    aside = tmp_path / ".unknown" / "s_train_1"
    for name in ("first", "second"):
        (tmp_path / "s_train_1" / "weights" / name).mkdir(parents=True)
        folders.remove_unneeded({})
        folders.remove_unneeded({})
        assert [folder.name for folder in tmp_path.iterdir()] == [".unknown"]
        assert [folder.name for folder in aside.glob("weights/*")] == [name]
    assert f"set aside, in {aside}" in caplog.text
    now = datetime.now(UTC)
    folders.remove_unknown(now - timedelta(days=1))
    assert aside.exists()
    folders.remove_unknown(now + timedelta(days=1))
    assert not aside.exists()


def test_pruning_leaves_what_a_successor_has_written(tmp_path: Path) -> None:
    for name in ("3", "5", "7", "9", "9-loaded", ".unfinished-x"):
        (tmp_path / "s_train_0" / "weights" / name).mkdir(parents=True)
    SnapshotFolders(CheckpointFolders(tmp_path)).prune(MODEL, Snapshots(last=7, previous=5))
    left = sorted(folder.name for folder in (tmp_path / "s_train_0" / "weights").iterdir())
    assert left == [".unfinished-x", "5", "7", "9", "9-loaded"]
