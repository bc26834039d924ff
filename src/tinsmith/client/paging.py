"""Listings without paging by hand: one lazy object for `for` and `async for`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from tinsmith.client.futures import APIFuture

T = TypeVar("T")
Position = TypeVar("Position")


class Page(NamedTuple, Generic[T, Position]):
    items: Sequence[T]
    next: Position | None
    """Where the next page starts; None after the last one."""


class Pages(Generic[T, Position]):
    """All items of a listing, fetched page by page as they are asked for. It can be gone through more than once."""

    def __init__(self, fetch: Callable[[Position], APIFuture[Page[T, Position]]], start: Position) -> None:
        self._fetch = fetch
        self._start = start

    def __iter__(self) -> Iterator[T]:
        position: Position | None = self._start
        while position is not None:
            page = self._fetch(position).result()
            yield from page.items
            position = page.next

    async def __aiter__(self) -> AsyncIterator[T]:
        position: Position | None = self._start
        while position is not None:
            page = await self._fetch(position)
            for item in page.items:
                yield item
            position = page.next


def next_offset(offset: int, limit: int, received: int, total: int | None) -> int | None:
    """A listing ends with a short page, or when the total is reached."""
    end = offset + received
    is_last = received < limit if total is None else end >= total
    return None if is_last or not received else end
