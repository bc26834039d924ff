"""The same script, run with the official package and with ours, sends the same and gives the same back.

Where we differ on purpose, the tables below say so, each line with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from tests.compat.cases import CASES, RunCase
from tests.compat.trace import Sent, trace

NOT_COMPARED: Mapping[str, str] = {
    "client/config": "fetched once per account and process, where the official package asks once per client",
    "client/dynamic_config": "fetched beside the first useful request, not before it",
    "auth/token": "exchanged once per account and process, not once per client",
}
"""Endpoints whose calls are counted by a test of their own instead."""

OWN_HEADERS: Mapping[str, str] = {}
"""Headers in which we may differ."""


class Deliberate(NamedTuple):
    case: str
    reason: str
    official: Any
    ours: Any


DELIBERATE_RESULTS: tuple[Deliberate, ...] = ()
"""Differences in what the user gets, by the path to the value in the result."""


@pytest.mark.parametrize("name", CASES)
def test_the_same_requests_are_submitted_in_the_same_order(official: RunCase, ours: RunCase, name: str) -> None:
    theirs, mine = (trace(CASES[name], run(name)).submissions for run in (official, ours))
    assert [_line(sent) for sent in _compared(mine)] == [_line(sent) for sent in _compared(theirs)]
    for our_request, their_request in zip(_compared(mine), _compared(theirs), strict=True):
        assert _comparable(our_request) == _comparable(their_request)


@pytest.mark.parametrize("name", CASES)
def test_results_are_fetched_in_the_same_way(official: RunCase, ours: RunCase, name: str) -> None:
    theirs, mine = (trace(CASES[name], run(name)) for run in (official, ours))
    assert {name: len(polls) for name, polls in mine.polls.items()} == {
        name: len(polls) for name, polls in theirs.polls.items()
    }
    assert mine.targets == theirs.targets
    for request_id, polls in theirs.polls.items():
        assert list(map(_comparable, mine.polls[request_id])) == list(map(_comparable, polls))


@pytest.mark.parametrize("name", CASES)
def test_the_user_gets_the_same_back(official: RunCase, ours: RunCase, name: str) -> None:
    differences = list(_differences(official(name).result, ours(name).result, ""))
    assert differences == []


@pytest.mark.parametrize("name", CASES)
def test_operations_run_in_the_same_order(official: RunCase, ours: RunCase, name: str) -> None:
    # Sorted by model and no further: what happens to one model does not wait for another.
    mine, theirs = (sorted(run(name).executed, key=lambda operation: operation[0]) for run in (ours, official))
    assert mine == theirs


def _compared(submissions: list[Sent]) -> list[Sent]:
    return [sent for sent in submissions if sent.path.removeprefix("/api/v1/") not in NOT_COMPARED]


def _line(sent: Sent) -> str:
    return f"{sent.method} {sent.path}"


def _comparable(sent: Sent) -> dict[str, Any]:
    headers = {name: value for name, value in sent.headers.items() if name not in OWN_HEADERS}
    return {**sent._asdict(), "headers": headers}


def _is_at_least(theirs: Any, mine: Any) -> bool:
    """Whether code that catches the official package's built-in error catches ours too."""
    if not (isinstance(theirs, dict) and isinstance(mine, dict) and "failure" in theirs and "failure" in mine):
        return False
    return not theirs["is_tinker_error"] and set(theirs["caught_by"]) <= set(mine["caught_by"])


def _differences(theirs: Any, mine: Any, where: str) -> Any:
    """The places where two results differ. An error of ours may be caught in more ways, never in fewer."""
    if _is_at_least(theirs, mine):
        return
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for name in theirs.keys() | mine.keys():
            yield from _differences(theirs.get(name, "(absent)"), mine.get(name, "(absent)"), f"{where}.{name}")
    elif isinstance(theirs, list) and isinstance(mine, list) and len(theirs) == len(mine):
        for index, (their_item, my_item) in enumerate(zip(theirs, mine, strict=True)):
            yield from _differences(their_item, my_item, f"{where}[{index}]")
    elif theirs != mine:
        yield where, theirs, mine
