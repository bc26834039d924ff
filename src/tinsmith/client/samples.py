"""Samples on their way: in line, submitted, polled for, and submitted again.

Who retries what: the HTTP layer does not repeat `asample`. A sample that the server turns away with 429 goes back to
the head of its line, and the whole account holds back for as long as the server says; other failures of a submission
are repeated under the same number after a pause. A sample whose result is lost at the server is submitted anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import random
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, NamedTuple, TypeGuard, TypeVar

import msgspec

from tinsmith.client.batch_poller import BatchPoller
from tinsmith.client.chunks import input_bytes
from tinsmith.client.connection import Call, Connection, closed_error
from tinsmith.client.futures import APIFuture
from tinsmith.client.hooks import Backoff
from tinsmith.client.limits import SampleLane, refuse_pending
from tinsmith.client.making import why_not
from tinsmith.client.once import Once
from tinsmith.client.polling import LARGE_BODY_BYTES, ResultKind, retrieve
from tinsmith.client.retry import Action, Retry, RetryConfig, classify
from tinsmith.client.session import Session
from tinsmith.client.threads import run_coding
from tinsmith.client.transport import Traffic
from tinsmith.errors import (
    APIResponseValidationError,
    BillingError,
    ClientClosedError,
    NoProgressError,
    RateLimitError,
    RequestFailedError,
    ResponseSummary,
    TinkerError,
    UnsupportedByServerError,
    WouldDeadlockError,
)
from tinsmith.types import (
    ClientConfigResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
    SampleResponse,
    UntypedAPIFuture,
)
from tinsmith.wire import json as wire_json
from tinsmith.wire import proto as wire_proto

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUMBERS_PER_CLONE = 1_000_000_000
BYTES_PER_TOKEN = 10
LARGE_PROMPT_BYTES = 131_072
BACKOFF_SECONDS = 1.0
LARGE_PROMPT_BACKOFF_SECONDS = 5.0
MIN_BACKOFF_SECONDS = 0.1
"""Also when the server asks for less: a server that says 0 again and again must not be stormed."""
MAX_REDONE = 10
CANCEL_TIMEOUT_SECONDS = 30.0

SAMPLE = ResultKind("Sample", functools.partial(wire_json.decode, SampleResponse), wire_proto.decode_sample_response)


class Opened(NamedTuple):
    """A sampling session that is there."""

    sampling_session_id: str
    base_model: str | None


class SampleQueue:
    """The samples of one sampling client, from the call to the result.

    `take_slot` and `add` may be called from any thread; all else happens on the loop.
    """

    def __init__(
        self,
        session: Session,
        opened: APIFuture[Opened],
        retry_config: RetryConfig | None,
        shadow: bool,
        check_can_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.connection = session.connection
        self.retry_config = retry_config or RetryConfig()
        self.lane = SampleLane(retry_config.max_connections if retry_config is not None else None)
        self.flags: ClientConfigResponse | None = None
        self.resting: dict[_Sample, asyncio.TimerHandle] = {}
        """Samples that wait before they line up again."""
        self._session = session  # kept alive, and with it the heartbeats, while there are samples
        self._opened = opened
        self._check_can_wait = check_can_wait
        self._asked_limit = self.lane.max_unfinished
        self._numbers: itertools.count[int] | None = None if shadow else itertools.count()
        self._joining: Once[int] = Once()
        self._poller: BatchPoller | None = None
        self.connection.on_close(self._give_up)
        if not opened.done():
            opened.add_done_callback(lambda _: self._begin_soon())

    @property
    def sampling_session_id(self) -> str:
        """For what happens after it was opened."""
        return self._opened.result().sampling_session_id

    def take_slot(self) -> None:
        self._check()
        config, pending = self.connection.config, self.connection.account.pending
        if pending.try_take(config.max_pending):
            return
        if config.when_full == "error":
            raise refuse_pending(config.max_pending)
        if self.connection.loop.is_current_thread():
            raise WouldDeadlockError(
                "sample() would wait for room on Tinsmith's own event-loop thread, where no room can ever come. "
                "Do not start samples in hooks or done-callbacks when max_pending may be reached."
            )
        pending.take(config.max_pending, self)

    async def take_slot_async(self) -> None:
        self._check()
        config, pending = self.connection.config, self.connection.account.pending
        if pending.try_take(config.max_pending):
            return
        if config.when_full == "error":
            raise refuse_pending(config.max_pending)
        await pending.take_async(config.max_pending, self)

    def _check(self) -> None:
        self.connection.check_open()
        if not self._opened.done():
            self._check_can_wait()

    def add(self, request: SampleRequest, transform: Callable[[SampleResponse], T]) -> APIFuture[T]:
        sample = _Sample(self, request, transform)
        self.connection.loop.post(self._line_up, sample)
        return sample.future

    def _line_up(self, sample: _Sample) -> None:
        try:
            self.connection.check_open()
        except ClientClosedError as error:  # closed while the caller waited for room
            sample.abandon(error)
            return
        self.lane.add(sample)
        if self._opened.done():
            self._begin()

    def _begin_soon(self) -> None:
        with contextlib.suppress(ClientClosedError):  # the interpreter is exiting
            self.connection.loop.post(self._begin)

    def _begin(self) -> None:
        """The sampling session is there, or never will be."""
        error = why_not(self._opened)
        if error is None:
            self.connection.account.sample_gate.ready(self.lane)
        else:
            self._abandon_all(error)

    def _give_up(self) -> None:
        """The client is closed: nothing that waits will ever be sent."""
        self.connection.account.pending.turn_away(self, closed_error())
        self._abandon_all(closed_error())
        for sample in list(self.resting):
            sample.end_rest(closed_error())

    def _abandon_all(self, error: BaseException) -> None:
        for sample in self.lane.empty():
            assert isinstance(sample, _Sample)
            sample.abandon(error)

    async def next_number(self) -> int:
        if self._numbers is None:
            first = NUMBERS_PER_CLONE * await self._joining.do(self._clone_number)
            self._numbers = self._numbers or itertools.count(first)
        return next(self._numbers)

    async def _clone_number(self) -> int:
        """Keeps the numbers of copies apart: the server gives one out, or chance does.

        The operating system's chance: processes that were all given the same seed must still differ.
        """
        if not (await self.connection.flags()).sample_join_sampling_session:
            return random.SystemRandom().randint(1, NUMBERS_PER_CLONE)
        body = wire_json.encode(JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id))
        call = Call("POST", "/api/v1/join_sampling_session", body, Traffic.SESSION)
        return (await self.connection.call_for(JoinSamplingSessionResponse, call)).client_counter

    def poller_for(self, number: int) -> BatchPoller:
        if self._poller is None:
            self._poller = BatchPoller(
                self.connection, self.sampling_session_id, number // NUMBERS_PER_CLONE, self.progress_timeout()
            )
        return self._poller

    def use_flags(self, flags: ClientConfigResponse) -> None:
        """How many samples may be unfinished: the lower of what the user and the server say."""
        if self.flags is flags:
            return
        self.flags = flags
        asked, allowed = self._asked_limit, flags.sample_max_concurrent_requests
        if flags.sample_use_retrieve_futures:
            return  # one poll serves them all, so only the user's own limit counts
        if asked is not None and asked > allowed:
            logger.info("max_connections is %d; the server allows %d.", asked, allowed)
        self.lane.max_unfinished = allowed if asked is None else min(asked, allowed)

    def progress_timeout(self) -> float:
        stuck_detection = self.retry_config.enable_stuck_detection and (
            self.flags is None or self.flags.sample_enable_stuck_detection
        )
        return self.retry_config.progress_timeout if stuck_detection else math.inf

    def may_resubmit(self) -> bool:
        return self.retry_config.enable_retry_logic and not (self.flags and self.flags.sample_no_retries)


class _Sample:
    """One call of `sample()`, from the queue to its result. Kept small: thousands of these may wait.

    It waits in its queue's lane, is submitted and polled for by a task, and may rest in between; see `_stop` for
    what becomes of it in each of these when the user cancels.
    """

    __slots__ = (
        "byte_cost",
        "future",
        "holds_slot",
        "is_accepted",
        "number",
        "queue",
        "redone",
        "request",
        "retry",
        "task",
        "transform",
    )

    def __init__(self, queue: SampleQueue, request: SampleRequest, transform: Callable[[SampleResponse], Any]) -> None:
        self.queue = queue
        self.request = request
        self.transform = transform
        self.future: APIFuture[Any] = APIFuture(on_cancel=self._cancelled)
        self.byte_cost = input_bytes(request.prompt, BYTES_PER_TOKEN)
        self.number: int | None = None
        self.is_accepted = False
        self.holds_slot = True
        self.retry: Retry | None = None
        self.task: asyncio.Task[None] | None = None
        self.redone: list[type[Exception]] = []
        """Why it was submitted under a new number, each time."""

    # As the gate sees it

    def is_abandoned(self) -> bool:
        return self.future.cancelled()

    def submit(self, charge: int) -> None:
        self.task = self.queue.connection.loop.start_task(self._run(charge))

    # On the loop

    async def _run(self, charge: int) -> None:
        connection = self.queue.connection
        try:
            try:
                answer = await connection.guard(self._submit(), report=False)
            finally:
                connection.account.sample_gate.submitted(charge)
            result = await connection.guard(self._collect(answer), report=False)
        except asyncio.CancelledError:
            self._finish(error=CancelledError())
            raise
        except Exception as error:  # noqa: BLE001 - it is retried or reaches the future
            self._failed(error)
        else:
            self._finish(result)

    async def _submit(self) -> UntypedAPIFuture:
        queue = self.queue
        self.is_accepted = False
        queue.use_flags(await queue.connection.flags())
        if self.number is None:
            self.number = await queue.next_number()
        encode = functools.partial(_encode, self.request, queue.sampling_session_id, self.number)
        body = await run_coding(encode) if self._is_large() else encode()
        headers = {"X-Tinker-Sampling-Backpressure": "1"}
        answer = await self._sent(Call("POST", "/api/v1/asample", body, Traffic.SAMPLE, headers=headers, retries=False))
        self.is_accepted = True
        self.future.request_id = answer.request_id
        return answer

    async def _sent(self, call: Call) -> UntypedAPIFuture:
        """A request that is on its way arrives: if it is cancelled now, the server is told when it has answered."""
        connection = self.queue.connection
        sending = connection.loop.start_task(
            connection.guard(connection.call_for(UntypedAPIFuture, call), report=False)
        )
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            sending.add_done_callback(self._cancel_late)
            raise

    def _cancel_late(self, sent: asyncio.Task[UntypedAPIFuture]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            self._cancel_on_server(sent.result().request_id)

    async def _collect(self, answer: UntypedAPIFuture) -> Any:
        queue, connection = self.queue, self.queue.connection
        assert queue.flags is not None
        assert self.number is not None
        poller = queue.poller_for(self.number) if queue.flags.sample_use_retrieve_futures else None
        size = await poller.wait(answer.request_id) if poller else None
        try:
            response = await retrieve(
                connection,
                SAMPLE,
                answer.request_id,
                subject=queue.sampling_session_id,
                traffic=Traffic.POLL,
                payload_size=size,
                progress_timeout=queue.progress_timeout(),
            )
        finally:
            if poller:
                poller.fetched(answer.request_id)
        read = functools.partial(self._read, answer, response)
        return await run_coding(read) if self._is_large() else read()

    def _read(self, answer: UntypedAPIFuture, response: SampleResponse) -> Any:
        _check_answered(self.request, response)
        return self.transform(_with_sequence_ids(response, answer.sample_sequence_ids))

    def _is_large(self) -> bool:
        """Whether handling it takes so long that other calls would notice if it were done on the loop."""
        return self.byte_cost > LARGE_BODY_BYTES

    def _failed(self, error: Exception) -> None:
        """Goes back into the line, or gives up."""
        queue, connection = self.queue, self.queue.connection
        try:
            pause = self._pause_after(error)
        except Exception as final:  # noqa: BLE001 - it reaches the future
            connection.report(error)
            self._finish(error=final)
            return
        connection.tell_pause(error, pause)
        if self._was_turned_away(error):
            # The gate keeps everyone waiting; this one only has to be first when it opens.
            connection.account.sample_gate.back_off(pause)
            connection.hooks.emit(Backoff("sampling", pause, error.status_code))
            self._line_up_again()
        else:
            queue.resting[self] = connection.loop.asyncio_loop.call_later(pause, self._line_up_again)

    def _pause_after(self, error: Exception) -> float:
        """Seconds until the next try; raises the error if there shall be none."""
        queue, connection = self.queue, self.queue.connection
        if self.retry is None:
            policy = queue.retry_config.policy(connection.retry_policy().billing_pause_limit)
            self.retry = Retry(policy._replace(max_seconds=queue.progress_timeout()), clock=connection.clock)
        self.retry.others_progressed(connection.last_progress)
        if self._was_turned_away(error):
            large = self.byte_cost > LARGE_PROMPT_BYTES
            default = LARGE_PROMPT_BACKOFF_SECONDS if large else BACKOFF_SECONDS
            return max(self.retry.pause_after(error, default), MIN_BACKOFF_SECONDS)
        if not queue.may_resubmit() or isinstance(error, NoProgressError):
            raise error
        if classify(error).action is Action.REDO:
            return self._start_over(error)
        return self.retry.pause_after(error)

    def _was_turned_away(self, error: Exception) -> TypeGuard[RateLimitError | BillingError]:
        """Whether the server did not take it in because the account must wait."""
        return not self.is_accepted and isinstance(error, RateLimitError | BillingError)

    def _start_over(self, error: Exception) -> float:
        """A lost result is asked for again under a new number, a failed one only once."""
        failed_before = isinstance(error, RequestFailedError) and RequestFailedError in self.redone
        if failed_before or len(self.redone) >= MAX_REDONE:
            raise error
        self.redone.append(type(error))
        self.number = self.future.request_id = None
        assert self.retry is not None
        return self.retry.policy.delay(len(self.redone) - 1)

    def _line_up_again(self) -> None:
        queue = self.queue
        queue.resting.pop(self, None)
        if self.future.cancelled():
            self._finish(error=CancelledError())
            return
        self.task = None
        queue.lane.add_first(self)
        queue.connection.account.sample_gate.ready(queue.lane)

    def end_rest(self, error: BaseException) -> None:
        self.queue.resting.pop(self).cancel()
        self._finish(error=error)

    def _finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Frees its place before the result is seen, so that whoever waited for it finds room for the next."""
        queue = self.queue
        queue.lane.finished()
        self._give_back_slot()
        try:
            if error is None:
                self.future.resolve(result)
            else:
                self.future.fail(error)
        finally:  # a done-callback of the user's may raise anything
            queue.connection.account.sample_gate.ready(queue.lane)

    def abandon(self, error: BaseException) -> None:
        """Ends one that waits in line."""
        self._give_back_slot()
        self.future.fail(error)

    def _give_back_slot(self) -> None:
        """Once, however many ways it ends at the same time."""
        if self.holds_slot:
            self.holds_slot = False
            self.queue.connection.account.pending.give_back()

    # Cancelling

    def _cancelled(self) -> None:
        self.queue.connection.loop.post(self._stop)

    def _stop(self) -> None:
        connection = self.queue.connection
        request_id = self.future.request_id
        if self in self.queue.resting:
            self.end_rest(CancelledError())
        elif self.task is None:
            self._give_back_slot()
            self.queue.lane.abandoned()
        elif not self.task.done():
            connection.loop.cancel_soon(self.task)
        if request_id is not None:
            self._cancel_on_server(request_id)

    def _cancel_on_server(self, request_id: str) -> None:
        connection = self.queue.connection
        if connection.account.dynamic_flags.sample_cancel_enabled:
            connection.loop.start_task(_cancel_on_server(connection, request_id))


async def _cancel_on_server(connection: Connection, request_id: str) -> None:
    body = wire_json.encode({"request_id": request_id})
    call = Call("POST", "/api/v1/cancel_future", body, Traffic.POLL, timeout=CANCEL_TIMEOUT_SECONDS, retries=False)
    try:
        async with connection.account.cancellations:
            await connection.guard(connection.call(call), report=False)
    except TinkerError as error:
        logger.debug("The server was not told that sample %s is no longer wanted: %s", request_id, str(error))


def _encode(request: SampleRequest, sampling_session_id: str, number: int) -> bytes:
    return wire_json.encode({**request.to_builtins(), "sampling_session_id": sampling_session_id, "seq_id": number})


def _check_answered(request: SampleRequest, response: SampleResponse) -> None:
    """A server that does not know an option ignores it in silence; the caller must not take that for an answer."""
    if request.prompt_alt_tokens_k and response.prompt_alt_tokens is None:
        raise UnsupportedByServerError("The server ignored prompt_alt_tokens_k; it does not offer alternative tokens.")
    last_n, logprobs = request.prompt_logprobs_last_n, response.prompt_logprobs_np
    if last_n is not None and logprobs is not None:
        before = logprobs[: max(0, len(logprobs) - last_n)]
        if (before == before).any():  # NaN, which differs from itself, marks what was not scored
            raise UnsupportedByServerError(
                "The server ignored prompt_logprobs_last_n and scored the whole prompt; leave the option out."
            )


def _with_sequence_ids(response: SampleResponse, sequence_ids: list[str] | None) -> SampleResponse:
    if sequence_ids is None:
        return response  # servers of older releases give none
    if len(sequence_ids) != len(response.sequences):
        raise APIResponseValidationError(
            ResponseSummary(200, {}),
            None,
            f"The server announced {len(sequence_ids)} sequences and returned {len(response.sequences)}.",
        )
    named = [
        msgspec.structs.replace(sequence, sequence_id=sequence_id)
        for sequence, sequence_id in zip(response.sequences, sequence_ids, strict=True)
    ]
    return msgspec.structs.replace(response, sequences=named)
