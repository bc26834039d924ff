"""Fetches the results of operations that the server has accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from tinsmith.client.connection import JSON, PROTOBUF, Call, Connection
from tinsmith.client.hooks import QueueStateChange
from tinsmith.client.retry import Retry, chance
from tinsmith.client.threads import run_coding
from tinsmith.client.transport import HttpResponse, Traffic
from tinsmith.errors import (
    APIResponseValidationError,
    InvalidInputError,
    NoProgressError,
    RequestFailedError,
    ResponseSummary,
)
from tinsmith.types import RequestFailedResponse
from tinsmith.wire import json as wire_json

T = TypeVar("T")

POLL_TIMEOUT_SECONDS = 45.0
LONG_POLL_SECONDS = 0.5
"""An answer `pending` that comes sooner than this was no long poll, so we pace ourselves."""
FIRST_PACE_SECONDS = 0.05
MAX_PACE_SECONDS = 0.7
LARGE_BODY_BYTES = 256 * 1024
"""Larger results are decoded off the loop."""

PATH = "/api/v1/retrieve_future"
QUEUE_STATES = frozenset({"active", "paused_rate_limit", "paused_capacity"})


class ResultKind(NamedTuple, Generic[T]):
    """What a kind of operation is called in the headers and how its result is read."""

    request_type: str
    from_json: Callable[[bytes], T]
    from_protobuf: Callable[[bytes], T] | None = None

    @property
    def accept(self) -> str:
        return JSON if self.from_protobuf is None else PROTOBUF


async def retrieve(
    connection: Connection,
    kind: ResultKind[T],
    request_id: str,
    *,
    subject: str,
    traffic: Traffic = Traffic.TRAIN_POLL,
    roundtrip: float | None = None,
    payload_size: int | None = None,
    progress_timeout: float | None = None,
) -> T:
    """Polls until the operation is done. A known payload size saves the question for it."""
    limit = progress_timeout or connection.config.progress_timeout
    return await _Poll(connection, kind, request_id, subject, traffic, limit).run(roundtrip, payload_size)


class _Poll(Generic[T]):
    def __init__(
        self,
        connection: Connection,
        kind: ResultKind[T],
        request_id: str,
        subject: str,
        traffic: Traffic,
        progress_timeout: float,
    ) -> None:
        self._connection = connection
        self._clock = connection.clock
        self._kind = kind
        self._request_id = request_id
        self._subject = subject
        self._traffic = traffic
        self._progress_timeout = progress_timeout
        self._state = "active"
        self._iteration = 0
        self._quick_answers = 0
        self._alive_since = self._clock.now()
        policy = connection.retry_policy(progress_timeout)
        self._retry = Retry(policy._replace(max_attempts=1_000_000), clock=self._clock)

    async def run(self, roundtrip: float | None, payload_size: int | None) -> T:
        budget = self._connection.account.response_bytes
        reserved = 0
        try:
            while True:
                if payload_size and not reserved:
                    # Large results are fetched within a byte budget, so that many of them do not fill the memory.
                    await budget.acquire(payload_size)
                    reserved = payload_size
                sent = self._clock.now()
                response = await self._ask(roundtrip, metadata_only=not reserved)
                if _is_protobuf(response):
                    return await self._decoded(response, self._kind.from_protobuf)
                answer = await _off_the_loop_if_large(self._parse, response)
                if response.status == 408 or answer.get("type") == "try_again":
                    await self._keep_waiting(answer, self._clock.now() - sent)
                elif answer.get("status") == "complete_metadata" and not reserved:
                    payload_size = self._announced_size(response, answer)
                else:
                    self._raise_if_failed(answer)
                    return await self._decoded(response, self._kind.from_json)
        finally:
            if reserved:
                budget.release(reserved)

    async def _ask(self, roundtrip: float | None, *, metadata_only: bool) -> HttpResponse:
        headers = {
            "X-Tinker-Request-Iteration": str(self._iteration),
            "X-Tinker-Request-Type": self._kind.request_type,
        }
        if roundtrip is not None and self._iteration == 0:
            headers["X-Tinker-Create-Promise-Roundtrip-Time"] = str(roundtrip)
        self._iteration += 1
        call = Call(
            "POST",
            PATH,
            wire_json.encode({"request_id": self._request_id, "allow_metadata_only": metadata_only}),
            self._traffic,
            accept=self._kind.accept,
            headers=headers,
            timeout=POLL_TIMEOUT_SECONDS,
            expected=(408,),
        )
        response = await self._connection.call(call, self._retry)
        self._retry.progressed()
        return response

    # Not done yet

    async def _keep_waiting(self, answer: dict[str, Any], elapsed: float) -> None:
        self._note_state(answer)
        if self._state != "active":
            self._alive_since = self._clock.now()
        self._check_progress()
        if elapsed < LONG_POLL_SECONDS:
            pace = min(FIRST_PACE_SECONDS * 2**self._quick_answers, MAX_PACE_SECONDS)
            self._quick_answers = min(self._quick_answers + 1, 10)
            await self._clock.sleep(pace * (1 - 0.25 * chance.random()))

    def _note_state(self, answer: dict[str, Any]) -> None:
        state, reason = str(answer.get("queue_state") or "active").lower(), answer.get("queue_state_reason")
        state = state if state in QUEUE_STATES else "unknown"
        if state != self._state:
            self._state = state
            reason = None if reason is None else str(reason)
            self._connection.hooks.emit(QueueStateChange(state, reason, self._subject, self._request_id))

    def _check_progress(self) -> None:
        limit = self._progress_timeout
        if self._clock.now() - max(self._alive_since, self._connection.last_progress) > limit:
            raise NoProgressError(
                message=f"{self._kind.request_type} {self._request_id} is still pending, and no operation of this "
                f"client has finished for {limit:g} s. Check the server, or raise progress_timeout."
            )

    # Done

    def _parse(self, response: HttpResponse) -> dict[str, Any]:
        """What is wrong with a 408 does not matter: its status says it all."""
        try:
            answer = wire_json.loads(response.body)
            problem = "it is not a JSON object"
        except InvalidInputError as error:
            answer, problem = None, str(error)
        if isinstance(answer, dict):
            return answer
        if response.status == 408:
            return {}
        raise self._malformed(response, problem)

    def _announced_size(self, response: HttpResponse, answer: dict[str, Any]) -> int:
        size = answer.get("response_payload_size")
        if not isinstance(size, int) or size < 0:
            raise self._malformed(response, f"its response_payload_size is {size!r}")
        return size or 1

    def _raise_if_failed(self, answer: dict[str, Any]) -> None:
        error = answer.get("error")
        if error is None:
            return
        self._connection.last_progress = self._clock.now()
        failure = RequestFailedResponse.from_builtins({**answer, "error": str(error)})
        raise RequestFailedError(
            f"{self._kind.request_type} {self._request_id} failed on the server: {failure.error}",
            self._request_id,
            failure.category,
        )

    async def _decoded(self, response: HttpResponse, decode: Callable[[bytes], T] | None) -> T:
        self._connection.last_progress = self._clock.now()
        if decode is None:
            raise self._malformed(response, "it is protobuf where JSON is due")
        try:
            return await _off_the_loop_if_large(lambda response: decode(response.body), response)
        except InvalidInputError as error:
            raise self._malformed(response, str(error)) from error

    def _malformed(self, response: HttpResponse, problem: str) -> APIResponseValidationError:
        return APIResponseValidationError(
            ResponseSummary(response.status, dict(response.headers.items())),
            None,
            f"The result of {self._kind.request_type} {self._request_id} cannot be read: {problem}.",
        )


def _is_protobuf(response: HttpResponse) -> bool:
    return response.status == 200 and PROTOBUF in (response.headers.get("content-type") or "")


async def _off_the_loop_if_large(read: Callable[[HttpResponse], T], response: HttpResponse) -> T:
    return await run_coding(read, response) if len(response.body) > LARGE_BODY_BYTES else read(response)
