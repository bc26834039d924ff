"""The sampling client: samples and log-probabilities from one set of weights.

Who retries what: the HTTP layer does not repeat `asample`. A sample that the server turns away with 429 goes back to
the head of its line, and the whole account holds back for as long as the server says; other failures of a submission
are repeated under the same number after a pause. A sample whose result is lost at the server is submitted anew.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import itertools
import logging
import math
import random
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard, TypeVar
from urllib.parse import quote

import msgspec

from tinsmith.client.batch_poller import BatchPoller
from tinsmith.client.checks import check_text
from tinsmith.client.chunks import input_bytes
from tinsmith.client.config import Config
from tinsmith.client.connection import Call, Connection, closed_error
from tinsmith.client.futures import APIFuture
from tinsmith.client.hooks import Backoff, QueueStateChange
from tinsmith.client.limits import SampleLane, refuse_pending
from tinsmith.client.once import Once
from tinsmith.client.polling import LARGE_BODY_BYTES, ResultKind, retrieve
from tinsmith.client.retry import Action, Retry, RetryConfig, classify
from tinsmith.client.session import Session, inherited_session
from tinsmith.client.threads import run_coding
from tinsmith.client.transport import Traffic
from tinsmith.errors import (
    APIResponseValidationError,
    BillingError,
    ClientClosedError,
    InvalidInputError,
    InvalidTypeError,
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
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    ModelInput,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TensorData,
    UntypedAPIFuture,
)
from tinsmith.wire import json as wire_json
from tinsmith.wire import proto as wire_proto

if TYPE_CHECKING:
    from tinsmith.client.fast_tokenizer import Tokenizer

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


class SamplingClient:
    """Made by `ServiceClient.create_sampling_client()` or `TrainingClient.save_weights_and_get_sampling_client()`.

    It may be pickled and copied: a copy samples the same weights under numbers of its own, with the credentials of
    the process it is in. The limits on submissions are shared by all sampling clients of one server and key.
    """

    def __init__(
        self,
        session: Session,
        *,
        sampling_session_id: str,
        shadow: bool = False,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> None:
        if retry_config is not None and not isinstance(retry_config, RetryConfig):
            raise InvalidTypeError(
                f"retry_config is {retry_config!r}; it must be a RetryConfig.", field="retry_config", value=retry_config
            )
        self.sampling_session_id = check_text("sampling_session_id", sampling_session_id)
        self._session = session
        self._connection = session.connection
        self._retry_config = retry_config or RetryConfig()
        self._asked_limit = retry_config.max_connections if retry_config is not None else None
        self._record_stability_info = record_stability_info
        self._lane = SampleLane(self._asked_limit)
        self._flags: ClientConfigResponse | None = None
        self._numbers: itertools.count[int] | None = None if shadow else itertools.count()
        self._joining: Once[int] = Once()
        self._poller: BatchPoller | None = None
        self._resting: dict[_Sample, asyncio.TimerHandle] = {}
        """Samples that wait before they line up again."""
        self._connection.on_close(self._give_up)

    @staticmethod
    def create(
        session: Session,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> APIFuture[SamplingClient]:
        """Opens a sampling session for saved weights or a base model, or takes up one that exists."""
        if not (model_path or base_model or sampling_session_id):
            raise InvalidInputError("Give model_path (a tinker:// path) or base_model (a model name).")
        if base_model is not None:
            check_text("base_model", base_model)
        if model_path is not None and not check_text("model_path", model_path).startswith("tinker://"):
            raise InvalidInputError(
                f"model_path is {model_path!r}; it must start with 'tinker://'. For a base model, pass base_model.",
                field="model_path",
                value=model_path,
            )
        number = next(session.sampler_numbers)

        async def open_session() -> SamplingClient:
            session_id = await session.open()
            request = CreateSamplingSessionRequest(
                session_id=session_id, sampling_session_seq_id=number, model_path=model_path, base_model=base_model
            )
            opened = sampling_session_id or await _create_sampling_session(session.connection, request)
            return SamplingClient(
                session,
                sampling_session_id=opened,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )

        return session.connection.run(open_session)

    # Sampling

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """`num_samples` sequences that continue the prompt.

        With `max_pending` unfinished samples in the account it waits for room, or raises, as `when_full` says.
        """
        request = self._request(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )
        self._take_slot()
        return self._enqueue(request, _whole)

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> SampleResponse:
        request = self._request(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )
        await self._take_slot_async()
        return await self._enqueue(request, _whole)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The log-probability of every prompt token; None for the first, and for those not asked for."""
        request = self._logprobs_request(prompt, prompt_logprobs_last_n)
        self._take_slot()
        return self._enqueue(request, _prompt_logprobs)

    async def compute_logprobs_async(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        request = self._logprobs_request(prompt, prompt_logprobs_last_n)
        await self._take_slot_async()
        return await self._enqueue(request, _prompt_logprobs)

    # Information

    def get_base_model(self, *, timeout: float | None = None) -> str:
        return self._connection.run(self._get_sampler).result(timeout).base_model

    async def get_base_model_async(self, *, timeout: float | None = None) -> str:
        return (await self._connection.run(self._get_sampler).result_async(timeout)).base_model

    def get_tokenizer(self, *, timeout: float | None = None) -> Tokenizer:
        """The tokenizer of the base model, from a process-wide cache."""
        return self._connection.run(self._get_tokenizer).result(timeout)

    async def get_tokenizer_async(self, *, timeout: float | None = None) -> Tokenizer:
        return await self._connection.run(self._get_tokenizer).result_async(timeout)

    def get_telemetry(self) -> None:
        """Kept for old callers; there is nothing to get."""

    def on_queue_state_change(self, queue_state: object, queue_state_reason: str | None) -> None:
        """Kept for old callers: tells the hooks. They hear of real changes by themselves."""
        state = str(getattr(queue_state, "value", queue_state))
        self._connection.hooks.emit(QueueStateChange(state, queue_state_reason, self.sampling_session_id))

    # Copies

    def get_sampler_handle(self) -> str:
        """A text from which another process can make a client of the same sampler. It holds no credentials."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self._state())).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """The client for a handle, with this process's credentials."""
        try:
            state = msgspec.json.decode(base64.urlsafe_b64decode(handle), type=_SamplerState)
        except (TypeError, ValueError, msgspec.DecodeError) as error:
            raise InvalidInputError(
                f"This is no sampler handle ({error}). Pass the text that get_sampler_handle() returned, unchanged.",
                field="handle",
                value=handle,
            ) from error
        return _from_state(state, api_key)

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_state, (self._state(),)

    def __deepcopy__(self, memo: object) -> SamplingClient:
        return self.__copy__()

    def __copy__(self) -> SamplingClient:
        return SamplingClient(
            self._session,
            sampling_session_id=self.sampling_session_id,
            shadow=True,
            retry_config=self._retry_config,
            record_stability_info=self._record_stability_info,
        )

    def __repr__(self) -> str:
        return f"SamplingClient(sampling_session_id={self.sampling_session_id!r})"

    def _state(self) -> _SamplerState:
        return _SamplerState(
            base_url=self._connection.config.base_url,
            session_id=self._session.session_id or "",
            sampling_session_id=self.sampling_session_id,
            record_stability_info=self._record_stability_info,
        )

    # How a sample is made

    def _request(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool,
        topk_prompt_logprobs: int,
        topk_sample_logprobs: int,
        target_prompt_logprobs: TensorData | None,
        prompt_alt_tokens_k: int,
        prompt_logprobs_last_n: int | None,
    ) -> SampleRequest:
        if not isinstance(prompt, ModelInput):
            raise InvalidTypeError(
                f"prompt is a {type(prompt).__name__}, not a ModelInput; for token ids, use ModelInput.from_ints(...).",
                field="prompt",
                value=prompt,
            )
        _check_targets(target_prompt_logprobs)
        if prompt_logprobs_last_n is not None and not include_prompt_logprobs:
            raise InvalidInputError(
                "prompt_logprobs_last_n limits which prompt tokens are scored; it needs include_prompt_logprobs=True.",
                field="prompt_logprobs_last_n",
                value=prompt_logprobs_last_n,
            )
        return SampleRequest(
            sampling_session_id=self.sampling_session_id,
            num_samples=num_samples,
            prompt=prompt,
            sampling_params=sampling_params,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )

    def _logprobs_request(self, prompt: ModelInput, last_n: int | None) -> SampleRequest:
        return self._request(prompt, 1, SamplingParams(max_tokens=1), True, 0, 0, None, 0, last_n)

    def _take_slot(self) -> None:
        self._connection.check_open()
        config, pending = self._connection.config, self._connection.account.pending
        if pending.try_take(config.max_pending):
            return
        if config.when_full == "error":
            raise refuse_pending(config.max_pending)
        if self._connection.loop.is_current_thread():
            raise WouldDeadlockError(
                "sample() would wait for room on Tinsmith's own event-loop thread, where no room can ever come. "
                "Do not start samples in hooks or done-callbacks when max_pending may be reached."
            )
        pending.take(config.max_pending, self)

    async def _take_slot_async(self) -> None:
        self._connection.check_open()
        config, pending = self._connection.config, self._connection.account.pending
        if pending.try_take(config.max_pending):
            return
        if config.when_full == "error":
            raise refuse_pending(config.max_pending)
        await pending.take_async(config.max_pending, self)

    def _enqueue(self, request: SampleRequest, transform: Callable[[SampleResponse], T]) -> APIFuture[T]:
        sample = _Sample(self, request, transform)
        self._connection.loop.post(self._line_up, sample)
        return sample.future

    def _line_up(self, sample: _Sample) -> None:
        try:
            self._connection.check_open()
        except ClientClosedError as error:  # closed while the caller waited for room
            sample.abandon(error)
            return
        self._lane.add(sample)
        self._connection.account.sample_gate.ready(self._lane)

    def _give_up(self) -> None:
        """The client is closed: nothing that waits will ever be sent."""
        self._connection.account.pending.turn_away(self, closed_error())
        for sample in self._lane.empty():
            assert isinstance(sample, _Sample)
            sample.abandon(closed_error())
        for sample in list(self._resting):
            sample.end_rest(closed_error())

    async def _next_number(self) -> int:
        if self._numbers is None:
            first = NUMBERS_PER_CLONE * await self._joining.do(self._clone_number)
            self._numbers = self._numbers or itertools.count(first)
        return next(self._numbers)

    async def _clone_number(self) -> int:
        """Keeps the numbers of copies apart: the server gives one out, or chance does.

        The operating system's chance: processes that were all given the same seed must still differ.
        """
        if not (await self._connection.flags()).sample_join_sampling_session:
            return random.SystemRandom().randint(1, NUMBERS_PER_CLONE)
        body = wire_json.encode(JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id))
        call = Call("POST", "/api/v1/join_sampling_session", body, Traffic.SESSION)
        return (await self._connection.call_for(JoinSamplingSessionResponse, call)).client_counter

    def _poller_for(self, number: int) -> BatchPoller:
        if self._poller is None:
            self._poller = BatchPoller(
                self._connection, self.sampling_session_id, number // NUMBERS_PER_CLONE, self._progress_timeout()
            )
        return self._poller

    def _use_flags(self, flags: ClientConfigResponse) -> None:
        """How many samples may be unfinished: the lower of what the user and the server say."""
        if self._flags is flags:
            return
        self._flags = flags
        asked, allowed = self._asked_limit, flags.sample_max_concurrent_requests
        if flags.sample_use_retrieve_futures:
            return  # one poll serves them all, so only the user's own limit counts
        if asked is not None and asked > allowed:
            logger.info("max_connections is %d; the server allows %d.", asked, allowed)
        self._lane.max_unfinished = allowed if asked is None else min(asked, allowed)

    def _progress_timeout(self) -> float:
        stuck_detection = self._retry_config.enable_stuck_detection and (
            self._flags is None or self._flags.sample_enable_stuck_detection
        )
        return self._retry_config.progress_timeout if stuck_detection else math.inf

    def _may_resubmit(self) -> bool:
        return self._retry_config.enable_retry_logic and not (self._flags and self._flags.sample_no_retries)

    async def _get_sampler(self) -> GetSamplerResponse:
        call = Call("GET", f"/api/v1/samplers/{quote(self.sampling_session_id, safe=':')}", traffic=Traffic.REST)
        return await self._connection.call_for(GetSamplerResponse, call)

    async def _get_tokenizer(self) -> Tokenizer:
        from tinsmith.client.tokenizers import get_tokenizer

        sampler = await self._get_sampler()
        return await asyncio.to_thread(get_tokenizer, sampler.base_model)


class _SamplerState(msgspec.Struct, frozen=True):
    """What a copy in another process needs to know. No credential."""

    base_url: str
    session_id: Annotated[str, msgspec.Meta(min_length=1)]
    sampling_session_id: Annotated[str, msgspec.Meta(min_length=1)]
    record_stability_info: bool = False


class _Sample:
    """One call of `sample()`, from the queue to its result. Kept small: thousands of these may wait.

    It waits in its client's lane, is submitted and polled for by a task, and may rest in between; see `_stop` for
    what becomes of it in each of these when the user cancels.
    """

    __slots__ = (
        "byte_cost",
        "client",
        "future",
        "holds_slot",
        "is_accepted",
        "number",
        "redone",
        "request",
        "retry",
        "task",
        "transform",
    )

    def __init__(
        self, client: SamplingClient, request: SampleRequest, transform: Callable[[SampleResponse], Any]
    ) -> None:
        self.client = client
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
        self.task = self.client._connection.loop.start_task(self._run(charge))

    # On the loop

    async def _run(self, charge: int) -> None:
        connection = self.client._connection
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
        client = self.client
        self.is_accepted = False
        client._use_flags(await client._connection.flags())
        if self.number is None:
            self.number = await client._next_number()
        encode = functools.partial(_encode, self.request, self.number)
        body = await run_coding(encode) if self._is_large() else encode()
        headers = {"X-Tinker-Sampling-Backpressure": "1"}
        answer = await self._sent(Call("POST", "/api/v1/asample", body, Traffic.SAMPLE, headers=headers, retries=False))
        self.is_accepted = True
        self.future.request_id = answer.request_id
        return answer

    async def _sent(self, call: Call) -> UntypedAPIFuture:
        """A request that is on its way arrives: if it is cancelled now, the server is told when it has answered."""
        connection = self.client._connection
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
        client, connection = self.client, self.client._connection
        assert client._flags is not None
        assert self.number is not None
        poller = client._poller_for(self.number) if client._flags.sample_use_retrieve_futures else None
        size = await poller.wait(answer.request_id) if poller else None
        try:
            response = await retrieve(
                connection,
                SAMPLE,
                answer.request_id,
                subject=client.sampling_session_id,
                traffic=Traffic.POLL,
                payload_size=size,
                progress_timeout=client._progress_timeout(),
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
        client, connection = self.client, self.client._connection
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
            client._resting[self] = connection.loop.asyncio_loop.call_later(pause, self._line_up_again)

    def _pause_after(self, error: Exception) -> float:
        """Seconds until the next try; raises the error if there shall be none."""
        client, connection = self.client, self.client._connection
        if self.retry is None:
            policy = client._retry_config.policy(connection.retry_policy().billing_pause_limit)
            self.retry = Retry(policy._replace(max_seconds=client._progress_timeout()), clock=connection.clock)
        self.retry.others_progressed(connection.last_progress)
        if self._was_turned_away(error):
            large = self.byte_cost > LARGE_PROMPT_BYTES
            default = LARGE_PROMPT_BACKOFF_SECONDS if large else BACKOFF_SECONDS
            return max(self.retry.pause_after(error, default), MIN_BACKOFF_SECONDS)
        if not client._may_resubmit() or isinstance(error, NoProgressError):
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
        client = self.client
        client._resting.pop(self, None)
        if self.future.cancelled():
            self._finish(error=CancelledError())
            return
        self.task = None
        client._lane.add_first(self)
        client._connection.account.sample_gate.ready(client._lane)

    def end_rest(self, error: BaseException) -> None:
        self.client._resting.pop(self).cancel()
        self._finish(error=error)

    def _finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Frees its place before the result is seen, so that whoever waited for it finds room for the next."""
        client = self.client
        client._lane.finished()
        self._give_back_slot()
        try:
            if error is None:
                self.future.resolve(result)
            else:
                self.future.fail(error)
        finally:  # a done-callback of the user's may raise anything
            client._connection.account.sample_gate.ready(client._lane)

    def abandon(self, error: Exception) -> None:
        """Ends one that waits in line."""
        self._give_back_slot()
        self.future.fail(error)

    def _give_back_slot(self) -> None:
        """Once, however many ways it ends at the same time."""
        if self.holds_slot:
            self.holds_slot = False
            self.client._connection.account.pending.give_back()

    # Cancelling

    def _cancelled(self) -> None:
        self.client._connection.loop.post(self._stop)

    def _stop(self) -> None:
        connection = self.client._connection
        request_id = self.future.request_id
        if self in self.client._resting:
            self.end_rest(CancelledError())
        elif self.task is None:
            self._give_back_slot()
            self.client._lane.abandoned()
        elif not self.task.done():
            connection.loop.cancel_soon(self.task)
        if request_id is not None:
            self._cancel_on_server(request_id)

    def _cancel_on_server(self, request_id: str) -> None:
        connection = self.client._connection
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


async def _create_sampling_session(connection: Connection, request: CreateSamplingSessionRequest) -> str:
    call = Call("POST", "/api/v1/create_sampling_session", wire_json.encode(request), Traffic.SESSION)
    return (await connection.call_for(CreateSamplingSessionResponse, call)).sampling_session_id


def _from_state(state: _SamplerState, api_key: str | None = None) -> SamplingClient:
    return SamplingClient(
        inherited_session(Config.from_env(base_url=state.base_url, api_key=api_key), state.session_id),
        sampling_session_id=state.sampling_session_id,
        shadow=True,
        record_stability_info=state.record_stability_info,
    )


def _encode(request: SampleRequest, number: int) -> bytes:
    return wire_json.encode({**request.to_builtins(), "seq_id": number})


def _check_targets(targets: TensorData | None) -> None:
    if targets is None:
        return
    if not isinstance(targets, TensorData) or targets.dtype != "int64" or len(targets.shape or ()) != 2:
        raise InvalidTypeError(
            f"target_prompt_logprobs is {targets!r}; it must be an int64 TensorData of shape [len(prompt) - 1, K].",
            field="target_prompt_logprobs",
            value=targets,
        )


def _whole(response: SampleResponse) -> SampleResponse:
    return response


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    if response.prompt_logprobs is None:
        raise UnsupportedByServerError("The server returned no log-probabilities of the prompt.")
    return response.prompt_logprobs


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
