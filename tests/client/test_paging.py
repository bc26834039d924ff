"""Listings are fetched page by page, as far as somebody looks."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tinsmith.client.futures import APIFuture
from tinsmith.client.paging import Page, Pages, next_offset


class Listing:
    """A server's list of numbers, with a note of what was asked for."""

    def __init__(self, size: int, limit: int) -> None:
        self.asked: list[int] = []
        self._items = list(range(size))
        self._limit = limit

    def fetch(self, offset: int) -> APIFuture[Page[int, int]]:
        self.asked.append(offset)
        items = self._items[offset : offset + self._limit]
        future: APIFuture[Page[int, int]] = APIFuture()
        future.resolve(Page(items, next_offset(offset, self._limit, len(items), len(self._items))))
        return future


async def gather(pages: Pages[int, int]) -> list[int]:
    return [item async for item in pages]


WAYS: list[Callable[[Pages[int, int]], list[int]]] = [list, lambda pages: asyncio.run(gather(pages))]


@pytest.mark.parametrize("way", WAYS, ids=["for", "async for"])
@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 25, 30])
def test_all_items_come_once_and_in_order(way: Callable[[Pages[int, int]], list[int]], size: int) -> None:
    listing = Listing(size, limit=10)
    assert way(Pages(listing.fetch, 0)) == list(range(size))
    assert listing.asked == list(range(0, max(size, 1), 10))


def test_nothing_is_fetched_before_it_is_asked_for() -> None:
    listing = Listing(100, limit=10)
    iterator = iter(Pages(listing.fetch, 0))
    assert listing.asked == []
    assert [next(iterator) for _ in range(10)] == list(range(10))
    assert listing.asked == [0]
    assert next(iterator) == 10
    assert listing.asked == [0, 10]


def test_a_listing_may_be_gone_through_again() -> None:
    pages = Pages(Listing(15, limit=10).fetch, 0)
    assert list(pages) == list(pages)


def test_an_error_ends_the_iteration() -> None:
    def fetch(offset: int) -> Any:
        future: Future[Any] = APIFuture()
        future.set_exception(ValueError("gone"))
        return future

    with pytest.raises(ValueError, match="gone"):
        list(Pages(fetch, 0))


@pytest.mark.parametrize(
    ("offset", "limit", "received", "total", "expected"),
    [
        (0, 10, 10, 25, 10),
        (20, 10, 5, 25, None),
        (0, 10, 10, 10, None),
        (0, 10, 5, 25, 5),  # a server that gives less than asked for still has more
        (0, 10, 0, 25, None),  # a total that cannot be reached must not loop
        (0, 10, 10, None, 10),
        (10, 10, 9, None, None),
        (10, 10, 0, None, None),
    ],
)
def test_where_the_next_page_starts(
    offset: int, limit: int, received: int, total: int | None, expected: int | None
) -> None:
    assert next_offset(offset, limit, received, total) == expected
