"""A Tinker server for tests and benches: it records what arrives and does what a script tells it.

    with FakeServer(flags={"fwdbwd_max_chunk_len": 2}) as server:
        server.script("asample", Reply(429, headers={"retry-after": "4"}))
        ...  # use a client with base_url=server.url
        assert server.paths("asample") == ["/api/v1/asample"] * 2

It runs in a thread of this process, or in a process of its own (`python -m tests.support.server`, `spawned_server`)
where a bench must not share its interpreter lock. The whole API is there, on top of a model of three numbers
(`engine.py`). `dialect="json"` makes it an older server that knows no protobuf.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from tests.support.api import Refused, TrainingApi
from tests.support.http11 import Connection, Recorded
from tests.support.promises import Failure, Promises
from tests.support.rest import RestApi
from tests.support.script import (
    FOREVER,
    Default,
    Drop,
    HalfBody,
    Hang,
    Html,
    Match,
    Reply,
    Script,
    Step,
    detail,
    matches,
)
from tests.support.world import Model, World

__all__ = [
    "FOREVER",
    "Default",
    "Drop",
    "FakeServer",
    "HalfBody",
    "Hang",
    "Html",
    "Recorded",
    "Reply",
    "spawned_server",
]

T = TypeVar("T")
_WITHOUT_KEY = ("/files/", "/stats")
_MAY_BE_RETRIED = (402, 408, 409, 429)
_STOP_TIMEOUT = 10.0


class FakeServer:
    """The server and its remote control. Every method may be called from any thread but the server's own."""

    def __init__(
        self,
        *,
        flags: Mapping[str, Any] | None = None,
        dynamic_flags: Mapping[str, Any] | None = None,
        dialect: Literal["current", "json"] = "current",
        long_poll: float = 20.0,
        result_delay: float = 0.0,
        record: bool = True,
        port: int = 0,
    ) -> None:
        json_only = dialect == "json"
        self.requests: list[Recorded] = []
        self.counts: Counter[str] = Counter()
        self.bugs: list[str] = []
        self._record = record
        self._port = port
        self._connections: set[Connection] = set()
        self._accepted = 0
        self._arrival = threading.Condition()
        self._script = Script()
        self._world = World()
        self._promises = Promises(json_only=json_only, long_poll=long_poll)
        self._promises.result_delay = result_delay
        self._api = TrainingApi(self._world, self._promises, json_only=json_only)
        self._api.flags.update(flags or ({"pjwt_auth_enabled": False} if json_only else {}))
        self._api.dynamic_flags.update(dynamic_flags or {})
        self._rest = RestApi(self._world, lambda: self.url, json_only=json_only)
        self._polls = {"POST /api/v1/retrieve_future": self._promises.retrieve_one}
        if not json_only:
            self._polls["POST /api/v1/retrieve_futures"] = self._promises.retrieve_many

    # Life

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()
        if self.bugs and exception[0] is None:
            raise AssertionError("the fake server itself failed:\n" + "\n".join(self.bugs))

    def start(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            self._loop.create_server(lambda: Connection(self), "127.0.0.1", self._port, backlog=2048)
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-server")
        self._thread.start()
        return self

    def stop(self) -> None:
        """Cut every connection off, whatever was going on, and leave nothing behind."""
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(_STOP_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT)
        self._loop.close()

    async def _shut(self) -> None:
        # asyncio loses a connection that is being accepted while the server closes, so first it stops accepting.
        for listener in self._server.sockets:
            self._loop.remove_reader(listener.fileno())
        for _ in range(5):
            await asyncio.sleep(0)
        self._server.close()
        while self._connections:
            self._abort_all()
            await asyncio.sleep(0)

    def _on_loop(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(_STOP_TIMEOUT)

    # What happened

    def paths(self, match: Match | None = None) -> list[str]:
        return [request.path for request in self.received(match)]

    def received(self, match: Match | None = None) -> list[Recorded]:
        """The requests so far, or those a script rule with the same `match` would be about."""
        return [request for request in list(self.requests) if match is None or matches(match, request)]

    def wait_for(self, match: Match, count: int = 1, timeout: float = 10.0) -> list[Recorded]:
        """The matching requests once there are `count` of them."""
        with self._arrival:
            if not self._arrival.wait_for(lambda: len(self.received(match)) >= count, timeout):
                raise AssertionError(f"{len(self.received(match))} of {count} {match} requests came in {timeout} s")
        return self.received(match)

    @property
    def executed(self) -> list[tuple[str, int | None, str]]:
        """(model id, seq_id, endpoint) of the training operations, in the order they were executed."""
        return list(self._api.executed)

    @property
    def cancelled(self) -> list[str]:
        return list(self._promises.cancelled)

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    @property
    def accepted_connections(self) -> int:
        return self._accepted

    def model(self, model_id: str) -> Model:
        return self._world.models[model_id]

    # What shall happen

    def script(self, match: Match, *steps: Step, times: int | None = 1) -> None:
        """Do these steps, in order and `times` times over, for matching requests; afterwards as usual."""
        self._on_loop(lambda: self._script.add(match, steps, times))

    def clear_script(self, match: Match | None = None) -> None:
        self._on_loop(lambda: self._script.clear(match))

    def hold(self, *endpoints: str) -> None:
        """Accept, but show no result of these endpoints until `release`."""
        for endpoint in endpoints:
            self._on_loop(partial(self._promises.hold, endpoint))

    def release(self, endpoint: str | None = None) -> None:
        self._on_loop(lambda: self._promises.release(endpoint))

    def fail_future(self, endpoint: str, error: str = "made to fail", category: str = "user", times: int = 1) -> None:
        """Let the next operations of this endpoint be accepted and then fail."""
        self._on_loop(lambda: self._promises.fail(endpoint, Failure(error, category), times))

    def cut_connections(self) -> None:
        """Reset every open connection, as a restart of the server would."""
        self._on_loop(self._abort_all)

    def _abort_all(self) -> None:
        for connection in list(self._connections):
            connection.abort()

    @property
    def flags(self) -> dict[str, Any]:
        return self._api.flags

    @property
    def dynamic_flags(self) -> dict[str, Any]:
        return self._api.dynamic_flags

    @property
    def result_delay(self) -> float:
        """Seconds from the execution of an operation until its result can be fetched."""
        return self._promises.result_delay

    @result_delay.setter
    def result_delay(self, seconds: float) -> None:
        self._promises.result_delay = seconds

    @property
    def settings(self) -> Promises:
        """Adjustable: `long_poll`, `pending_status`, `queue_state`, `metadata_only_above`."""
        return self._promises

    @property
    def api(self) -> TrainingApi:
        """Adjustable: `messages` of create_session, `external_files`, `jwt_lifetime`, `protobuf_refusal`."""
        return self._api

    # The application behind the connections; runs on the server's loop

    def opened(self, connection: Connection) -> int:
        self._connections.add(connection)
        self._accepted += 1
        return self._accepted

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def handle(self, request: Recorded, connection: Connection) -> None:
        self.counts[request.path] += 1
        if self._record:
            with self._arrival:
                self.requests.append(request)
                self._arrival.notify_all()
        step = self._script.next_step(request) if self._script else None
        if step is None or isinstance(step, Default):
            self._serve(request, lambda reply: reply.perform(connection))
            return
        if isinstance(step, Drop) and step.executed:
            self._serve(request, lambda reply: None)
        if isinstance(step, Reply) and _is_refusal(step.status):
            self._api.consume_number(request)
        step.perform(connection)

    def _serve(self, request: Recorded, respond: Callable[[Reply], None]) -> None:
        route = f"{request.method} {request.path}"
        try:
            if "x-api-key" not in request.headers and not request.path.startswith(_WITHOUT_KEY):
                raise Refused(401, "X-API-Key is missing")
            if poll := self._polls.get(route):
                poll(request, respond)
                return
            handler = self._api.handlers.get(route, self._stats if request.path == "/stats" else self._rest.handle)
            reply = handler(request)
        except Refused as refused:
            reply = refused.reply
            if _is_refusal(reply.status):
                self._api.consume_number(request)
        except Exception:  # noqa: BLE001 - a bug of ours must fail the test, not hang its client
            self.bugs.append(f"{request!r}\n{traceback.format_exc()}")
            reply = detail(500, self.bugs[-1])
        respond(reply)

    def _stats(self, request: Recorded) -> Reply:
        return Reply(json={"requests": self.counts, "connections": self._accepted, "open": len(self._connections)})


def _is_refusal(status: int) -> bool:
    return 400 <= status < 500 and status not in _MAY_BE_RETRIED


# A process of its own


@contextlib.contextmanager
def spawned_server(*arguments: str) -> Iterator[str]:
    """The URL of a server in its own process, started with the options of `python -m tests.support.server`."""
    command = [sys.executable, "-m", "tests.support.server", *arguments]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description="A Tinker server for benches; GET /stats counts what arrived.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--flags", type=json.loads, default={}, help="JSON object for client/config")
    parser.add_argument("--dynamic-flags", type=json.loads, default={})
    parser.add_argument("--dialect", choices=("current", "json"), default="current")
    parser.add_argument("--long-poll", type=float, default=20.0, help="seconds")
    parser.add_argument("--result-delay", type=float, default=0.0, help="seconds")
    parser.add_argument("--answer", action="append", default=[], metavar="ENDPOINT=STATUS", help="always answer so")
    options = vars(parser.parse_args())
    answers = options.pop("answer")
    server = FakeServer(**options, record=False)
    with server:
        for answer in answers:
            endpoint, _, status = answer.partition("=")
            server.script(endpoint, detail(int(status), "scripted"), times=FOREVER)
        sys.stdout.write(server.url + "\n")
        sys.stdout.flush()
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        # The parent's death closes our input: no server outlives its bench.
        threading.Thread(target=_when_input_ends, args=(stop.set,), daemon=True).start()
        stop.wait()


def _when_input_ends(act: Callable[[], None]) -> None:
    sys.stdin.read()
    act()


if __name__ == "__main__":
    main()
