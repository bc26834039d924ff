"""Memory that the allocator keeps for reuse, and the system could use better; and what is rubbish in it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

_YOUNG_OBJECTS = 500_000
"""More than those of a thousand requests that wait, which Python would look through for next to nothing."""
_NEVER = 1_000_000


def available_memory() -> int:
    """What this process could take without a loss for others; where the system does not tell, all there is."""
    with suppress(OSError, StopIteration), Path("/proc/meminfo").open() as lines:
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def give_back_memory() -> None:
    """Returns what is free inside this process to the system, where the C library knows how."""
    trim = _trim()
    if trim is not None:
        trim(0)


def collect_seldom() -> None:
    """Python looks for rubbish among all objects when their number has grown a little, and nobody is answered then.

    With a thousand connections that takes a fifth of a second, every few seconds. Most of what we use is freed without
    it, so young objects are looked at only if there are very many, and old ones when `collect` is called.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, _NEVER)


def collect() -> None:
    """Finds rubbish among all objects, and gives back its memory."""
    gc.collect()
    give_back_memory()


@cache
def _trim() -> Callable[[int], int] | None:
    """Only glibc keeps much, and only glibc has this function."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
