"""Rows are dealt so that all members of a group have about as many tokens to compute."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.server.engine.shares import balanced

lengths = st.lists(st.integers(1, 4096), max_size=60)


@given(lengths, st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_every_row_is_in_one_share_and_no_share_is_much_longer_than_it_must_be(lengths: list[int], size: int) -> None:
    shares = balanced(lengths, size)
    assert sorted(place for share in shares for place in share) == list(range(len(lengths)))
    tokens = [sum(lengths[place] for place in share) for share in shares]
    most_needed = max(-(-sum(lengths) // size), max(lengths, default=0))
    assert max(tokens) <= most_needed + max(lengths, default=0) * (size - 1) / size
    assert shares[0] or not lengths


def test_long_rows_are_spread_and_short_ones_fill_up() -> None:
    assert balanced([100, 400, 300, 200], 2) == [[0, 1], [2, 3]]
    assert balanced([256] * 8, 3) == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_fewer_rows_than_members_leave_the_last_ones_idle() -> None:
    assert balanced([5, 7], 4) == [[1], [0], [], []]
    assert balanced([], 2) == [[], []]
