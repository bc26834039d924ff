"""What a test may make the server do instead of its duty, and for which requests.

server.script("asample", Reply(429, headers={"retry-after": "4"}), Drop())     # in this order, then as usual
server.script("retrieve_future", Reply(503), times=FOREVER)
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.support.http11 import Connection, Recorded, render

FOREVER = None
_JSON = {"content-type": "application/json"}
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Reply:
    """A whole answer, if need be a late one."""

    status: int = 200
    json: Any = None
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0

    def render(self) -> bytes:
        if self.body is not None:
            return render(self.status, self.body, self.headers)
        body = b"" if self.status == 204 else _encode(self.json)
        return render(self.status, body, {**_JSON, **self.headers} if body else self.headers)

    def perform(self, connection: Connection) -> None:
        data = self.render()
        if self.delay:
            asyncio.get_running_loop().call_later(self.delay, connection.answer, data)
        else:
            connection.answer(data)


@dataclass(frozen=True)
class Html:
    """What a proxy in front of the server answers when the server is away."""

    status: int = 502

    def perform(self, connection: Connection) -> None:
        page = f"<html><head><title>{self.status}</title></head><body><h1>Bad gateway</h1></body></html>"
        connection.answer(render(self.status, page.encode(), {"content-type": "text/html"}))


@dataclass(frozen=True)
class Drop:
    """Close without an answer. With `executed`, the request takes effect first: only its answer is lost."""

    executed: bool = False

    def perform(self, connection: Connection) -> None:
        connection.hang_up()


@dataclass(frozen=True)
class HalfBody:
    """Announce a body, send a part of it and close."""

    sent: bytes = b'{"request_id": "cut-'
    announced: int = 1000
    status: int = 200

    def perform(self, connection: Connection) -> None:
        head = render(self.status, b"", {**_JSON, "content-length": str(self.announced)})
        connection.hang_up(head + self.sent)


@dataclass(frozen=True)
class Hang:
    """Say nothing for so many seconds, then close."""

    seconds: float = math.inf

    def perform(self, connection: Connection) -> None:
        if self.seconds < math.inf:
            asyncio.get_running_loop().call_later(self.seconds, connection.hang_up)


@dataclass(frozen=True)
class Default:
    """The usual behaviour, for scripts such as "the first works, the second does not"."""


Step = Reply | Html | Drop | HalfBody | Hang | Default
Match = str | Callable[[Recorded], bool]


class Script:
    """Steps for matching requests; earlier rules go first, and a used-up rule leaves."""

    def __init__(self) -> None:
        self._rules: list[tuple[Match, Iterator[Step]]] = []

    def __bool__(self) -> bool:
        return bool(self._rules)

    def add(self, match: Match, steps: tuple[Step, ...], times: int | None) -> None:
        rounds = itertools.repeat(steps) if times is FOREVER else itertools.repeat(steps, times)
        self._rules.append((match, itertools.chain.from_iterable(rounds)))

    def clear(self, match: Match | None = None) -> None:
        self._rules = [] if match is None else [rule for rule in self._rules if rule[0] != match]

    def next_step(self, request: Recorded) -> Step | None:
        for rule in list(self._rules):
            if not matches(rule[0], request):
                continue
            for step in rule[1]:
                return step
            self._rules.remove(rule)
        return None


def matches(match: Match, request: Recorded) -> bool:
    """Whether a rule is about this request: a text names the end of its path, in whole segments."""
    if isinstance(match, str):
        return ("/" + request.path).endswith("/" + match.lstrip("/"))
    return match(request)


def detail(status: int, text: Any) -> Reply:
    """A refusal in the form clients expect."""
    return Reply(status, json={"detail": text})


def ok(value: Any) -> Reply:
    return Reply(json=value)


__all__ = ["FOREVER", "Default", "Drop", "HalfBody", "Hang", "Html", "Match", "Reply", "Script", "Step", "detail", "ok"]
