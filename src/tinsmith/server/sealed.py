"""Folders that are costly to make: made once, by one process, and known to be whole whenever they are used.

A folder is filled beside its place and moved there at the end, with a seal that lists its files. One that lacks its
seal or differs from it, left by a crash or damaged since, is made anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tinsmith.errors import ConfigError, MissingExtraError

_SEAL = "tinsmith.json"
_LOCK_TIMEOUT_SECONDS = 1800


class _File(msgspec.Struct, frozen=True):
    size: int
    modified_ns: int
    sha256: str


class _Seal(msgspec.Struct, frozen=True):
    recipe: int
    files: dict[str, _File]


def is_whole(folder: Path, recipe: int) -> bool:
    """Whether the folder was finished with this recipe and holds what it held then."""
    try:
        seal = msgspec.json.decode((folder / _SEAL).read_bytes(), type=_Seal)
        return seal.recipe == recipe and all(_is_unchanged(folder / name, was) for name, was in seal.files.items())
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return False


def make_once(folder: Path, recipe: int, fill: Callable[[Path], None], on_wait: Callable[[], None]) -> None:
    """Have `fill` make the folder, unless it is whole; `on_wait` is called if another process is at it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f"{folder.name}.lock"), on_wait):
        if not is_whole(folder, recipe):
            _make(folder, recipe, fill)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    try:
        import filelock
    except ImportError as error:
        raise MissingExtraError("filelock", "server", f"Locking {path}") from error
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        on_wait()
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT_SECONDS)
        except filelock.Timeout as error:
            raise ConfigError(
                f"Another process has held {path} for {_LOCK_TIMEOUT_SECONDS // 60} minutes. End it and try again."
            ) from error
    try:
        yield
    finally:
        lock.release()


def _make(folder: Path, recipe: int, fill: Callable[[Path], None]) -> None:
    workshop = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(workshop, ignore_errors=True)
    workshop.mkdir()
    try:
        fill(workshop)
        seal = _Seal(recipe, {path.name: _to_disk(path) for path in sorted(workshop.iterdir())})
        (workshop / _SEAL).write_bytes(msgspec.json.format(msgspec.json.encode(seal)))
        shutil.rmtree(folder, ignore_errors=True)
        workshop.rename(folder)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _to_disk(path: Path) -> _File:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    status = path.stat()
    return _File(status.st_size, status.st_mtime_ns, sha256(path))


def _is_unchanged(path: Path, was: _File) -> bool:
    """As git does it: the content is read only where the time differs, as it does in a copied folder."""
    status = path.stat()
    if status.st_size != was.size:
        return False
    return status.st_mtime_ns == was.modified_ns or sha256(path) == was.sha256
