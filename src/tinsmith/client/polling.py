"""Fetches the results of operations that the server has accepted."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from tinsmith.client.connection import JSON, PROTOBUF, Call, Connection
from tinsmith.client.hooks import QueueStateChange
from tinsmith.client.retry import Retry
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
    roundtrip: float | None = None,
    payload_size: int | None = None,
    progress_timeout: float | None = None,
) -> T:
    """Polls until the operation is done. A known payload size saves the question for it."""
    poll = _Poll(connection, kind, request_id, subject, progress_timeout or connection.config.progress_timeout)
    return await poll.run(roundtrip, payload_size)


class _Poll(Generic[T]):
    def __init__(
        self, connection: Connection, kind: ResultKind[T], request_id: str, subject: str, progress_timeout: float
    ) -> None:
        self._connection = connection
        self._kind = kind
        self._request_id = request_id
        self._subject = subject
        self._state = "active"
        self._iteration = 0
        self._quick_answers = 0
        self._alive_since = time.monotonic()
        self._progress_timeout = progress_timeout
        policy = connection.retry_policy(progress_timeout)
        self._retry = Retry(policy._replace(max_attempts=1_000_000))

    async def run(self, roundtrip: float | None, payload_size: int | None) -> T:
        budget = self._connection.account.response_bytes
        reserved = 0
        try:
            while True:
                if payload_size and not reserved:
                    # Large results are fetched within a byte budget, so that many of them do not fill the memory.
                    await budget.acquire(payload_size)
                    reserved = payload_size
                sent = time.monotonic()
                response = await self._ask(roundtrip, metadata_only=not reserved)
                if _is_protobuf(response):
                    return await self._finish(response)
                answer = self._parse(response)
                if response.status == 408 or answer.get("type") == "try_again":
                    await self._keep_waiting(answer, time.monotonic() - sent)
                elif answer.get("status") == "complete_metadata" and not reserved:
                    payload_size = int(answer.get("response_payload_size") or 1)
                else:
                    return await self._finish(response, answer)
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
            Traffic.POLL,
            accept=self._kind.accept,
            headers=headers,
            timeout=POLL_TIMEOUT_SECONDS,
            expected=(408,),
        )
        response = await self._connection.call(call, self._retry)
        self._retry.progressed()
        return response

    async def _keep_waiting(self, answer: dict[str, Any], elapsed: float) -> None:
        state = answer.get("queue_state", "active")
        state = state if state in QUEUE_STATES else "unknown"
        if state != self._state:
            self._state = state
            self._connection.hooks.emit(
                QueueStateChange(state, answer.get("queue_state_reason"), self._subject, self._request_id)
            )
        if state != "active":
            self._alive_since = time.monotonic()
        self._check_progress()
        if elapsed < LONG_POLL_SECONDS:
            pace = min(FIRST_PACE_SECONDS * 2**self._quick_answers, MAX_PACE_SECONDS)
            self._quick_answers = min(self._quick_answers + 1, 10)
            await asyncio.sleep(pace * (1 - 0.25 * random.random()))

    def _check_progress(self) -> None:
        limit = self._progress_timeout
        if time.monotonic() - max(self._alive_since, self._connection.last_progress) > limit:
            raise NoProgressError(
                message=f"{self._kind.request_type} {self._request_id} is still pending, and no operation of this "
                f"client has finished for {limit:g} s. Check the server, or raise progress_timeout in the Config."
            )

    def _parse(self, response: HttpResponse) -> dict[str, Any]:
        if response.status == 408 and not response.body:
            return {}
        try:
            answer = wire_json.loads(response.body)
        except InvalidInputError as error:
            if response.status == 408:
                return {}
            raise self._malformed(response, str(error)) from error
        if not isinstance(answer, dict):
            raise self._malformed(response, "it is not a JSON object")
        return answer

    async def _finish(self, response: HttpResponse, answer: dict[str, Any] | None = None) -> T:
        self._connection.last_progress = time.monotonic()
        if answer is not None and "error" in answer:
            failure = wire_json.decode(RequestFailedResponse, response.body)
            raise RequestFailedError(
                f"{self._kind.request_type} {self._request_id} failed on the server: {failure.error}",
                self._request_id,
                failure.category,
            )
        decode = self._kind.from_json if answer is not None else self._kind.from_protobuf
        if decode is None:
            raise self._malformed(response, "it is protobuf where JSON is due")
        try:
            if len(response.body) > LARGE_BODY_BYTES:
                return await asyncio.to_thread(decode, response.body)
            return decode(response.body)
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
