"""What a step does follows from its number."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from tinsmith.recipes import plan


def rates(schedule: plan.Schedule, num_steps: int, warmup: int = 0) -> list[float]:
    return [
        plan.learning_rate(step, num_steps, peak=2.0, schedule=schedule, warmup=warmup)
        for step in range(1, num_steps + 1)
    ]


def test_schedules() -> None:
    assert rates("constant", 4) == [2, 2, 2, 2]
    assert rates("linear", 4) == [2, 1.5, 1, 0.5]
    assert rates("cosine", 4) == pytest.approx([2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5)])


def test_the_rate_rises_to_its_height_before_it_falls() -> None:
    assert rates("linear", 6, warmup=2) == [1, 2, 2, 1.5, 1, 0.5]
    assert rates("constant", 5, warmup=4) == [0.5, 1, 1.5, 2, 2]


def test_an_epoch_takes_every_sequence_once_in_an_order_of_its_own() -> None:
    assert plan.count_steps(10, 4, 3) == 8
    taken = [index for step in range(1, 9) for index in plan.batch(step, 10, 4, seed=1, last=30)]
    epochs = [taken[:10], taken[10:20], taken[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != list(range(10))


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert Counter(plan.batch(1, 3, 7, seed=0)).total() == 7
    assert sorted(plan.batch(1, 3, 7, seed=0, last=3)) == [0, 1, 2]


def test_the_seed_decides_the_order_and_the_split() -> None:
    assert plan.batch(2, 100, 8, seed=5) == plan.batch(2, 100, 8, seed=5)
    assert plan.batch(2, 100, 8, seed=5) != plan.batch(2, 100, 8, seed=6)
    items = list(range(50))
    training, held_out = plan.split(items, 0.2, seed=5)
    assert (len(held_out), sorted(training + held_out)) == (10, items)
    assert (training, held_out) == plan.split(items, 0.2, seed=5) != plan.split(items, 0.2, seed=6)
    assert training == sorted(training)
    assert plan.split(items, 0.0, seed=5) == (items, [])
