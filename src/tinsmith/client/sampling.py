"""The sampling client: samples and log-probabilities from one set of weights."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec

from tinsmith.client.checks import check_text
from tinsmith.client.config import Config
from tinsmith.client.connection import Call, Connection
from tinsmith.client.futures import APIFuture
from tinsmith.client.hooks import QueueStateChange
from tinsmith.client.making import InTheMaking, when_made
from tinsmith.client.retry import RetryConfig
from tinsmith.client.samples import Opened, SampleQueue
from tinsmith.client.session import Session, inherited_session
from tinsmith.client.transport import Traffic
from tinsmith.errors import (
    InvalidInputError,
    InvalidTypeError,
    UnsupportedByServerError,
)
from tinsmith.types import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    ModelInput,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from tinsmith.wire import json as wire_json

if TYPE_CHECKING:
    from tinsmith.text.fast_tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class SamplingClient(InTheMaking["SamplingClient", Opened]):
    """Made by `ServiceClient.create_sampling_client()` or `TrainingClient.save_weights_and_get_sampling_client()`.

    It can be used at once. To wait until the server has the weights, or to learn why it has not, call `result()` or
    await the client.

    It may be pickled and copied: a copy samples the same weights under numbers of its own, with the credentials of
    the process it is in. The limits on submissions are shared by all sampling clients of one server and key.
    """

    def __init__(
        self,
        session: Session,
        opened: APIFuture[Opened],
        *,
        shadow: bool = False,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        check_can_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_can_wait` raises where it would be in vain to wait for it to be opened."""
        super().__init__(opened, session.connection.loop)
        self._session = session
        self._connection = session.connection
        self._record_stability_info = record_stability_info
        self._queue = SampleQueue(session, opened, retry_config, shadow=shadow, check_can_wait=check_can_wait)

    @property
    def sampling_session_id(self) -> str:
        """The server's name for this sampler; waits until there is one."""
        return self._made.result().sampling_session_id

    @staticmethod
    def create(
        session: Session,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
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
        check_retry_config(retry_config)
        number = next(session.sampler_numbers)
        connection = session.connection

        async def open_session() -> Opened:
            session_id = await session.open()
            request = CreateSamplingSessionRequest(
                session_id=session_id, sampling_session_seq_id=number, model_path=model_path, base_model=base_model
            )
            opened = sampling_session_id or await _create_sampling_session(connection, request)
            return Opened(opened, base_model or (await _look_up(connection, opened)).base_model)

        return SamplingClient(
            session,
            connection.run(open_session),
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

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
        self._queue.take_slot()
        return self._queue.add(request, _whole)

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
        await self._queue.take_slot_async()
        return await self._queue.add(request, _whole)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The log-probability of every prompt token; None for the first, and for those not asked for."""
        request = self._logprobs_request(prompt, prompt_logprobs_last_n)
        self._queue.take_slot()
        return self._queue.add(request, _prompt_logprobs)

    async def compute_logprobs_async(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        request = self._logprobs_request(prompt, prompt_logprobs_last_n)
        await self._queue.take_slot_async()
        return await self._queue.add(request, _prompt_logprobs)

    # Information

    def get_base_model(self, *, timeout: float | None = None) -> str:
        """Known once the client is ready."""
        if self._made.done() and (known := self._made.result().base_model):
            return known
        return self._connection.run(self._get_base_model).result(timeout)

    async def get_base_model_async(self, *, timeout: float | None = None) -> str:
        return await self._connection.run(self._get_base_model).result_async(timeout)

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
        return base64.urlsafe_b64encode(msgspec.json.encode(self._handle())).decode()

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
        return _from_state, (self._handle(),)

    def __deepcopy__(self, memo: object) -> SamplingClient:
        return self.__copy__()

    def __copy__(self) -> SamplingClient:
        return SamplingClient(
            self._session,
            self._made,
            shadow=True,
            retry_config=self._queue.retry_config,
            record_stability_info=self._record_stability_info,
        )

    def __repr__(self) -> str:
        return (
            f"SamplingClient({f'sampling_session_id={self.sampling_session_id!r}' if self._is_ready else 'not ready'})"
        )

    def _handle(self) -> _SamplerState:
        opened = self._made.result()  # then the session is open, too
        return _SamplerState(
            base_url=self._connection.config.base_url,
            session_id=self._session.session_id or "",
            sampling_session_id=opened.sampling_session_id,
            base_model=opened.base_model,
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

    async def _get_base_model(self) -> str:
        opened = await when_made(self._made)
        return opened.base_model or (await _look_up(self._connection, opened.sampling_session_id)).base_model

    async def _get_tokenizer(self) -> Tokenizer:
        from tinsmith.client.tokenizers import get_tokenizer, known_here

        sampler = await _look_up(self._connection, (await when_made(self._made)).sampling_session_id)
        # Only our own server says which tokenizer it is.
        return await asyncio.to_thread(get_tokenizer, sampler.base_model, known_here(sampler.extra.get("tokenizer_id")))


class _SamplerState(msgspec.Struct, frozen=True):
    """What a copy in another process needs to know. No credential."""

    base_url: str
    session_id: Annotated[str, msgspec.Meta(min_length=1)]
    sampling_session_id: Annotated[str, msgspec.Meta(min_length=1)]
    base_model: str | None = None
    record_stability_info: bool = False


async def _create_sampling_session(connection: Connection, request: CreateSamplingSessionRequest) -> str:
    call = Call("POST", "/api/v1/create_sampling_session", wire_json.encode(request), Traffic.SESSION)
    return (await connection.call_for(CreateSamplingSessionResponse, call)).sampling_session_id


async def _look_up(connection: Connection, sampling_session_id: str) -> GetSamplerResponse:
    call = Call("GET", f"/api/v1/samplers/{quote(sampling_session_id, safe=':')}", traffic=Traffic.REST)
    return await connection.call_for(GetSamplerResponse, call)


def _from_state(state: _SamplerState, api_key: str | None = None) -> SamplingClient:
    opened: APIFuture[Opened] = APIFuture()
    opened.resolve(Opened(state.sampling_session_id, state.base_model))
    return SamplingClient(
        inherited_session(Config.from_env(base_url=state.base_url, api_key=api_key), state.session_id),
        opened,
        shadow=True,
        record_stability_info=state.record_stability_info,
    )


def check_retry_config(config: RetryConfig | None) -> None:
    if config is not None and not isinstance(config, RetryConfig):
        raise InvalidTypeError(
            f"retry_config is {config!r}; it must be a RetryConfig.", field="retry_config", value=config
        )


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


BackcompatSamplingClientFuture = SamplingClient
"""The official package has a class of its own for a client that is not ready yet."""
