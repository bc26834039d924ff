"""The sampling client: samples and log-probabilities from one set of weights.

Who retries what: the HTTP layer does not repeat `asample`. A sample that the server turns away with 429 goes back to
the head of its line, and the whole account holds back for as long as the server says; other failures of a submission
are repeated under the same number after a pause. A sample whose result is lost at the server is submitted anew.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import itertools
import logging
import random
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tinsmith.client import futures
from tinsmith.client.batch_poller import BatchPoller
from tinsmith.client.chunks import input_bytes
from tinsmith.client.config import Config
from tinsmith.client.connection import Call, Connection, closed_error
from tinsmith.client.futures import APIFuture
from tinsmith.client.hooks import Backoff
from tinsmith.client.limits import SampleLane, refuse_pending
from tinsmith.client.polling import LARGE_BODY_BYTES, ResultKind, retrieve
from tinsmith.client.retry import Action, Retry, RetryConfig, classify
from tinsmith.client.session import Session
from tinsmith.client.transport import Traffic
from tinsmith.errors import (
    APIResponseValidationError,
    InvalidInputError,
    InvalidTypeError,
    RateLimitError,
    RequestFailedError,
    ResponseSummary,
    TinkerError,
    UnsupportedByServerError,
    WouldDeadlockError,
)
from tinsmith.types import (
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
CANCEL_TIMEOUT_SECONDS = 30.0

SAMPLE = ResultKind(
    "Sample", functools.partial(wire_json.decode, SampleResponse), wire_proto.decode_sample_response
)


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
        self.sampling_session_id = sampling_session_id
        self._session = session
        self._connection = session.connection
        self._retry_config = retry_config or RetryConfig()
        self._record_stability_info = record_stability_info
        self._lane = SampleLane(self._retry_config.max_connections)
        self._is_copy = shadow
        self._numbers: itertools.count[int] | None = None if shadow else itertools.count()
        self._numbering = asyncio.Lock()
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
        if model_path is not None and not model_path.startswith("tinker://"):
            raise InvalidInputError(
                f"model_path is {model_path!r}; it must start with 'tinker://'. For a base model, pass base_model.",
                field="model_path",
                value=model_path,
            )
        number = None if sampling_session_id else next(session.sampler_numbers)

        async def open_session() -> SamplingClient:
            opened = sampling_session_id or await _open_sampling_session(session, number or 0, model_path, base_model)
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

    def get_base_model(self) -> str:
        return self._connection.run(self._get_sampler).result().base_model

    async def get_base_model_async(self) -> str:
        return (await self._connection.run(self._get_sampler)).base_model

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the base model, from a process-wide cache."""
        return self._connection.run(self._get_tokenizer).result()

    async def get_tokenizer_async(self) -> Tokenizer:
        return await self._connection.run(self._get_tokenizer)

    def get_telemetry(self) -> None:
        """Kept for old callers; there is nothing to get."""

    # Copies

    def get_sampler_handle(self) -> str:
        """A text from which another process can make a client of the same sampler. It holds no credentials."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self._state())).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """The client for a handle, with this process's credentials."""
        try:
            state = msgspec.json.decode(base64.urlsafe_b64decode(handle), type=dict[str, Any])
            return _from_state(state, api_key)
        except (binascii.Error, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, TinkerError):
                raise
            raise InvalidInputError(
                f"This is no sampler handle ({error}). Pass the text that get_sampler_handle() returned, unchanged.",
                field="handle",
                value=handle,
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_state, (self._state(),)

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

    def _state(self) -> dict[str, Any]:
        return {
            "base_url": self._connection.config.base_url,
            "session_id": self._session.session_id,
            "sampling_session_id": self.sampling_session_id,
            "record_stability_info": self._record_stability_info,
        }

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
        pending.take(config.max_pending)

    async def _take_slot_async(self) -> None:
        self._connection.check_open()
        config, pending = self._connection.config, self._connection.account.pending
        if not pending.try_take(config.max_pending):
            if config.when_full == "error":
                raise refuse_pending(config.max_pending)
            await asyncio.to_thread(pending.take, config.max_pending)

    def _enqueue(self, request: SampleRequest, transform: Callable[[SampleResponse], T]) -> APIFuture[T]:
        sample = _Sample(self, request, transform)
        self._connection.loop.post(self._line_up, sample)
        return sample.future

    def _line_up(self, sample: _Sample) -> None:
        self._lane.add(sample)
        self._connection.account.sample_gate.ready(self._lane)

    def _give_up(self) -> None:
        """The client is closed: nothing that waits will ever be sent."""
        for sample in self._lane.empty():
            assert isinstance(sample, _Sample)
            sample.abandon(closed_error())
        for sample, timer in self._resting.items():
            timer.cancel()
            sample.abandon(closed_error())
        self._resting.clear()

    async def _next_number(self) -> int:
        if self._numbers is None:
            async with self._numbering:
                if self._numbers is None:
                    self._numbers = itertools.count(NUMBERS_PER_CLONE * await self._clone_number())
        return next(self._numbers)

    async def _clone_number(self) -> int:
        """Keeps the numbers of copies apart: the server gives one out, or chance does."""
        if not (await self._connection.flags()).sample_join_sampling_session:
            return random.randint(1, NUMBERS_PER_CLONE)
        body = wire_json.encode(JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id))
        call = Call("POST", "/api/v1/join_sampling_session", body, Traffic.SESSION)
        return (await self._connection.call_for(JoinSamplingSessionResponse, call)).client_counter

    def _poller_for(self, number: int) -> BatchPoller:
        if self._poller is None:
            self._poller = BatchPoller(self._connection, self.sampling_session_id, number // NUMBERS_PER_CLONE)
        return self._poller

    def _apply_flags(self) -> None:
        """The server's limit on unfinished samples, which is known once its flags are."""
        flags = self._connection.account.flags
        assert flags is not None
        asked = self._retry_config.max_connections
        if flags.sample_use_retrieve_futures:
            self._lane.max_unfinished = None
        elif asked is None or asked > flags.sample_max_concurrent_requests:
            if self._lane.max_unfinished == asked and asked != RetryConfig().max_connections:
                logger.info(
                    "max_connections is %s; the server allows %d.", asked, flags.sample_max_concurrent_requests
                )
            self._lane.max_unfinished = flags.sample_max_concurrent_requests

    def _may_resubmit(self) -> bool:
        flags = self._connection.account.flags
        return self._retry_config.enable_retry_logic and not (flags is not None and flags.sample_no_retries)

    async def _get_sampler(self) -> GetSamplerResponse:
        call = Call("GET", f"/api/v1/samplers/{self.sampling_session_id}")
        return await self._connection.call_for(GetSamplerResponse, call)

    async def _get_tokenizer(self) -> Tokenizer:
        from tinsmith.client.tokenizers import get_tokenizer

        sampler = await self._get_sampler()
        return await asyncio.to_thread(get_tokenizer, sampler.base_model)


class _Sample:
    """One call of `sample()`, from the queue to its result. Kept small: thousands of these may wait."""

    __slots__ = (
        "byte_cost",
        "client",
        "future",
        "number",
        "request",
        "request_id",
        "retry",
        "task",
        "transform",
        "was_redone",
    )

    def __init__(
        self, client: SamplingClient, request: SampleRequest, transform: Callable[[SampleResponse], Any]
    ) -> None:
        self.client = client
        self.request = request
        self.transform = transform
        self.future: APIFuture[Any] = APIFuture(on_cancel=self._cancelled)
        self.byte_cost = self._estimate()
        self.number: int | None = None
        self.request_id: str | None = None
        self.retry: Retry | None = None
        self.task: asyncio.Task[None] | None = None
        self.was_redone = False

    def _estimate(self) -> int:
        return input_bytes(self.request.prompt, BYTES_PER_TOKEN)

    # As the gate sees it

    def is_abandoned(self) -> bool:
        return self.future.cancelled()

    def submit(self) -> None:
        self.task = self.client._connection.loop.start_task(self._run())

    # On the loop

    async def _run(self) -> None:
        connection = self.client._connection
        try:
            answer = await self._until_submitted(connection)
            result = await connection.guard(self._collect(answer), report=False)
            result = self.transform(result)
        except asyncio.CancelledError:
            self._finish(error=CancelledError())
            raise
        except Exception as error:  # noqa: BLE001 - it is retried or reaches the future
            self._failed(error)
        else:
            self._finish(result)

    async def _until_submitted(self, connection: Connection) -> UntypedAPIFuture:
        try:
            return await connection.guard(self._submit(connection), report=False)
        finally:
            connection.account.sample_gate.submitted(self.byte_cost)
            self.byte_cost = self._estimate()

    async def _submit(self, connection: Connection) -> UntypedAPIFuture:
        await connection.flags()
        self.client._apply_flags()
        if self.number is None:
            self.number = await self.client._next_number()
        encode = functools.partial(_encode, self.request, self.number)
        large = self.byte_cost > LARGE_BODY_BYTES
        call = Call(
            "POST",
            "/api/v1/asample",
            await asyncio.to_thread(encode) if large else encode(),
            Traffic.SAMPLE,
            headers={"X-Tinker-Sampling-Backpressure": "1"},
            retries=False,
        )
        answer = await connection.call_for(UntypedAPIFuture, call)
        self.request_id = self.future.request_id = answer.request_id
        return answer

    async def _collect(self, answer: UntypedAPIFuture) -> SampleResponse:
        client, connection = self.client, self.client._connection
        assert connection.account.flags is not None and self.number is not None
        poller = client._poller_for(self.number) if connection.account.flags.sample_use_retrieve_futures else None
        size = await poller.wait(answer.request_id) if poller else None
        try:
            result = await retrieve(
                connection, SAMPLE, answer.request_id, subject=client.sampling_session_id, payload_size=size
            )
        finally:
            if poller:
                poller.fetched(answer.request_id)
        _check_answered(self.request, result)
        return _with_sequence_ids(result, answer.sample_sequence_ids)

    def _failed(self, error: Exception) -> None:
        """Goes back into the line, or gives up."""
        client, connection = self.client, self.client._connection
        try:
            pause = self._pause_after(error)
        except Exception as final:  # noqa: BLE001 - it reaches the future
            connection.report(error)
            self._finish(error=final)
            return
        if isinstance(error, RateLimitError):
            # The gate keeps everyone waiting; this one only has to be first when it opens.
            connection.account.sample_gate.back_off(pause)
            connection.hooks.emit(Backoff("sampling", pause, error.status_code))
            self._line_up_again()
        else:
            connection.tell_pause(error, pause)
            client._resting[self] = connection.loop.asyncio_loop.call_later(pause, self._line_up_again)

    def _pause_after(self, error: Exception) -> float:
        client, connection = self.client, self.client._connection
        if self.retry is None:
            self.retry = Retry(client._retry_config.policy(connection.retry_policy().billing_pause_limit))
        self.retry.others_progressed(connection.last_progress)
        if isinstance(error, RateLimitError):
            large = self.byte_cost > LARGE_PROMPT_BYTES
            return self.retry.pause_after(error, LARGE_PROMPT_BACKOFF_SECONDS if large else BACKOFF_SECONDS)
        if not client._may_resubmit():
            raise error
        if classify(error).action is not Action.REDO:
            return self.retry.pause_after(error)
        if isinstance(error, RequestFailedError):
            if self.was_redone:
                raise error
            self.was_redone = True
        self.number = self.request_id = None
        return self.retry.policy.delay(0)

    def _line_up_again(self) -> None:
        client = self.client
        client._resting.pop(self, None)
        if self.future.cancelled():
            self._finish(error=CancelledError())
            return
        self.task = None
        client._lane.add_first(self)
        client._connection.account.sample_gate.ready(client._lane)

    def _finish(self, result: Any = None, error: BaseException | None = None) -> None:
        client = self.client
        if error is None:
            self.future.resolve(result)
        else:
            self.future.fail(error)
        client._lane.finished()
        client._connection.account.pending.give_back()
        client._connection.account.sample_gate.ready(client._lane)

    def abandon(self, error: Exception) -> None:
        """Ends one that waits."""
        self.future.fail(error)
        self.client._connection.account.pending.give_back()

    # On the thread that cancels

    def _cancelled(self) -> None:
        self.client._connection.loop.post(self._stop)

    def _stop(self) -> None:
        connection = self.client._connection
        if self.task is None:
            connection.account.pending.give_back()  # it waits in line, where it will be passed over
        elif not self.task.done():
            connection.loop.cancel_soon(self.task)
        if self.request_id is not None and connection.account.dynamic_flags.sample_cancel_enabled:
            connection.loop.start_task(_cancel_on_server(connection, self.request_id))


async def _cancel_on_server(connection: Connection, request_id: str) -> None:
    body = wire_json.encode({"request_id": request_id})
    call = Call(
        "POST", "/api/v1/cancel_future", body, Traffic.POLL, timeout=CANCEL_TIMEOUT_SECONDS, retries=False
    )
    try:
        async with connection.account.cancellations:
            await connection.guard(connection.call(call), report=False)
    except TinkerError as error:
        logger.debug("The server was not told that sample %s is no longer wanted: %s", request_id, error)


async def _open_sampling_session(
    session: Session, number: int, model_path: str | None, base_model: str | None
) -> str:
    request = CreateSamplingSessionRequest(
        session_id=await session.open(), sampling_session_seq_id=number, model_path=model_path, base_model=base_model
    )
    call = Call("POST", "/api/v1/create_sampling_session", wire_json.encode(request), Traffic.SESSION)
    return (await session.connection.call_for(CreateSamplingSessionResponse, call)).sampling_session_id


def _from_state(state: dict[str, Any], api_key: str | None = None) -> SamplingClient:
    connection = Connection(Config.from_env(base_url=state["base_url"], api_key=api_key))
    session = Session(connection, session_id=state["session_id"])
    futures.run(session.open, connection.loop)
    return SamplingClient(
        session,
        sampling_session_id=state["sampling_session_id"],
        shadow=True,
        record_stability_info=state["record_stability_info"],
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
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and response.prompt_logprobs is not None:
        scored = response.prompt_logprobs[: len(response.prompt_logprobs) - last_n]
        if any(value is not None for value in scored):
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
