"""The same script, run with the official package and with ours, sends the same and gives the same back.

Where we differ on purpose, the tables below say so, each line with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.compat.cases import CASES, Run, RunCase
from tests.compat.trace import Sent, trace

START_UP: Mapping[str, str] = {
    "client/config": "fetched once per account and process; the official package asks once per client",
    "client/dynamic_config": "fetched beside the first useful requests, not before them",
    "auth/token": "exchanged once per account and process, not once per client",
}
"""Not compared one by one; a test of their own counts them."""

OWN_HEADERS: Mapping[str, str] = {
    r".* x-stainless-raw-response": "tells which of its own methods the official package uses; nothing to the server",
    r".* x-stainless-read-timeout": "our timeouts are our own; a session's end waits 10 s at most, not 60",
    r".* x-tinker-create-promise-roundtrip-time": "the official value is about zero whatever happened, so we send none",
    r"retrieve_future x-stainless-retry-count": "we count the polls for one result as tries of one call",
    r".* x-sdk-.*": "the service counts which methods are still used; we tell those of the REST clients",
}
"""Headers that are not compared, by endpoint and name."""

LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "save_weights_for_sampler": {"kind": "snapshot"},  # what it always was; older servers refuse unknown fields
}
"""Fields that we do not send with these values, by endpoint."""

OWN_RESULTS: Mapping[str, str] = {
    r"(?!chunks_|compressed_).*\.metrics\.spread:slack": "one chunk's metrics stay as the server gave them",
    r"dimuon\[1\]\.optimizer_config\.(class|version)": "the answer is given as the class of its optimizer family",
    r"save_and_load\[3\]\.type": "the official package loses the type of this one answer",
    r"bad_calls\[5\]": "a path that names no checkpoint is refused by the call, not by the client that it returns",
    r"bad_calls\[10\]": "a list under a name of the user's own gets the type of its numbers, not a KeyError",
}
"""Values that differ, by case and place in the result."""


@pytest.mark.parametrize("name", CASES)
def test_the_same_requests_are_submitted_in_the_same_order(official: RunCase, ours: RunCase, name: str) -> None:
    theirs, mine = (_submissions(name, run(name)) for run in (official, ours))
    assert [_line(sent) for sent in mine] == [_line(sent) for sent in theirs]
    for our_request, their_request in zip(mine, theirs, strict=True):
        assert _comparable(our_request) == _comparable(their_request)


@pytest.mark.parametrize("name", CASES)
def test_results_are_fetched_in_the_same_way(official: RunCase, ours: RunCase, name: str) -> None:
    theirs, mine = (trace(CASES[name], run(name)) for run in (official, ours))
    assert mine.targets == theirs.targets
    assert sorted(mine.polls) == sorted(theirs.polls)
    for request_id, polls in theirs.polls.items():
        assert list(map(_comparable, mine.polls[request_id])) == list(map(_comparable, polls))


@pytest.mark.parametrize("name", CASES)
def test_the_user_gets_the_same_back(official: RunCase, ours: RunCase, name: str) -> None:
    found = _differences(official(name).result, ours(name).result, name)
    assert [difference for difference in found if not _listed(OWN_RESULTS, difference[0])] == []


@pytest.mark.parametrize("name", CASES)
def test_operations_run_in_the_same_order(official: RunCase, ours: RunCase, name: str) -> None:
    # Sorted by model and no further: what happens to one model does not wait for another.
    mine, theirs = (sorted(run(name).executed, key=lambda operation: operation[0]) for run in (ours, official))
    assert mine == theirs


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("endpoint", ["client/config", "auth/token"])
def test_starting_takes_no_more_requests(official: RunCase, ours: RunCase, name: str, endpoint: str) -> None:
    mine, theirs = (sum(request.endpoint == endpoint for request in run(name).requests) for run in (ours, official))
    assert mine <= theirs


def test_every_deliberate_difference_is_still_there(official: RunCase, ours: RunCase) -> None:
    places = [place for name in CASES for place, *_ in _differences(official(name).result, ours(name).result, name)]
    assert [pattern for pattern in OWN_RESULTS if not any(re.fullmatch(pattern, place) for place in places)] == []


def _submissions(name: str, run: Run) -> list[Sent]:
    return [sent for sent in trace(CASES[name], run).submissions if not _is_start_up(sent) and not _is_probe(sent)]


def _is_start_up(sent: Sent) -> bool:
    return sent.path.removeprefix("/api/v1/") in START_UP


def _is_probe(sent: Sent) -> bool:
    """We ask a server that refuses our first training request whether it prefers JSON, as older ones do."""
    return sent.path == "/api/v1/forward_backward" and sent.headers["content-type"] == "application/json"


def _line(sent: Sent) -> str:
    return f"{sent.method} {sent.path}"


def _comparable(sent: Sent) -> dict[str, Any]:
    endpoint = sent.path.removeprefix("/api/v1/")
    headers = {name: value for name, value in sent.headers.items() if not _listed(OWN_HEADERS, f"{endpoint} {name}")}
    body = LEFT_OUT[endpoint] | sent.body if endpoint in LEFT_OUT else sent.body
    return {**sent._asdict(), "headers": headers, "body": body}


def _listed(table: Mapping[str, str], place: str) -> bool:
    return any(re.fullmatch(pattern, place) for pattern in table)


def _differences(theirs: Any, mine: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Where two results differ: (place, the official value, ours)."""
    match theirs, mine:
        case {"caught_by": _}, {"caught_by": _}:
            yield from _error_differences(theirs, mine, place)
        case dict(), dict():
            for name in theirs.keys() | mine.keys():
                yield from _differences(theirs.get(name, "(absent)"), mine.get(name, "(absent)"), f"{place}.{name}")
        case list(), list() if len(theirs) == len(mine):
            for index, (their_item, my_item) in enumerate(zip(theirs, mine, strict=True)):
                yield from _differences(their_item, my_item, f"{place}[{index}]")
        case _ if theirs != mine:
            yield place, theirs, mine


def _error_differences(theirs: Any, mine: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Ours may be of a narrower class: what catches theirs must catch ours too."""
    if not set(theirs["caught_by"]) <= set(mine["caught_by"]):
        yield f"{place}.caught_by", theirs["caught_by"], mine["caught_by"]
    for name in theirs.keys() - {"failure", "caught_by"}:
        yield from _differences(theirs[name], mine[name], f"{place}.{name}")
