"""Whether a series grows: by the median of the slopes between its points, which a few high points do not move."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

_MOST_POINTS = 300  # each is compared with each


class Bound(NamedTuple):
    """By how much something may grow over all the time that is judged: so many, or such a share of what it is."""

    most: float
    share: float = 0.0

    def allows(self, growth: float, level: float) -> bool:
        return growth <= max(self.most, self.share * level)


class Point(NamedTuple):
    time: float
    value: float


def growth(points: Sequence[Point]) -> float:
    """From the first point to the last, along the line through them (Theil and Sen)."""
    some = points[:: len(points) // _MOST_POINTS + 1]
    slopes = [
        (later.value - earlier.value) / (later.time - earlier.time)
        for place, earlier in enumerate(some)
        for later in some[place + 1 :]
        if later.time > earlier.time
    ]
    return statistics.median(slopes) * (points[-1].time - points[0].time) if slopes else 0.0
