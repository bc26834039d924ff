"""What was looked up a moment ago and need not be looked up again; and what is looked up once for many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
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


class Latest(Generic[V]):
    """A value that is read anew for everybody who asks, but only once for all who ask in the same moment."""

    def __init__(self, read: Callable[[], Awaitable[V]]) -> None:
        self._read = read
        self._reading = asyncio.Lock()
        self._next: asyncio.Task[V] | None = None

    async def get(self) -> V:
        """As it is after this was called: a reading that has begun before is not good enough."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_next())
        return await asyncio.shield(self._next)  # others may be waiting for it when one gives up

    async def _read_next(self) -> V:
        async with self._reading:
            self._next = None
            return await self._read()
