"""Room on the disk for the day when there is none: a full disk must not keep anybody from deleting and revoking.

A file beside the database takes up a few MiB that nobody needs. A write that frees room or takes rights away may have
some of it, a piece at a time, so that there is enough for more than one.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

import sqlalchemy as sa

NAME = "reserve"
PIECE_BYTES = 2**20
SIZE_BYTES = 8 * PIECE_BYTES

_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE}
"""The second is met by who opens a database that nobody has open: the file that processes share cannot be made."""


def is_full(error: sa.exc.OperationalError) -> bool:
    """Whether it is the disk that keeps the database from writing."""
    return getattr(error.orig, "sqlite_errorcode", None) in _FULL


class Reserve:
    def __init__(self, folder: Path) -> None:
        self._file = folder / NAME

    def begin(self) -> None:
        """From now on there is one, as soon as there is room for it."""
        with suppress(OSError):
            os.close(os.open(self._file, os.O_CREAT | os.O_WRONLY, 0o600))
        self.fill()

    def fill(self) -> None:
        """Makes it whole again, if there is twice the room for it and somebody wants one."""
        missing = SIZE_BYTES - self._size()
        with suppress(OSError):
            if missing > 0 and free_bytes(self._file.parent) > missing + SIZE_BYTES:
                self._grow()

    def give_up_a_piece(self) -> bool:
        """There is a little more room on the disk now; False if nothing is left to give."""
        left = self._size()
        if not left:
            return False
        with suppress(FileNotFoundError):
            os.truncate(self._file, max(0, left - PIECE_BYTES))
        return True

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except FileNotFoundError:
            return 0

    def _grow(self) -> None:
        descriptor = os.open(self._file, os.O_WRONLY)
        try:
            # Written, since a file may have a size without taking up room.
            for piece in range(SIZE_BYTES // PIECE_BYTES):
                os.pwrite(descriptor, os.urandom(PIECE_BYTES), piece * PIECE_BYTES)
        finally:
            os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder for who is not root."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
