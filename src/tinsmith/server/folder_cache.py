"""Local copies of folders that lie elsewhere, shared by all processes that use a state folder.

    STATE/cache/<place>/<stamp>/       what lies there under this stamp, which is never changed
    STATE/cache/.unfinished-.../       what is being fetched, or on its way there

Those that were not used for longest go when there are too many, or the disk is nearly full. What was read within the
hour stays, since somebody may still be reading it. Everything here can be fetched again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from tinsmith.server.checkpoints import files_in
from tinsmith.server.state_locks import one_at_a_time
from tinsmith.server.store import reserve

IN_USE_SECONDS = 3600.0
FREE_BYTES = 4 * 2**30
"""What is left of the disk for others before any copies are kept that nobody reads."""

_UNFINISHED = ".unfinished-"
_DEPTH = "[!.]*/*/*/*/*"
"""What is kept, a run, a kind, a name and a stamp."""


class _Kept(NamedTuple):
    used: float
    size: int
    folder: Path


class FolderCache:
    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._lock = root.with_name(f"{root.name}.lock")

    def place(self, place: str, stamp: str) -> Path:
        return self._root / place / stamp

    def find(self, place: str, stamp: str) -> Path | None:
        folder = self.place(place, stamp)
        with self._alone():
            try:
                os.utime(folder)  # it was used
            except FileNotFoundError:
                return None
        return folder

    def make_scratch(self) -> Path:
        scratch = self._root / f"{_UNFINISHED}{uuid4().hex}"
        scratch.mkdir(mode=0o700, parents=True)
        return scratch

    def keep(self, scratch: Path, place: str, stamp: str, *, is_read: bool) -> Path:
        """What is in this folder is what lies there under this stamp. What is not read now is the first to go."""
        folder, used = self.place(place, stamp), time.time() - (0.0 if is_read else IN_USE_SECONDS)
        with self._alone():
            if not folder.exists():  # else somebody else has fetched it, too
                folder.parent.mkdir(parents=True, exist_ok=True)
                os.utime(scratch, (used, used))
                scratch.rename(folder)
            gone = [self._take_out(kept.folder) for kept in self._too_much()]
        for each in (scratch, *gone):
            shutil.rmtree(each, ignore_errors=True)
        return folder

    def drop(self, place: str) -> None:
        """All that is kept of a place, or of the places below it."""
        with self._alone():
            gone = self._take_out(self._root / place) if (self._root / place).exists() else None
        if gone is not None:
            shutil.rmtree(gone, ignore_errors=True)

    def tidy(self) -> None:
        """Removes what a killed process left. Called at start, before anything is written."""
        for folder in self._root.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _too_much(self) -> Iterator[_Kept]:
        kept = [_Kept(folder.stat().st_mtime, _size(folder), folder) for folder in self._root.glob(_DEPTH)]
        free, in_use_since = reserve.free_bytes(self._root), time.time() - IN_USE_SECONDS
        excess = max(sum(each.size for each in kept) - self._max_bytes, FREE_BYTES - free)
        for each in sorted(kept):
            if excess <= 0 or each.used > in_use_since:
                return
            excess -= each.size
            yield each

    def _take_out(self, folder: Path) -> Path:
        """Renamed first, so that nobody finds one that is half gone."""
        aside = self._root / f"{_UNFINISHED}{uuid4().hex}"
        folder.rename(aside)
        for parent in folder.parents:
            if parent == self._root or any(parent.iterdir()):
                break
            parent.rmdir()
        return aside

    def _alone(self) -> AbstractContextManager[None]:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return one_at_a_time(self._lock)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in files_in(folder).values())
