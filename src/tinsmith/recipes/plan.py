"""What each step does, as pure functions of the settings and its number: a resumed run goes on as it would have."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import Literal, TypeVar

T = TypeVar("T")

Schedule = Literal["cosine", "linear", "constant"]


def learning_rate(step: int, num_steps: int, *, peak: float, schedule: Schedule, warmup: int) -> float:
    """The rate of a step, counted from 1: it rises over `warmup` steps, then falls towards 0 or stays."""
    done = step - 1
    if done < warmup:
        return peak * step / warmup
    progress = (done - warmup) / max(num_steps - warmup, 1)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * progress)) / 2
    return peak * (1 - progress) if schedule == "linear" else peak


def count_steps(num_sequences: int, batch_size: int, epochs: int) -> int:
    return math.ceil(num_sequences * epochs / batch_size)


def batch(step: int, num_sequences: int, batch_size: int, seed: int, last: int | None = None) -> list[int]:
    """Which sequences a step takes. Every epoch is shuffled anew; a batch may hold the end of one and the next's begin.

    `last` is the number of sequences after which training ends, within the last batch.
    """
    start, end = (step - 1) * batch_size, step * batch_size
    if last is not None:
        end = min(end, last)
    return [_shuffled(num_sequences, seed, at // num_sequences)[at % num_sequences] for at in range(start, end)]


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}, epoch {epoch}").shuffle(order)
    return order


def split(items: list[T], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """Those to train on and those held out, both in their old order."""
    held_out = set(random.Random(f"{seed}, held out").sample(range(len(items)), round(len(items) * fraction)))
    return (
        [item for index, item in enumerate(items) if index not in held_out],
        [item for index, item in enumerate(items) if index in held_out],
    )
