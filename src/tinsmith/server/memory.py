"""Memory that the allocator keeps for reuse, and the system could use better."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back_memory() -> None:
    """Returns what is free inside this process to the system, where the C library knows how."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """Only glibc keeps much, and only glibc has this function."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
