"""A full disk is no job's fault, and it passes: whoever met it waits, and goes on when there is room."""

from __future__ import annotations

import errno
import re
import sqlite3

from safetensors import SafetensorError

from tinsmith.server.store import StoreUnavailableError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NUMBER = re.compile(r"\(os error (\d+)\)")


class DiskFullError(Exception):
    """Nothing was written. The message is the system's."""


def is_full(error: StoreUnavailableError) -> bool:
    """Whether it is the disk that keeps the database from writing."""
    return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def raise_if_full(error: OSError | SafetensorError) -> None:
    """Raises `DiskFullError` if that is what the error is about; safetensors tells it in words alone."""
    if isinstance(error, OSError):
        number = error.errno
    else:
        found = _NUMBER.search(str(error))
        number = int(found[1]) if found else None
    if number in _NO_ROOM:
        raise DiskFullError(str(error)) from error
