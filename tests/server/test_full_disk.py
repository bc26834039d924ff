"""A disk that has no room for a checkpoint, or for anything: who waits, who goes on, and what it costs."""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from safetensors import SafetensorError

from tinsmith.server import full_disk
from tinsmith.server.store import StoreUnavailableError, reserve
from tinsmith.server.store.jobs import Jobs
from tinsmith.server.store.records import Done

if TYPE_CHECKING:
    from tests.server.workbench import Workbench

PLENTY = 2**40
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


class Room:
    """How many bytes are said to be free."""

    free = PLENTY


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    made = Room()
    monkeypatch.setattr(reserve, "free_bytes", lambda folder: made.free)
    monkeypatch.setattr(full_disk, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(full_disk, "LOOK_SECONDS", 0.1)
    return made


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def save(bench: Workbench, model_id: str, seq_id: int, name: str = "a") -> str:
    body = {"model_id": model_id, "seq_id": seq_id, "path": name}
    return bench.submit("save_weights", model_id, seq_id=seq_id, payload=msgspec.json.encode(body))


def is_open(bench: Workbench, job: str) -> bool:
    return bench.store.results.statuses([job])[job].outcome is None


def unfinished(bench: Workbench) -> list[Path]:
    return [*bench.state.glob("*/*/*/.unfinished*")]


def test_a_save_that_does_not_fit_waits_alone_with_its_model_in_memory(
    bench: Workbench, room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    with bench.worker():
        mine, other = bench.create("s:train:0"), bench.create("s:train:1")
        bench.losses(bench.train(mine, range(1, 5)))
        room.free = full_disk.KEPT_BYTES
        saved, step, later = save(bench, mine, 5), bench.step(mine, 6), bench.train(mine, range(7, 87))
        until(lambda: bench.no_room)
        bench.losses(bench.train(other, range(1, 5)))  # though more wait for the other than a worker takes at once
        bench.tokens(bench.sample(bench.base_sampler(), 0))
        assert all(is_open(bench, job) for job in (saved, step, *later))
        assert list(bench.no_room) == [mine]
        assert bench.no_room[mine].startswith("A checkpoint of ")
        assert "does not fit: the server's disk has 8,192 KiB free, and 8,192 KiB of that" in bench.no_room[mine]
        room.free = PLENTY
        assert isinstance(bench.outcome(saved), Done)
        bench.losses(later)
        assert not bench.no_room
    assert bench.replays == []
    assert caplog.text.count("Work on s:train:0 waits. Make room on the disk of ") == 1


@pytest.mark.parametrize(
    "trouble",
    [
        NO_SPACE,
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_save_that_fills_the_disk_is_done_later_and_leaves_nothing_half_written(
    bench: Workbench, room: Room, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    from tinsmith.server.engine import adapter_files

    real, tries = adapter_files.write_adapter, 0

    def write(folder: Path, *rest: Any, **options: Any) -> None:
        nonlocal tries
        tries += 1
        real(folder, *rest, **options)
        if tries < 4:
            raise trouble

    with bench.worker():
        model_id = bench.create("s:train:0")
        bench.losses(bench.train(model_id, range(1, 3)))
        monkeypatch.setattr(adapter_files, "write_adapter", write)
        saved = save(bench, model_id, 3)
        until(lambda: tries)
        until(lambda: bench.no_room)
        assert unfinished(bench) == []
        assert isinstance(bench.outcome(saved), Done)
    assert tries >= 4
    assert bench.replays == []


def test_a_try_that_met_a_full_disk_does_not_count_against_the_job(bench: Workbench, room: Room) -> None:
    with bench.worker():
        model_id = bench.create("s:train:0")
        bench.losses(bench.train(model_id, range(1, 3)))
        room.free = 0
        save(bench, model_id, 3)
        until(lambda: bench.no_room)
    (waiting,) = bench.store.jobs.claim(bench.settings.base_model, "looks", train=9)
    assert (waiting.kind, waiting.attempts) == ("save_weights", 0)


def test_a_load_that_does_not_fit_is_done_later(bench: Workbench, room: Room) -> None:
    with bench.worker():
        first, second = bench.create("s:train:0"), bench.create("s:train:1")
        bench.losses(bench.train(first, range(1, 3)))
        path = bench.save(first, 3, "a")
        bench.losses(bench.train(second, range(1, 3)))
        room.free = 0
        loaded, loss = bench.load(second, 3, path, optimizer=True), bench.data(second, 4, first=4)
        until(lambda: bench.no_room)
        expected = bench.losses([bench.data(first, 4, first=4)])
        assert is_open(bench, loaded)
        room.free = PLENTY
        assert isinstance(bench.outcome(loaded), Done)
        assert bench.losses([loss]) == expected


def test_a_load_that_is_cancelled_while_it_waits_for_its_snapshot_has_changed_nothing(
    bench: Workbench, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinsmith.server.engine import adapter_files

    def write(folder: Path, *rest: Any, **options: Any) -> None:
        raise NO_SPACE

    with bench.worker():
        first, second = bench.create("s:train:0"), bench.create("s:train:1")
        bench.losses(bench.train(first, range(1, 3)))
        path = bench.save(first, 3, "a")
        bench.losses(bench.train(second, range(1, 5)))
        expected = bench.losses([bench.data(second, 5, forward_only=True)])
        with monkeypatch.context() as full:
            full.setattr(adapter_files, "write_adapter", write)
            loaded = bench.load(second, 6, path, optimizer=True)
            until(lambda: bench.no_room)
            assert bench.store.jobs.cancel(loaded, "ann") == "cancelled"
        assert bench.losses([bench.data(second, 7, forward_only=True)]) == expected


def test_a_snapshot_that_does_not_fit_stops_nobody(
    bench: Workbench, room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    bench.replay_bound(0.0)
    room.free = 0
    with bench.worker():
        model_id = bench.create("s:train:0")
        bench.losses(bench.train(model_id, range(1, 41)))
    assert bench.replays == []
    assert bench.no_room == {}
    assert not [*bench.state.glob("snapshots/*/weights/*")]
    assert caplog.text.count("A snapshot of s:train:0 cannot be written, so it stays in memory") == 1


def test_without_room_in_memory_and_on_the_disk_those_in_memory_go_on(
    bench: Workbench, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.server.trainer.SHARE_OF_MEMORY", 0.0)  # one model at a time
    with bench.worker():
        first = bench.create("s:train:0")
        bench.losses(bench.train(first, range(1, 3)))
        room.free = 0
        second = bench.create("s:train:1")
        until(lambda: bench.no_room)
        assert list(bench.no_room) == [second]
        bench.losses(bench.train(first, range(3, 7)))
        waiting = bench.train(second, range(1, 3))
        room.free = PLENTY
        bench.losses(waiting)
    assert bench.replays == []


def test_work_waits_in_memory_until_the_database_can_write_its_outcome(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.server.worker.LOOK_AGAIN_SECONDS", 0.01)
    real, refused = Jobs.complete, 0

    def complete(self: Jobs, *arguments: Any) -> list[str]:
        nonlocal refused
        if refused < 5:
            refused += 1
            full = sqlite3.OperationalError("database or disk is full")
            full.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise StoreUnavailableError("INSERT", {}, full)
        return real(self, *arguments)

    with bench.worker():
        model_id = bench.create("s:train:0")
        bench.losses(bench.train(model_id, range(1, 5)))
        monkeypatch.setattr(Jobs, "complete", complete)
        bench.losses(bench.train(model_id, range(5, 9)))
    assert len(bench.held_up) == refused == 5
    assert bench.replays == []
