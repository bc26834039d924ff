"""Disks lie: how it is noticed that what is read is not what was written."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from safetensors import SafetensorError

_CHUNK_BYTES = 2**24
_NOT_ITS_FAULT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EINTR}
"""What any other file would have met too."""


class DamagedError(Exception):
    """What is on the disk is not what was written. The message says which file, and what is wrong with it."""


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Whatever keeps the file of this name from being read is damage, unless the file has nothing to do with it."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_ITS_FAULT:
            raise
        raise DamagedError(f"{name} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, msgspec.DecodeError, ValueError) as error:
        raise DamagedError(f"{name} cannot be read: {error}") from error


def checksum(file: Path) -> int:
    """CRC-32: it finds what goes wrong by chance, ten times as fast as the file is written."""
    found = 0
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            found = zlib.crc32(chunk, found)
    return found


def compare(name: str, found: int, expected: int | None) -> None:
    """`expected` is `None` for a file of a release that wrote no checksums."""
    if expected is not None and found != expected:
        raise DamagedError(f"{name} has the checksum {found:08x} instead of {expected:08x}")
