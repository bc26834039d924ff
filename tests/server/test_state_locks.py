"""One server for a state folder, and not before the workers of the last one have ended."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tinsmith.errors import ConfigError
from tinsmith.server import state_locks
from tinsmith.server.state_locks import check_database, note_database, sole_use

_WORKER = """
import sys
from pathlib import Path
from tinsmith.server.state_locks import hold_as_worker

hold_as_worker(Path(sys.argv[1]))
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A worker whose server is gone; it ends when its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def test_a_second_server_on_the_same_state_folder_is_refused(tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / "serve.lock"),
        pytest.raises(ConfigError, match="Another server uses the state folder"),
        sole_use(tmp_path),
    ):
        raise AssertionError("two servers at once")


def test_a_new_server_waits_for_the_workers_of_the_last_one(tmp_path: Path, orphan: subprocess.Popen[str]) -> None:
    entered = threading.Event()

    def start() -> None:
        with sole_use(tmp_path):
            entered.set()

    thread = threading.Thread(target=start)
    thread.start()
    assert not entered.wait(0.2)
    orphan.kill()
    assert entered.wait(30)
    thread.join(30)


def test_it_does_not_wait_for_ever(
    tmp_path: Path, orphan: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_locks, "WAIT_SECONDS", 0.01)
    with pytest.raises(ConfigError, match="still uses the state folder"), sole_use(tmp_path):
        raise AssertionError("the worker is still there")
    monkeypatch.undo()
    orphan.kill()
    with sole_use(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Choose another with --state"), sole_use(tmp_path / "file" / "state"):
        raise AssertionError("there is no folder")


def test_a_folder_takes_the_first_database_for_its_own_and_no_other_after_it(tmp_path: Path) -> None:
    check_database(tmp_path, None)
    check_database(tmp_path, "of a start that failed")
    for _ in range(2):
        check_database(tmp_path, "mine")
        note_database(tmp_path, "mine")
    for other in ("another", None):
        with pytest.raises(ConfigError, match="belongs to another database, that with the id mine") as refused:
            check_database(tmp_path, other)
        assert f"delete {tmp_path / 'database-id'}" in str(refused.value)
    assert [file.name for file in tmp_path.iterdir()] == ["database-id"]
