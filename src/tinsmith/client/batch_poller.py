"""One long poll for all samples of a sampling client, on servers that offer it.

Thousands of waiting samples then need one connection instead of one each. The poller runs while somebody waits.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tinsmith.client.connection import Call, Connection, decode
from tinsmith.client.polling import POLL_TIMEOUT_SECONDS
from tinsmith.client.retry import Retry
from tinsmith.client.transport import Traffic
from tinsmith.errors import NoProgressError
from tinsmith.types import FutureFinished, FuturesRetrieveRequest, FuturesRetrieveResponse, SamplingSessionFuturesTarget
from tinsmith.wire import json as wire_json

MIN_INTERVAL_SECONDS = 0.02
"""Completions that come one by one are gathered for this long, so that they share a poll."""
IDLE_INTERVAL_SECONDS = 0.5
"""An answer without completions that comes sooner than this was no long poll, so we pace ourselves."""
MAX_EARLY = 10_000


class BatchPoller:
    def __init__(self, connection: Connection, sampling_session_id: str, clone: int, progress_timeout: float) -> None:
        self._connection = connection
        self._target = SamplingSessionFuturesTarget(
            type="sampling_session", sampling_session_id=sampling_session_id, cloned_sampler_id=clone
        )
        self._progress_timeout = progress_timeout
        self._cursor = 0
        self._waiters: dict[str, asyncio.Future[int | None]] = {}
        self._early: dict[str, int | None] = {}
        """Completions of samples whose submission has not been answered yet."""
        self._fetched: deque[str] = deque()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, request_id: str) -> int | None:
        """Waits until the sample is done; gives the size of its result if the server told."""
        if request_id in self._early:
            return self._early.pop(request_id)
        done: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiters[request_id] = done
        if self._task is None:
            self._task = self._connection.loop.start_task(self._run())
        try:
            return await done
        finally:
            del self._waiters[request_id]
            if not self._waiters:
                self._stop()

    def _stop(self) -> None:
        """Nobody waits. The next one starts a new task at once, while this one may still be on its way out."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def fetched(self, request_id: str) -> None:
        """The result is here; the server may forget it."""
        self._fetched.append(request_id)

    async def _run(self) -> None:
        """Whatever ends it reaches every waiter."""
        try:
            await self._connection.guard(self._keep_polling(), report=False)
        except Exception as error:  # noqa: BLE001 - it reaches every waiter
            if self._task is asyncio.current_task():
                self._task = None  # whoever comes from now on starts anew
            for waiter in self._waiters.values():
                if not waiter.done():
                    waiter.set_exception(error)

    async def _keep_polling(self) -> None:
        policy = self._connection.retry_policy(self._progress_timeout)
        clock = self._connection.clock
        retry = Retry(policy._replace(max_attempts=1_000_000, max_delay=2.0), clock=clock)
        alive = clock.now()
        while True:
            asked = clock.now()
            answer = await self._poll(retry)
            retry.progressed()
            self._note(answer)
            now = clock.now()
            alive = now if answer.completions else max(alive, self._connection.last_progress)
            if now - alive > self._progress_timeout:
                raise NoProgressError(
                    message=f"{len(self._waiters)} samples are still pending, and none has finished for "
                    f"{self._progress_timeout:g} s. Check the server, or raise RetryConfig.progress_timeout."
                )
            pace = MIN_INTERVAL_SECONDS if answer.completions else IDLE_INTERVAL_SECONDS - (now - asked)
            await clock.sleep(max(MIN_INTERVAL_SECONDS, pace))

    async def _poll(self, retry: Retry) -> FuturesRetrieveResponse:
        acknowledged = list(self._fetched)
        request = FuturesRetrieveRequest(
            target=self._target, prev_cursor=self._cursor, retrieved_request_ids=acknowledged
        )
        call = Call(
            "POST",
            "/api/v1/retrieve_futures",
            wire_json.encode(request),
            Traffic.POLL,
            timeout=POLL_TIMEOUT_SECONDS,
        )
        answer = decode(FuturesRetrieveResponse, await self._connection.call(call, retry), call)
        for _ in acknowledged:  # only now: the ids of a poll that failed must be told again
            self._fetched.popleft()
        return answer

    def _note(self, answer: FuturesRetrieveResponse) -> None:
        self._cursor = answer.cursor
        for completion in answer.completions:
            size = completion.response_payload_uncompressed_size if isinstance(completion, FutureFinished) else None
            waiter = self._waiters.get(completion.request_id)
            if waiter is not None and not waiter.done():
                waiter.set_result(size)
            elif waiter is None:
                self._early[completion.request_id] = size
        while len(self._early) > MAX_EARLY:  # the oldest are of samples that nobody waits for any more
            del self._early[next(iter(self._early))]
