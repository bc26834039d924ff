"""Who of a group computes which rows of a batch: a pure function of their lengths."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """The places of the rows of each share, in order; shares hold about as many tokens as each other.

    The longest row is dealt first, each to whoever has the fewest tokens: the fullest share is at most a third larger
    than it must be, and mostly equal to the others, since the shortest rows come last. The same lengths always give
    the same shares, and the first share is never the empty one.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [(0, number) for number in range(num_shares)]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        load, number = loads[0]
        shares[number].append(place)
        heapq.heapreplace(loads, (load + lengths[place], number))
    return [sorted(share) for share in shares]
