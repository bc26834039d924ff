"""How many replicas there should be: a table, and what holds for any load."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import ConfigError
from tinsmith.server.config import ServerConfig
from tinsmith.server.models import ModelSource
from tinsmith.server.scaling import SAMPLES_EACH, Bounds, Seen, is_ample, parse_bounds, wanted

PATIENCE = 60.0
LONG = PATIENCE + 1


@pytest.mark.parametrize(
    ("replicas", "samples", "ample_seconds", "expected"),
    [
        (1, 0, LONG, 1),
        (1, SAMPLES_EACH, 0, 1),
        (1, SAMPLES_EACH + 1, 0, 2),
        (1, 3 * SAMPLES_EACH, 0, 3),
        (1, 100 * SAMPLES_EACH, 0, 4),
        (3, 3 * SAMPLES_EACH, 0, 3),
        (3, 2 * SAMPLES_EACH, LONG, 3),
        (3, SAMPLES_EACH, PATIENCE / 2, 3),
        (3, SAMPLES_EACH, LONG, 2),
        (3, 0, LONG, 2),
        (4, 4 * SAMPLES_EACH + 1, 0, 4),
        (0, 0, 0, 1),
        (9, 0, 0, 4),
    ],
)
def test_the_number_follows_from_what_there_is_to_draw(
    replicas: int, samples: int, ample_seconds: float, expected: int
) -> None:
    assert wanted(Bounds(1, 4), Seen(replicas, samples, ample_seconds), PATIENCE) == expected


@pytest.mark.parametrize(
    ("replicas", "never_begun", "samples", "expected"),
    [
        (9, 8, 0, 1),
        (9, 9, 0, 1),
        (9, 3, 0, 6),
        (9, 8, 2 * SAMPLES_EACH, 4),
        (9, 8, 4 * SAMPLES_EACH, 8),
        (9, 8, 4 * SAMPLES_EACH + 1, 9),
        (2, 1, SAMPLES_EACH, 2),
        (1, 1, 0, 1),
    ],
)
def test_those_that_found_no_room_are_withdrawn_at_once_as_far_as_fewer_are_enough(
    replicas: int, never_begun: int, samples: int, expected: int
) -> None:
    assert wanted(Bounds(1, 9), Seen(replicas, samples, 0.0, never_begun), PATIENCE) == expected


def test_those_that_work_have_time_also_while_others_are_withdrawn() -> None:
    assert wanted(Bounds(1, 9), Seen(5, 0, LONG, never_begun=2), PATIENCE) == 3
    assert wanted(Bounds(1, 9), Seen(3, 0, 0.0), PATIENCE) == 3
    assert wanted(Bounds(1, 9), Seen(3, 0, LONG), PATIENCE) == 2


bounds = st.tuples(st.integers(1, 20), st.integers(0, 20)).map(lambda pair: Bounds(pair[0], sum(pair)))
seconds = st.floats(0, 1e6)


@given(bounds, st.integers(0, 50), st.integers(0, 10**6), seconds, seconds)
def test_it_is_never_outside_its_bounds(
    within: Bounds, replicas: int, samples: int, ample_seconds: float, patience: float
) -> None:
    assert within.least <= wanted(within, Seen(replicas, samples, ample_seconds), patience) <= within.most


@given(bounds, st.integers(0, 50), st.integers(0, 3000), seconds, st.data())
def test_after_some_are_withdrawn_there_are_not_at_once_more(
    within: Bounds, more: int, samples: int, ample_seconds: float, data: st.DataObject
) -> None:
    replicas = within.least + more
    never_begun = data.draw(st.integers(1, replicas))
    fewer = wanted(within, Seen(replicas, samples, ample_seconds, never_begun), PATIENCE)
    withdrawn = max(0, replicas - fewer)
    assert wanted(within, Seen(fewer, samples, 0.0, max(0, never_begun - withdrawn)), PATIENCE) == fewer


@given(bounds, st.integers(0, 2000), st.data())
def test_a_load_that_stays_the_same_moves_it_in_one_direction_until_it_stays(
    within: Bounds, samples: int, data: st.DataObject
) -> None:
    numbers = [data.draw(st.integers(within.least, within.most))]
    for _ in range(25):
        numbers.append(wanted(within, Seen(numbers[-1], samples, LONG), PATIENCE))
    steps = {after - before for before, after in pairwise(numbers)} - {0}
    assert all(step > 0 for step in steps) or steps == {-1}
    assert numbers[-1] == numbers[-2]


@given(bounds, st.lists(st.integers(0, 3000), min_size=1), seconds)
def test_without_patience_used_up_it_never_goes_down(within: Bounds, loads: list[int], patience: float) -> None:
    number = within.least
    for samples in loads:
        after = wanted(within, Seen(number, samples, 0.0), max(patience, 0.001))
        assert after >= number
        number = after


@given(bounds, st.integers(1, 50), st.integers(0, 3000))
def test_after_one_less_there_is_not_at_once_one_more(within: Bounds, replicas: int, samples: int) -> None:
    if is_ample(within, replicas, samples):
        fewer = wanted(within, Seen(replicas, samples, LONG), PATIENCE)
        assert wanted(within, Seen(fewer, samples, 0.0), PATIENCE) == fewer


def test_bounds_are_one_number_or_two() -> None:
    assert parse_bounds("2") == (2, 2)
    assert parse_bounds("1:4") == (1, 4)


@pytest.mark.parametrize("text", ["", "two", "-1", "1:", ":4", "1:2:3", "1.5", "1:x", "1 : 4", "\u0661"])
def test_what_is_no_number_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_bounds(text)
    assert f"--sample-workers is {text!r}" in str(refused.value)
    assert "as 1:4" in str(refused.value)


@pytest.mark.parametrize(
    ("least", "most", "remedy"), [(4, 1, "give 1:4"), (0, 3, "give 1:3, or 0"), (2, 0, "give 0:2")]
)
def test_bounds_that_cannot_be_are_refused_with_what_to_give(least: int, most: int, remedy: str) -> None:
    models = (ModelSource("m", "/models/m"),)
    with pytest.raises(ConfigError, match=remedy):
        ServerConfig(models=models, ray="auto", sample_workers=least, most_sample_workers=most)
