"""Whose turn it is, where several owners wait for the same room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, KeysView
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """What waits, by owner; of one owner, what came first is first."""

    def __init__(self, owner_of: Callable[[T], str]) -> None:
        self._owner_of = owner_of
        self._queues: dict[str, list[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._queues.values())

    @property
    def owners(self) -> KeysView[str]:
        return self._queues.keys()

    def add(self, item: T) -> None:
        self._queues.setdefault(self._owner_of(item), []).append(item)

    def remove(self, item: T) -> None:
        """It has had its turn: of equals, its owner is the last from now on."""
        owner = self._owner_of(item)
        queue = self._queues.pop(owner)
        queue.remove(item)
        if queue:
            self._queues[owner] = queue

    def in_turn(self, held: Counter[str]) -> Iterator[T]:
        """Each time the first of whoever holds least, who holds one more then; it may be removed meanwhile."""
        waiting = {owner: iter(tuple(queue)) for owner, queue in self._queues.items()}
        while waiting:
            owner = min(waiting, key=held.__getitem__) if len(waiting) > 1 else next(iter(waiting))
            for item in waiting[owner]:
                yield item
                held[owner] += 1
                if len(waiting) > 1:
                    break
            else:
                del waiting[owner]
