"""A copy of a state folder while its server works: what a power cut would leave at one moment.

A server goes on from whatever a power cut leaves, as long as the database and the files are of one moment. Files are
never changed in place: they are written under another name, then given theirs, and then the database learns of them. So
they are copied between two copies of the database, again and again until both copies speak of the same files.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tinsmith.errors import ConfigError
from tinsmith.server.config import DATABASE_FILE
from tinsmith.server.state_locks import DATABASE_ID
from tinsmith.server.store import Store
from tinsmith.server.store.database import make_private
from tinsmith.server.store.records import Snapshots

FOLDERS = ("checkpoints", "snapshots", "samplers")
MAX_TRIES = 20

OnProgress = Callable[[str, int, int], None]
"""Hears which file is next, how many bytes are copied, and how many there are."""


class Known(NamedTuple):
    """The files that a database speaks of."""

    checkpoints: dict[str, str]
    """The job that wrote each."""
    snapshots: dict[str, Snapshots]
    """Those of each model."""


def back_up(state: Path, folder: Path, on_progress: OnProgress = lambda name, done, total: None) -> Known:
    """Fills an empty folder with a copy of a state folder that a server may be using, for its owner alone."""
    folder.chmod(0o700)
    if (state / DATABASE_ID).exists():
        shutil.copy2(state / DATABASE_ID, folder)
    known = _copy_database(state, folder)
    for _ in range(MAX_TRIES):
        _copy_files(state, folder, on_progress)
        later = _copy_database(state, folder)
        if later == known:
            return known
        known = later
    raise ConfigError(
        f"The files in {state} changed faster than they could be copied, {MAX_TRIES} times. Try again when the server "
        "is less busy, or stop it for the time of the copy."
    )


def _copy_database(state: Path, folder: Path) -> Known:
    copy = folder / DATABASE_FILE
    copy.unlink(missing_ok=True)
    make_private(copy)
    with (
        closing(sqlite3.connect(f"{(state / DATABASE_FILE).as_uri()}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
    store = Store(f"sqlite:///{copy}")
    try:
        return Known(store.checkpoints.writers(), store.models.snapshots())
    finally:
        store.close()


def _copy_files(state: Path, folder: Path, on_progress: OnProgress) -> None:
    files = dict(_files(state))
    for gone in [path for path, _ in _files(folder) if path not in files]:
        (folder / gone).unlink()
    done, total = 0, sum(files.values())
    for path, size in files.items():
        on_progress(path.name, done, total)
        _copy(state / path, folder / path)
        done += size


def _files(root: Path) -> Iterator[tuple[Path, int]]:
    """Whole ones, by their path within the folder, with their size."""
    for name in FOLDERS:
        for path in (root / name).rglob("*"):
            inside = path.relative_to(root)
            if path.is_file() and not any(part.startswith(".") for part in inside.parts):
                yield inside, path.stat().st_size


def _copy(source: Path, target: Path) -> None:
    """A link where that is possible, since neither will be changed; one that is gone by now is not needed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if target.exists():
            if _is_same(source, target):
                return
            target.unlink()
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without links
            shutil.copy2(source, target)
    except FileNotFoundError:
        target.unlink(missing_ok=True)


def _is_same(source: Path, target: Path) -> bool:
    one, other = source.stat(), target.stat()
    is_link = (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
    return is_link or (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)
