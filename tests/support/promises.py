"""Accepted operations and those who wait for them: long polls, the batch poller, cancelling, failing on demand."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.support import codec
from tests.support.engine import BadInput, LossOutput, Sampled
from tests.support.http11 import Recorded
from tests.support.script import Reply, detail, ok

CLONE_STRIDE = 1_000_000_000
_KEPT_AFTER_FETCH = 10_000
_PROTOBUF = {"content-type": "application/x-protobuf"}

Respond = Callable[[Reply], None]
Result = dict[str, Any] | LossOutput | Sampled


class Failure(NamedTuple):
    error: str
    category: str


@dataclass(eq=False, slots=True)
class Promise:
    """One accepted operation. `visible` is what a client can learn, which may lag behind `outcome`."""

    request_id: str
    endpoint: str
    compute: Callable[[], Result]
    target: tuple[str, int] | None = None
    outcome: Result | Failure | None = None
    visible: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list)

    def encoded(self, protobuf: bool) -> Any:
        """The result as protobuf bytes where that is wanted and possible, else as a JSON value."""
        match self.outcome:
            case LossOutput() as output:
                return codec.loss_output_message(output) if protobuf else codec.loss_output_json(output)
            case Sampled() as sampled:
                return codec.sampled_message(sampled) if protobuf else codec.sampled_json(sampled)
            case Failure(error, category):
                return {"error": error, "category": category}
        return self.outcome


class Completions:
    """What finished in one sampling session and clone, in order; positions are the batch poller's cursors."""

    def __init__(self) -> None:
        self.log: list[dict[str, Any]] = []
        self.waiters: list[Callable[[], None]] = []


class Promises:
    """All operations of a server. Lives on the server's loop."""

    def __init__(self, *, json_only: bool, long_poll: float) -> None:
        self.long_poll = long_poll
        self.result_delay = 0.0
        self.pending_status = 408
        self.queue_state: tuple[str, str | None] = ("active", None)
        self.metadata_only_above: int | None = None
        self.cancelled: list[str] = []
        self._json_only = json_only
        self._by_id: dict[str, Promise] = {}
        self._fetched: deque[str] = deque()
        self._held: dict[str, list[Promise]] = {}
        self._failures: dict[str, deque[Failure]] = {}
        self._completions: dict[tuple[str, int], Completions] = {}

    # Making and finishing

    def get(self, request_id: str) -> Promise | None:
        return self._by_id.get(request_id)

    def add(self, promise: Promise) -> Promise:
        self._by_id[promise.request_id] = promise
        return promise

    def execute(self, promise: Promise) -> None:
        """Compute now; let it be seen now, after `result_delay`, or when it is released."""
        failures = self._failures.get(promise.endpoint)
        if failures:
            promise.outcome = failures.popleft()
        else:
            try:
                promise.outcome = promise.compute()
            except BadInput as error:
                promise.outcome = Failure(str(error), "user")
        if promise.endpoint in self._held:
            self._held[promise.endpoint].append(promise)
        elif self.result_delay:
            asyncio.get_running_loop().call_later(self.result_delay, self._show, promise)
        else:
            self._show(promise)

    def _show(self, promise: Promise) -> None:
        if promise.visible:
            return
        promise.visible = True
        _wake(promise.waiters)
        if promise.target is not None:
            completions = self._completions_of(promise.target)
            completions.log.append(_completion(promise))
            _wake(completions.waiters)

    # Scripting

    def hold(self, endpoint: str) -> None:
        self._held.setdefault(endpoint, [])

    def release(self, endpoint: str | None) -> None:
        for name in [endpoint] if endpoint else list(self._held):
            for promise in self._held.pop(name, []):
                self._show(promise)

    def fail(self, endpoint: str, failure: Failure, times: int) -> None:
        self._failures.setdefault(endpoint, deque()).extend([failure] * times)

    # Polling

    def retrieve_one(self, request: Recorded, respond: Respond) -> None:
        asked = request.json()
        promise = self._by_id.get(asked["request_id"])
        if promise is None:
            respond(detail(404, "Future not found") if self._json_only else detail(410, "unknown or expired request"))
            return
        protobuf = not self._json_only and "application/x-protobuf" in request.headers.get("accept", "")

        def answer() -> None:
            respond(self._result(promise, protobuf, asked.get("allow_metadata_only", False)))

        if promise.visible:
            answer()
        else:
            self._wait(promise.waiters, answer, lambda: respond(self._pending(promise)))

    def retrieve_many(self, request: Recorded, respond: Respond) -> None:
        asked = request.json()
        for request_id in asked["retrieved_request_ids"]:
            self._by_id.pop(request_id, None)
        target, cursor = asked["target"], asked["prev_cursor"]
        completions = self._completions_of((target["sampling_session_id"], target["cloned_sampler_id"]))

        def answer() -> None:
            respond(ok({"completions": completions.log[cursor:], "cursor": len(completions.log)}))

        if len(completions.log) > cursor:
            answer()
        else:
            self._wait(completions.waiters, answer, answer)

    def cancel(self, request: Recorded) -> Reply:
        """Take note, and let whoever polls for it know. What is finished stays finished."""
        request_id = request.json()["request_id"]
        self.cancelled.append(request_id)
        promise = self._by_id.get(request_id)
        if promise is not None and not promise.visible:
            promise.outcome = Failure("cancelled by the client", "user")
            self._show(promise)
        return ok({})

    def _wait(self, waiters: list[Callable[[], None]], ready: Callable[[], None], late: Callable[[], None]) -> None:
        def give_up() -> None:
            waiters.remove(wake)
            late()

        def wake() -> None:
            timer.cancel()
            ready()

        timer = asyncio.get_running_loop().call_later(self.long_poll, give_up)
        waiters.append(wake)

    def _pending(self, promise: Promise) -> Reply:
        if self._json_only:
            return detail(408, "Timeout waiting for result")
        state, reason = self.queue_state
        body = {"type": "try_again", "request_id": promise.request_id, "queue_state": state}
        return Reply(self.pending_status, json=body if reason is None else {**body, "queue_state_reason": reason})

    def _result(self, promise: Promise, protobuf: bool, metadata_only: bool) -> Reply:
        self._keep_a_while(promise)
        if self._json_only and isinstance(promise.outcome, Failure):
            return detail(400, promise.outcome.error)
        encoded = promise.encoded(protobuf)
        if not isinstance(encoded, bytes):
            return ok(encoded)
        if metadata_only and self.metadata_only_above is not None and len(encoded) > self.metadata_only_above:
            return ok({"status": "complete_metadata", "response_payload_size": len(encoded)})
        return Reply(body=encoded, headers=_PROTOBUF)

    def _keep_a_while(self, promise: Promise) -> None:
        """A lost answer may be fetched again, but a long bench must not fill the memory."""
        self._fetched.append(promise.request_id)
        if len(self._fetched) > _KEPT_AFTER_FETCH:
            self._by_id.pop(self._fetched.popleft(), None)

    def _completions_of(self, target: tuple[str, int]) -> Completions:
        return self._completions.setdefault(target, Completions())


def _completion(promise: Promise) -> dict[str, Any]:
    if isinstance(promise.outcome, Failure):
        return {"state": "failed", "request_id": promise.request_id}
    size = len(promise.encoded(protobuf=True))
    return {"state": "finished", "request_id": promise.request_id, "response_payload_uncompressed_size": size}


def _wake(waiters: list[Callable[[], None]]) -> None:
    woken, waiters[:] = waiters[:], []
    for wake in woken:
        wake()
