"""A curve with fewer points that looks the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

Point: TypeAlias = tuple[int, float, float | None]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many of the points, at least 4: both ends, and from each stretch between them the extremes."""
    if len(points) <= most:
        return list(points)
    stretches = (most - 2) // 2
    inner = len(points) - 2
    bounds = [1 + inner * index // stretches for index in range(stretches + 1)]
    extremes = (_extremes(points, *pair) for pair in pairwise(bounds))
    return [points[0], *(points[place] for found in extremes for place in found), points[-1]]


def _extremes(points: Sequence[Point], start: int, end: int) -> Iterator[int]:
    """The places of the lowest and the highest value, in order; of one where there are no others."""
    valued = [(value, place) for place in range(start, end) if (value := points[place][2]) is not None]
    yield from sorted({min(valued)[1], max(valued)[1]} if valued else {start})
