"""What was looked up a moment ago and need not be looked up again."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MAX_ENTRIES = 10_000


class Recent(Generic[K, V]):
    """Entries are good for some seconds: so much longer may something be used that has changed meanwhile."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._entries: dict[K, tuple[float, V]] = {}

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return entry[1] if entry is not None and self._now() < entry[0] else None

    def put(self, key: K, value: V) -> None:
        if len(self._entries) >= _MAX_ENTRIES:
            self._entries.clear()
        self._entries[key] = self._now() + self._seconds, value

    def clear(self) -> None:
        self._entries.clear()
