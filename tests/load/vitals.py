"""What a server and its clients take up, seen from outside: by process, and in the state folder."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from tests.fuzz.aftermath import Database
from tinsmith.server.config import DATABASE_FILE

Vitals = dict[str, float]
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 2**20
_CLOSE_WAIT = "08"
_CHECKPOINT_SECONDS = 20.0
_GONE = (FileNotFoundError, ProcessLookupError)
"""What ends while it is being looked at."""


def of_process(pid: int) -> Vitals:
    """Memory in MiB, and how many it has of each other thing."""
    folder = Path(f"/proc/{pid}")
    files = list(_open_files(folder / "fd"))
    sockets = {name.removeprefix("socket:[").rstrip("]") for name in files if name.startswith("socket:")}
    return {
        "memory": int((folder / "statm").read_text().split()[1]) * _PAGE / _MIB,
        "files": len(files),
        "sockets": len(sockets),
        "sockets nobody closes": len(sockets & _inodes(folder / "net/tcp", _CLOSE_WAIT)),
        "threads": len(list((folder / "task").iterdir())),
        "processes": len(children(pid)),
    }


def children(pid: int) -> list[int]:
    """Also those that ended and that nobody has asked how."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(*_GONE):
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def of_state(state: Path) -> Vitals:
    """Rows by table, files and folders of checkpoints, snapshots and samplers, and the size of the database in MiB."""
    below = sum(_entries(folder) for folder in state.iterdir() if folder.is_dir())
    with closing(Database(state)) as database:
        rows = {f"rows of {table}": float(count) for table, count in database.rows().items()}
    sizes = {"database": DATABASE_FILE, "write-ahead log": f"{DATABASE_FILE}-wal"}
    return {**rows, "files and folders": below, **{name: _mib(state / file) for name, file in sizes.items()}}


def expire_checkpoints(state: Path) -> None:
    """Time flies for checkpoints: the least they can be given is an hour, of which twenty seconds are left."""
    used = 1_000_000 * (time.time() - _CHECKPOINT_SECONDS)
    with closing(sqlite3.connect(state / DATABASE_FILE, timeout=60)) as connection, connection:
        connection.execute("UPDATE checkpoints SET expires = 0 WHERE created < ? AND expires IS NOT NULL", [used])


def _entries(folder: Path) -> int:
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))


def _mib(path: Path) -> float:
    with suppress(*_GONE):
        return path.stat().st_size / _MIB
    return 0.0


def _open_files(folder: Path) -> Iterator[str]:
    for entry in folder.iterdir():
        with suppress(*_GONE):
            yield str(entry.readlink())


def _inodes(table: Path, state: str) -> set[str]:
    """The sockets of a state in the kernel's table, in which it is the fourth field and the inode the tenth."""
    lines = [line.split() for line in table.read_text().splitlines()[1:]]
    return {fields[9] for fields in lines if fields[3] == state}
