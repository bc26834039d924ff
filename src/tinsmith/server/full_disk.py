"""A full disk is no job's fault, and it passes: whoever met it waits, and goes on when there is room.

The same is true of a storage that is out of reach (`objects.py`).

Large files are not begun if there is no room for them, and leave some for the database. So one model that cannot be
saved waits alone, in memory, while everybody else goes on.
"""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from tinsmith.server.outage import Outage
from tinsmith.server.store import StoreUnavailableError, reserve

log = logging.getLogger(__name__)

KEPT_BYTES = 8 * 2**20
"""For the database, which everybody's work needs: no file is written that would leave less."""
LOOK_SECONDS = 1.0
RETRY_SECONDS = 10.0
"""Before another try of what did not fit although there seemed to be room: there may be limits that nobody tells us."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NUMBER = re.compile(r"\(os error (\d+)\)")


class Disk:
    """The one that a folder is on, or will be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def free_bytes(self) -> int:
        folder = self._folder
        while not folder.exists():
            folder = folder.parent
        return reserve.free_bytes(folder)

    @contextmanager
    def room(self, what: str, size: int) -> Iterator[None]:
        """For writing something of so many bytes: if the disk is full before or within the block, the error says so."""
        self.check(what, size)
        try:
            yield
        except (OSError, SafetensorError, StoreUnavailableError) as error:
            if is_full(error):
                raise DiskFullError(self, what, size) from error
            raise

    def check(self, what: str, size: int) -> None:
        if not self.fits(size):
            raise DiskFullError(self, what, size)

    def fits(self, size: int) -> bool:
        return size + KEPT_BYTES <= self.free_bytes


class WaitError(Exception):
    """Something was not written or read, through no fault of its own. The message is for whoever waits for it."""

    promise: str
    """When it will be done."""
    is_urgent = False
    """Whether it passes soon, and is asked at every look."""

    @property
    def has_passed(self) -> bool:
        """Whether another try seems to be worth it by now."""
        raise NotImplementedError

    def as_of_now(self) -> WaitError:
        """With what is to be said in this moment."""
        return self


class DiskFullError(WaitError):
    """Something was not written. The message names it and both amounts."""

    promise = "it is done when there is room"

    def __init__(self, disk: Disk, what: str, size: int) -> None:
        super().__init__(_said(f"{what} of {_shown(size)}" if size else what, size, disk.free_bytes))
        self._disk, self._what, self._size = disk, what, size

    @property
    def has_passed(self) -> bool:
        return self._disk.fits(self._size)

    def as_of_now(self) -> DiskFullError:
        return DiskFullError(self._disk, self._what, self._size)


def is_full(error: Exception) -> bool:
    """Whether the disk was full; safetensors tells it in words alone."""
    if isinstance(error, StoreUnavailableError):
        return reserve.is_full(error)
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    found = _NUMBER.search(str(error)) if isinstance(error, SafetensorError) else None
    return found is not None and int(found[1]) in _NO_ROOM


class _Wait(NamedTuple):
    error: WaitError
    retry_at: float


class WaitingForRoom:
    """Models whose next operation does not fit on the disk, or needs files that are out of reach, and samplers of which
    the latter is true. `tell` hears which, each with the reason for its client.
    """

    def __init__(self, state: Path, tell: Callable[[Mapping[str, str]], None]) -> None:
        self._state = state
        self._tell = tell
        self._told: dict[str, str] | None = None  # a worker before this one may have told something
        self._waits: dict[str, _Wait] = {}
        self._outage = Outage(log, over="There is room on the disk again")
        self._look_at = self._over_at = 0.0

    def add(self, streams: Iterable[str], error: WaitError) -> None:
        for stream in streams:
            self._waits[stream] = _Wait(error, time.monotonic() + RETRY_SECONDS * error.has_passed)
        self._look_at = 0.0
        self.look()

    def look(self) -> Collection[str]:
        """Lets those go on for which there is what they need by now, and gives back the others."""
        now = time.monotonic()
        if now < self._look_at:
            for stream in [
                stream for stream, (error, _) in self._waits.items() if error.is_urgent and error.has_passed
            ]:
                del self._waits[stream]
            return self._waits.keys()
        self._look_at = now + LOOK_SECONDS
        for stream, wait in list(self._waits.items()):
            if now >= wait.retry_at and wait.error.has_passed:
                del self._waits[stream]
        self._say()
        return self._waits.keys()

    def _say(self) -> None:
        errors = {stream: wait.error.as_of_now() for stream, wait in self._waits.items()}
        reasons = {stream: f"{error}; {error.promise}" for stream, error in errors.items()}
        if reasons != self._told:
            self._told = reasons
            self._tell(reasons)
        now = time.monotonic()
        full = ((stream, error) for stream, error in errors.items() if isinstance(error, DiskFullError))
        for stream, error in full:  # a storage that is away has said so already
            self._outage.met(f"Work on {stream} waits. Make room on the disk of {self._state}", error)
            self._over_at = now + 2 * RETRY_SECONDS
            return
        if now >= self._over_at:  # the next try may find that it is not
            self._outage.is_over()


def _said(what: str, size: int, free: int) -> str:
    if size > free:
        return f"{what} does not fit: the server's disk has {_shown(free)} free"
    if size + KEPT_BYTES > free:
        kept = f"{_shown(KEPT_BYTES)} of that are kept for the database"
        return f"{what} does not fit: the server's disk has {_shown(free)} free, and {kept}"
    return f"{what} could not be written: the server's disk was full, and has {_shown(free)} free by now"


def _shown(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 10 * 2**20 else f"{size / 2**10:,.0f} KiB"
