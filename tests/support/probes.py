"""What a process costs: stalls of an event loop, memory, open sockets, threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class LoopLag:
    """Measures how late a loop runs what is due. `worst` is the longest stall so far, in seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float = 0.001) -> None:
        self.worst = 0.0
        self._loop = loop
        self._interval = interval
        self._watching = False

    def start(self) -> None:
        self._watching = True
        self._loop.call_soon_threadsafe(self._tick, None)

    def stop(self) -> None:
        self._watching = False

    def _tick(self, due: float | None) -> None:
        now = time.perf_counter()
        if due is not None:
            self.worst = max(self.worst, now - due)
        if self._watching and not self._loop.is_closed():
            self._loop.call_later(self._interval, self._tick, now + self._interval)


@contextlib.contextmanager
def loop_lag(loop: asyncio.AbstractEventLoop) -> Iterator[LoopLag]:
    """Watch a loop (its own thread or another's) while the block runs.

    A stall that is still going on when the block ends is not seen: let the loop run once more before leaving.
    """
    probe = LoopLag(loop)
    probe.start()
    try:
        yield probe
    finally:
        probe.stop()


def rss() -> int:
    """Resident memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_sockets() -> int:
    """Sockets this process holds. Unlike `asyncio`'s own bookkeeping this sees those of native code too."""
    count = 0
    for entry in os.scandir("/proc/self/fd"):
        # The descriptor of the scan itself is gone by the time it is read.
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(entry.path).startswith("socket:")
    return count


def threads() -> list[str]:
    """Names of the Python threads alive."""
    return [thread.name for thread in threading.enumerate()]


def native_threads() -> int:
    """All threads of this process, those of native code included."""
    return len(os.listdir("/proc/self/task"))
