"""A state folder on a disk that is wholly full: what works all the same, so that there is a way out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.troubles import SmallDisk
from tests.server.api.running import RunningServer
from tests.server.api.test_tidying import MINUTE, Minutes
from tests.server.small_disk import small_disk
from tinsmith.server import tidying
from tinsmith.server.store import StoreUnavailableError
from tinsmith.server.store.reserve import NAME, SIZE_BYTES, Reserve


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as made:
        yield made


def test_checkpoints_are_deleted_and_withdrawn_on_a_full_disk(disk: SmallDisk) -> None:
    with RunningServer(disk.folder) as running:
        running.store.begin_reserve()
        model_id = running.model()
        place = f"/api/v1/training_runs/{model_id}/checkpoints/weights"
        for seq_id, name in enumerate(("kept", "shared"), start=1):
            running.result(running.post("save_weights", {"model_id": model_id, "seq_id": seq_id, "path": name}))
        assert running.call("POST", f"{place}/shared/publish").status == 204
        disk.begin()
        assert running.post("create_session", {"tags": [], "sdk_version": "1"}).status == 503
        assert running.call("DELETE", f"{place}/shared/publish").status == 204
        assert running.call("DELETE", f"{place}/kept").status == 204
        (left,) = running.get(f"training_runs/{model_id}/checkpoints").json()["checkpoints"]
        assert (left["checkpoint_id"], left["public"]) == ("weights/shared", False)
        assert (disk.folder / NAME).stat().st_size < SIZE_BYTES
        disk.end()
        running.store.fill_reserve()
        assert (disk.folder / NAME).stat().st_size == SIZE_BYTES


def test_a_reserve_is_made_when_there_is_room_and_given_up_piece_by_piece(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path)
    reserve.fill()
    assert not (tmp_path / NAME).exists()
    reserve.begin()
    assert (tmp_path / NAME).stat().st_size == SIZE_BYTES
    assert (tmp_path / NAME).stat().st_blocks * 512 >= SIZE_BYTES
    pieces = 0
    while reserve.give_up_a_piece():
        pieces += 1
    assert pieces == 8
    reserve.fill()
    assert (tmp_path / NAME).stat().st_size == SIZE_BYTES


def test_a_session_whose_heartbeats_could_not_be_written_does_not_end(disk: SmallDisk) -> None:
    timeout = 3 * MINUTE
    with RunningServer(disk.folder, session_timeout_seconds=180) as running:
        session_id = running.session()
        minutes = Minutes(running)
        disk.begin()
        assert running.post("session_heartbeat", {"session_id": session_id}).status == 503
        disk.end()
        running.store.sessions.last_unheard = minutes.now + timeout  # the disk was full for so long
        minutes.pass_(timeout + 2 * MINUTE)
        assert running.post("session_heartbeat", {"session_id": session_id}).status == 200
        minutes.pass_(timeout + MINUTE)  # it is counted from the round that sees the heartbeat
        assert running.post("session_heartbeat", {"session_id": session_id}).status == 410


def test_tidying_in_vain_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = threading.Semaphore(0)

    async def fail(*_: object) -> None:
        rounds.release()
        raise StoreUnavailableError("DELETE", {}, Exception("database or disk is full"))

    monkeypatch.setattr(tidying, "ROUND_SECONDS", 0.001)
    monkeypatch.setattr(tidying.Tidying, "round", fail)
    with RunningServer(tmp_path):
        for _ in range(5):
            assert rounds.acquire(timeout=30)
    (line,) = [record for record in caplog.records if record.name == tidying.__name__]
    assert "so nothing is tidied up: " in line.getMessage()
    assert line.exc_info is None
