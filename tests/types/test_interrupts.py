"""Ctrl-C is heard whenever it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

import tinsmith

MAKERS: dict[str, Callable[[], object]] = {
    "SamplingParams": lambda: tinsmith.SamplingParams(max_tokens=4, temperature=0.5, stop=[7, 8], seed=3),
    "AdamParams": lambda: tinsmith.AdamParams(learning_rate=1e-4),
    "ModelInput": lambda: tinsmith.ModelInput.from_ints([1, 2, 3]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_interrupt_in_any_function_that_makes_a_value_reaches_the_caller(name: str) -> None:
    MAKERS[name]()  # what is done only once is done
    for number in count():
        came, raised = interrupted(MAKERS[name], number)
        assert raised == came, f"the interrupt in the call number {number} was lost"
        if not came:
            break
    assert number > 1


def interrupted(make: Callable[[], object], number: int) -> tuple[bool, bool]:
    """Makes a value with a Ctrl-C at the start of the function that is called as this one: did it come, was it raised?

    Where a signal finds a program is chance; an error of the profiler is raised at the same places, but where we want.
    """
    calls, came = count(), False

    def interrupt(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal came
        if event == "call" and next(calls) == number:
            came = True
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        make()
    except KeyboardInterrupt:
        return came, True
    finally:
        sys.setprofile(None)
    return came, False
