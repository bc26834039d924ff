"""Who may look into a state folder: nobody but its owner, if it was made by us."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinsmith.server import main
from tinsmith.server.backup import back_up
from tinsmith.server.state_locks import sole_use
from tinsmith.server.store import Store


@pytest.fixture(autouse=True)
def _generous() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_server_makes_its_folder_for_its_owner_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sole_use(tmp_path / "state"):
        assert mode(tmp_path / "state") == 0o700
    main._warn_if_open_to_all(tmp_path / "state")
    assert caplog.text == ""


def test_a_database_and_what_lies_beside_it_are_for_its_owner_alone(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'new' / 'tinsmith.db'}")
    store.keys.create("", "laptop")
    store.begin_reserve()
    assert mode(tmp_path / "new") == 0o700
    files = {file.name: mode(file) for file in (tmp_path / "new").iterdir()}
    assert {"tinsmith.db", "tinsmith.db-wal", "tinsmith.db-shm", "reserve"} <= files.keys()
    assert {each for name, each in files.items() if not name.endswith(".lock")} == {0o600}
    store.close()


def test_so_is_a_backup(tmp_path: Path) -> None:
    Store(f"sqlite:///{tmp_path / 'state' / 'tinsmith.db'}").close()
    copy = tmp_path / "copy"
    copy.mkdir()
    back_up(tmp_path / "state", copy)
    assert (mode(copy), mode(copy / "tinsmith.db")) == (0o700, 0o600)


def test_a_folder_that_was_there_is_left_as_it_is_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    with sole_use(state), caplog.at_level(logging.WARNING):
        main._warn_if_open_to_all(state)
    assert mode(state) == 0o755
    assert f"Close it with: chmod 700 {state}" in caplog.text
