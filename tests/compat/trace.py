"""What a client sent, in a form that two clients can be compared by."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict

from tests.compat.cases import Case, Run
from tests.support.http11 import Recorded

# Time and chance decide how often these are sent.
_BY_THE_CLOCK = ("session_heartbeat", "telemetry", "stats")
_POLLS = ("retrieve_future", "retrieve_futures")
_HEADERS = re.compile(
    "x-api-key|content-type|content-encoding|accept|user-agent|x-idempotency-key|x-tinker-.*|x-sdk-.*|x-extra|x-stainless-.*"
)


class Sent(NamedTuple):
    """One request, with what differs from run to run replaced by a word for it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


class Trace(NamedTuple):
    submissions: list[Sent]
    """Everything but polls, in order of arrival."""
    polls: dict[str, list[Sent]]
    """The polls for each request id, in order of arrival."""
    targets: list[Any]
    """What the batch poller asked about."""


def trace(case: Case, run: Run) -> Trace:
    requests = [request for request in run.requests if request.endpoint.split("/")[-1] not in _BY_THE_CLOCK]
    submissions = [_sent(request) for request in requests if request.endpoint not in _POLLS]
    polls: dict[str, list[Sent]] = {}
    for request in requests:
        if request.endpoint == "retrieve_future":
            polls.setdefault(request.json()["request_id"], []).append(_sent(request))
    asked = [json.dumps(request.json()["target"]) for request in requests if request.endpoint == "retrieve_futures"]
    return Trace(_in_order(submissions, case), polls, sorted(set(asked)))


def _in_order(submissions: list[Sent], case: Case) -> list[Sent]:
    """Neighbours for the same endpoint are sorted where the script sends them at the same time."""
    if not case.concurrent:
        return submissions
    groups = itertools.groupby(submissions, key=lambda sent: sent.path)
    return [
        sent for _, group in groups for sent in sorted(group, key=lambda sent: json.dumps(sent.body, sort_keys=True))
    ]


def _sent(request: Recorded) -> Sent:
    headers = {name: _settled(name, request.headers[name]) for name in request.headers if _HEADERS.fullmatch(name)}
    return Sent(request.method, request.path, request.query, headers, _body(request))


def _settled(name: str, value: str) -> str:
    match name:
        case "x-api-key" if value.startswith("eyJ"):
            return "(token)"
        case "x-idempotency-key":
            return "(unique)"
        case "user-agent":
            return re.sub(r"^\w+/Python \d+\.\d+\.\w+.*$", "(name)/Python (version)", value)
        case "x-sdk-version":
            return "(version)"
        case "x-tinker-create-promise-roundtrip-time":
            return f"({type(float(value)).__name__})"
    return value


def _body(request: Recorded) -> Any:
    if not request.body:
        return None
    if request.headers.get("content-type") == "application/x-protobuf":
        return MessageToDict(request.message(), preserving_proto_field_name=True)
    body = request.json()
    return {**body, "sdk_version": "(version)"} if "sdk_version" in body else body
