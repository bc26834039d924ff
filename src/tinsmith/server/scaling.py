"""How many sampler replicas a base model should have, by what waits to be drawn. Pure: whoever calls it knows the time.

More are started at once, as many as the samples need. Fewer are kept only after they were enough for a while, one after
the other: a replica takes long to load, and rounds of sampling come in waves. Those for which there was no room yet are
withdrawn as soon as fewer are enough, all at once. The two bounds are apart, so that no load
makes the number go up and down.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tinsmith.errors import ConfigError

SAMPLES_EACH = 64
"""With more samples than this for each replica, another one is wanted; with half of it, one less is enough."""


MOST_WORKERS = 10_000
"""Of a base model; each takes a place in lists before anybody asks whether there is room for it."""


class Bounds(NamedTuple):
    least: int
    most: int


class Seen(NamedTuple):
    replicas: int
    """Those that work, and those that are being started."""
    samples: int
    """Asked for and not done."""
    ample_seconds: float
    """For how long one replica less would have been enough."""
    never_begun: int = 0
    """Those of the replicas for which there was no room yet."""


def is_ample(bounds: Bounds, replicas: int, samples: int) -> bool:
    """Whether one replica less would be enough."""
    return replicas > max(bounds.least, _enough(samples))


def _enough(samples: int) -> int:
    return math.ceil(samples / (SAMPLES_EACH // 2))


def wanted(bounds: Bounds, seen: Seen, patience_seconds: float) -> int:
    """How many replicas there should be.

    If fewer are enough, those without room go at once, as many as are not needed; where all have begun, one goes if
    that has been so for longer than the patience lasts.
    """
    number = max(seen.replicas, math.ceil(seen.samples / SAMPLES_EACH))
    if is_ample(bounds, seen.replicas, seen.samples):
        if seen.never_begun:
            number = max(seen.replicas - seen.never_begun, _enough(seen.samples))
        elif seen.ample_seconds >= patience_seconds:
            number = seen.replicas - 1
    return min(max(number, bounds.least), bounds.most)


def parse_bounds(text: str) -> Bounds:
    """`2` is always two; `1:4` is between one and four."""
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--sample-workers is {text!r}; give a number, as 2, or the least and the most, as 1:4.")
    return Bounds(int(parts[0]), int(parts[-1]))


def check_bounds(bounds: Bounds) -> None:
    if bounds.most > MOST_WORKERS:
        raise ConfigError(f"--sample-workers is more than {MOST_WORKERS:,}; give a number that a cluster can have.")
    if bounds.least > bounds.most:
        raise ConfigError(
            f"--sample-workers is {bounds.least}:{bounds.most}, and the least comes first; "
            f"give {bounds.most}:{bounds.least}."
        )
    if not bounds.least and bounds.most:
        raise ConfigError(
            f"--sample-workers is 0:{bounds.most}, and without one that only samples the worker that trains does both; "
            f"give 1:{bounds.most}, or 0."
        )
