"""How scripts share the server of local mode: a folder of locks, which the system drops when a process ends.

    STATE/local/
        gate.lock       held while a script finds or starts the server, and by a server that has decided to end
        server.lock     held by the server as long as it lives
        server.json     where it is; true only while server.lock is held
        server.log      what it said since its start
        users/*.lock    one for each script that uses it, held as long as the script lives

However a process ends, its locks go with it. So what a killed one leaves behind misleads nobody.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec

if TYPE_CHECKING:
    import filelock


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """What server.json holds."""

    url: str
    model: str
    """As it was asked for; empty for the embedded model."""
    host: str
    """The machine; a state folder may lie on a network drive."""
    pid: int
    started: str
    """UTC, in ISO format."""


class SharedFolder:
    def __init__(self, state: Path) -> None:
        self._root = state / "local"
        self._users = self._root / "users"
        self._record = self._root / "server.json"
        self.log = self._root / "server.log"
        state.mkdir(mode=0o700, parents=True, exist_ok=True)  # it will hold prompts and data
        self._users.mkdir(parents=True, exist_ok=True)

    def gate(self) -> filelock.BaseFileLock:
        """Whoever holds it has the server and its users to himself."""
        return _lock(self._root / "gate.lock")

    def server_lock(self) -> filelock.BaseFileLock:
        return _lock(self._root / "server.lock")

    # With the gate held

    def register(self) -> filelock.BaseFileLock:
        """Counts the caller among the users as long as the lock is held."""
        lock = _lock(self._users / f"{uuid4().hex}.lock")
        lock.acquire(timeout=0)
        return lock

    def is_unused(self) -> bool:
        """Whether no user is left; also clears away what dead ones have left."""
        return not [path for path in self._users.glob("*.lock") if not _removed_if_free(path)]

    def server_lives(self) -> bool:
        lock = self.server_lock()
        if not _acquired(lock):
            return True
        lock.release()
        return False

    def announced(self) -> RunningServer | None:
        """Where the living server is; None while it starts."""
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=RunningServer)
        except FileNotFoundError:
            return None

    def forget_server(self) -> None:
        """To be called when no server lives, before one is started."""
        self._record.unlink(missing_ok=True)

    # With the server's lock held

    def announce(self, server: RunningServer) -> None:
        beside = self._record.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(server))
        os.replace(beside, self._record)


def _lock(path: Path) -> filelock.BaseFileLock:
    import filelock

    return filelock.FileLock(path, thread_local=False)


def _acquired(lock: filelock.BaseFileLock) -> bool:
    import filelock

    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    return True


def _removed_if_free(path: Path) -> bool:
    lock = _lock(path)
    if not _acquired(lock):
        return False
    lock.release()
    path.unlink(missing_ok=True)
    return True
