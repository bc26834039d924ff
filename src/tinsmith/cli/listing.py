"""Long lists, fetched page by page and no further than they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from tinsmith.cli.progress import Bar

T = TypeVar("T")

DEFAULT_LIMIT = 20


class Listing(NamedTuple, Generic[T]):
    items: list[T]
    total: int
    """How many there are, shown or not."""

    @property
    def counts(self) -> dict[str, int]:
        """What a program needs to know that it does not see everything."""
        return {"total": self.total, "shown": len(self.items)}

    def title(self, noun: str) -> str:
        count = f"{len(self.items)} {noun}{'' if len(self.items) == 1 else 's'}"
        if len(self.items) == self.total:
            return count
        return f"{count} of {self.total} (--limit 0 shows all)"


GetPage = Callable[[int, int], tuple[Sequence[T], int | None]]
"""From a limit and an offset to the items there and, if the server says so, how many there are in all."""


def collect(get_page: GetPage[T], *, limit: int, page_size: int, label: str) -> Listing[T]:
    """The first `limit` items, or all of them for 0."""
    items: list[T] = []
    with Bar() as bar:
        while True:
            size = min(page_size, limit - len(items)) if limit else page_size
            page, total = get_page(size, len(items))
            items += page
            is_last = len(page) < size if total is None else len(items) >= total
            if is_last or not page or (limit and len(items) >= limit):
                return Listing(items[: limit or None], max(len(items), total or 0))
            bar.report(label, len(items), min(limit, total) if limit and total else limit or total)
