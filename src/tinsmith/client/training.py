"""The training client: one model being trained."""

from __future__ import annotations

import asyncio
import functools
import logging
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from tinsmith.client import chunks, custom_loss, loss_graph
from tinsmith.client.connection import Call, Connection
from tinsmith.client.console import training_run_url
from tinsmith.client.futures import APIFuture
from tinsmith.client.hooks import TRAINING
from tinsmith.client.making import InTheMaking, when_made
from tinsmith.client.metrics_log import MetricsLog
from tinsmith.client.polling import ResultKind, retrieve
from tinsmith.client.retry import RetryConfig
from tinsmith.client.samples import Opened
from tinsmith.client.sampling import SamplingClient, check_retry_config
from tinsmith.client.session import Session
from tinsmith.client.submissions import ForwardBackwardSubmission, JsonSubmission, LossConfig
from tinsmith.client.threads import run_coding, run_user_code
from tinsmith.client.training_checks import (
    Framework,
    check_custom_loss,
    check_loss_type_input,
    check_torch_is_installed,
    check_ttl,
    checked_data,
    checked_name,
    checked_recipients,
    warn_of_load_state,
)
from tinsmith.client.turns import Operation, Submission, TurnQueue
from tinsmith.errors import InvalidInputError, InvalidTypeError, UnsupportedByServerError
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    LossFnType,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
    ParsedCheckpointTinkerPath,
    SamplingClientKind,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    UnloadModelRequest,
    UnloadModelResponse,
    UntypedAPIFuture,
)
from tinsmith.types._model import Model
from tinsmith.types.training import check_loss_fn
from tinsmith.wire import json as wire_json
from tinsmith.wire import proto as wire_proto

if TYPE_CHECKING:
    from tinsmith.text.fast_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Model)

CustomLossFn = custom_loss.TorchLossFn | custom_loss.NumpyLossFn | loss_graph.LossHandle

TO_BE_NAMED = ""
"""In place of the id of a model that may not be there yet."""


def json_result(request_type: str, result_type: type[M]) -> ResultKind[M]:
    return ResultKind(request_type, functools.partial(wire_json.decode, result_type))


OPTIM_STEP = json_result("OptimStep", OptimStepResponse)
SAVE_WEIGHTS = json_result("SaveWeights", SaveWeightsResponse)
SAVE_WEIGHTS_FOR_SAMPLER = json_result("SaveWeightsForSampler", SaveWeightsForSamplerResponseInternal)
SAVE_WEIGHTS_EXTERNAL = json_result("SaveWeightsExternal", SaveWeightsExternalResponse)
LOAD_WEIGHTS = json_result("LoadWeights", LoadWeightsResponse)
UNLOAD_MODEL = json_result("UnloadModel", UnloadModelResponse)
FORWARD = json_result("Forward", ForwardBackwardOutput)._replace(
    from_protobuf=wire_proto.decode_forward_backward_output
)
FORWARD_BACKWARD = FORWARD._replace(request_type="ForwardBackward")


class MadeModel(NamedTuple):
    """What a server has made."""

    model_id: str
    num_operations: int = 0
    """How many it has had by then; they have taken the first numbers."""


class _Known(NamedTuple):
    """What is known of a model that is there, and does not change."""

    made: MadeModel
    info: GetInfoResponse


class TrainingClient(InTheMaking["TrainingClient", _Known]):
    """Made by `ServiceClient.create_lora_training_client()` and its relatives.

    It can be used at once. To wait until the server has made the model, or to learn why it has not, call `result()` or
    await the client.

    Operations run on the server in the order in which they are called here, whatever thread calls them, and each
    returns a future at once, so that the next one can be sent before the last one is done. Twins with `_async` return
    the same future from a coroutine.
    """

    def __init__(self, session: Session, make: Callable[[], Coroutine[Any, Any, MadeModel]]) -> None:
        connection = session.connection
        made = connection.run(lambda: _looked_up(connection, make))
        super().__init__(made, connection.loop)

        async def num_before() -> int:
            return (await when_made(made)).made.num_operations

        async def model_id() -> str:
            return (await when_made(made)).made.model_id

        self._session = session
        self._connection = connection
        self._turns = TurnQueue(connection, connection.config.max_inflight, num_before)
        self._metrics = MetricsLog(connection, model_id)

    @property
    def model_id(self) -> str:
        """The server's name for the model; waits until there is one."""
        return self._made.result().made.model_id

    # Forward and backward

    def forward(
        self, data: Sequence[Datum], loss_fn: LossFnType, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Computes the loss without gradients."""
        return self._turns.add(self._forward_backward(data, loss_fn, loss_fn_config, forward_only=True))

    async def forward_async(
        self, data: Sequence[Datum], loss_fn: LossFnType, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: LossFnType, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Computes the loss and adds its gradients to those accumulated since the last `optim_step`."""
        return self._turns.add(self._forward_backward(data, loss_fn, loss_fn_config, forward_only=False))

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: LossFnType, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLossFn,
        *,
        loss_type_input: str | None = None,
        framework: Framework = "torch",
    ) -> APIFuture[ForwardBackwardOutput]:
        """Trains on a loss of your own: a function, or a handle from `ServiceClient.create_custom_loss`.

        With `framework="torch"` the function takes the data and a list of log-probability tensors and returns a scalar
        tensor and metrics; its gradients come from autograd. With `framework="numpy"` it takes arrays and returns the
        loss, one gradient array per datum, and metrics. It runs in a thread of its own on this machine, between a
        forward and a backward pass; operations called later wait for it.
        """
        check_loss_type_input(loss_type_input)
        check_custom_loss(loss_fn, framework)
        data = checked_data(data)
        if isinstance(loss_fn, loss_graph.LossHandle):
            loss_graph.check_handle_data(loss_fn, data)
            self._check_handle_session(loss_fn)
            if loss_fn.loss_id is not None:
                return self.forward_backward(data, "custom", {"loss_id": loss_fn.loss_id})
            compute = functools.partial(loss_graph.handle_loss, loss_fn, data)
        elif framework == "numpy":
            compute = functools.partial(custom_loss.numpy_loss, loss_fn, data)  # type: ignore[arg-type]
        else:
            check_torch_is_installed()
            compute = functools.partial(custom_loss.torch_loss, loss_fn, data)  # type: ignore[arg-type]
        forward = self._forward_backward(custom_loss.forward_data(data), "cross_entropy", None, forward_only=True)
        return self._turns.add(self._custom_backward(data, forward.future, compute), after=forward)

    async def forward_backward_custom_async(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLossFn,
        *,
        loss_type_input: str | None = None,
        framework: Framework = "torch",
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward_custom(data, loss_fn, loss_type_input=loss_type_input, framework=framework)

    # The optimizer

    def optim_step(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """Updates the weights with the accumulated gradients and clears these."""
        if optim_params is not None and adam_params is not None:
            raise InvalidInputError("Both optim_params and adam_params were given; pass one of them.")
        params = optim_params if optim_params is not None else adam_params
        if params is None or not hasattr(params, "learning_rate"):
            raise InvalidTypeError(
                f"optim_step needs optimizer parameters such as AdamParams(learning_rate=1e-4), not {params!r}.",
                field="optim_params",
                value=params,
            )
        request = OptimStepRequest(optim_params=params, model_id=TO_BE_NAMED, seq_id=1)
        return self._operate("/api/v1/optim_step", request, OPTIM_STEP)

    async def optim_step_async(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        return self.optim_step(optim_params, adam_params=adam_params)

    # Saving and loading

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Saves weights and optimizer state, so that training can be resumed from here.

        Overwriting replaces the metadata as a whole. `ttl_seconds` is 3,600 to ten years; None never expires.
        """
        request = SaveWeightsRequest(
            model_id=TO_BE_NAMED,
            path=checked_name(name),
            seq_id=1,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=_dict(user_metadata),
        )
        check_ttl(request.ttl_seconds)
        return self._operate("/api/v1/save_weights", request, SAVE_WEIGHTS)

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        return self.save_state(name, ttl_seconds, overwrite, user_metadata)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Saves weights for sampling, without optimizer state."""
        request = SaveWeightsForSamplerRequest(
            model_id=TO_BE_NAMED,
            path=checked_name(name),
            seq_id=1,
            ttl_seconds=ttl_seconds,
            user_metadata=_dict(user_metadata),
        )
        check_ttl(request.ttl_seconds)
        return self._operate("/api/v1/save_weights_for_sampler", request, SAVE_WEIGHTS_FOR_SAMPLER, _public_save)

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        return self.save_weights_for_sampler(name, ttl_seconds, user_metadata)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: Sequence[str] | None = None
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Exports the weights as files for other tools, encrypted for up to ten `age` recipients if given."""
        request = SaveWeightsExternalRequest(
            model_id=TO_BE_NAMED,
            path=checked_name(name),
            seq_id=1,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=checked_recipients(age_encryption_recipients),
        )
        check_ttl(request.ttl_seconds)
        return self._operate("/api/v1/save_weights_external", request, SAVE_WEIGHTS_EXTERNAL)

    async def save_weights_external_async(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: Sequence[str] | None = None
    ) -> APIFuture[SaveWeightsExternalResponse]:
        return self.save_weights_external(name, ttl_seconds, age_encryption_recipients)

    def load_state(self, path: str, weights_access_token: str | None = None) -> APIFuture[LoadWeightsResponse]:
        """Deprecated: use `ServiceClient.create_training_client_from_state`."""
        warn_of_load_state("create_training_client_from_state")
        return self._load(path, weights_access_token, optimizer=False)

    async def load_state_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        warn_of_load_state("create_training_client_from_state")
        return self._load(path, weights_access_token, optimizer=False)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Deprecated: use `ServiceClient.create_training_client_from_state_with_optimizer`."""
        warn_of_load_state("create_training_client_from_state_with_optimizer")
        return self._load(path, weights_access_token, optimizer=True)

    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        warn_of_load_state("create_training_client_from_state_with_optimizer")
        return self._load(path, weights_access_token, optimizer=True)

    # Sampling

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: SamplingClientKind = "snapshot",
    ) -> SamplingClient:
        """A sampler of the present weights. `name` has no effect.

        Later training does not change it. With `kind="inflight"` it changes with the next call of that kind: all such
        samplers of a model have the weights of the latest one, as soon as these have reached the server's workers.
        """
        if name is not None:
            warnings.warn("name has no effect here; call it without.", FutureWarning, stacklevel=2)
        check_retry_config(retry_config)
        request = SaveWeightsForSamplerRequest(
            model_id=TO_BE_NAMED, sampling_session_seq_id=next(self._session.sampler_numbers), kind=kind, seq_id=1
        )
        saved: APIFuture[SaveWeightsForSamplerResponseInternal] = self._operate(
            "/api/v1/save_weights_for_sampler", request, SAVE_WEIGHTS_FOR_SAMPLER
        )

        async def opened() -> Opened:
            session_id = (await saved).sampling_session_id
            if session_id is None:
                raise UnsupportedByServerError("The server saved the weights but opened no sampling session for them.")
            return Opened(session_id, (await when_made(self._made)).info.model_data.model_name)

        return SamplingClient(
            self._session,
            self._connection.run(opened),
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            check_can_wait=self._turns.check_can_wait,
        )

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: SamplingClientKind = "snapshot",
    ) -> SamplingClient:
        return await self.save_weights_and_get_sampling_client(name, retry_config, record_stability_info, kind)

    def create_sampling_client(
        self, model_path: str, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A sampler of saved weights."""
        return SamplingClient.create(
            self._session,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    async def create_sampling_client_async(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        return await self.create_sampling_client(model_path, retry_config, record_stability_info)

    # Information

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> APIFuture[None]:
        """Numbers of your own, shown on the server's dashboard beside the loss and whatever else it knows itself.

        `step` is the optimizer step that they are about, by default the one that is next. Training does not wait for
        them, and nobody has to wait for the future; what is not finite is left out. On a server that takes no metrics
        this does nothing, and says so once in the log.
        """
        return self._metrics.log(metrics, step)

    async def log_metrics_async(self, metrics: Mapping[str, float], step: int | None = None) -> APIFuture[None]:
        return self.log_metrics(metrics, step)

    def get_info(self, *, timeout: float | None = None) -> GetInfoResponse:
        """The base model, the adapter and the optimizer; known once the client is ready."""
        return self._made.result(timeout).info

    async def get_info_async(self, *, timeout: float | None = None) -> GetInfoResponse:
        return (await self._connection.run(lambda: when_made(self._made)).result_async(timeout)).info

    def get_tokenizer(self, *, timeout: float | None = None) -> Tokenizer:
        """The tokenizer of the model, from a process-wide cache. It turns text into ids and applies no template."""
        return self._connection.run(self._get_tokenizer).result(timeout)

    async def get_tokenizer_async(self, *, timeout: float | None = None) -> Tokenizer:
        return await self._connection.run(self._get_tokenizer).result_async(timeout)

    def get_console_url(self) -> str:
        return training_run_url(self.model_id)

    def get_telemetry(self) -> None:
        """Kept for old callers; there is nothing to get."""

    def unload_model(self) -> APIFuture[UnloadModelResponse]:
        """Frees the model, after all operations called before, on servers that have this call. Checkpoints stay."""

        async def prepare() -> Sequence[Submission]:
            return []  # this request has no number

        return self._turns.add(Operation(prepare=prepare, collect=self._unload))

    async def unload_model_async(self) -> APIFuture[UnloadModelResponse]:
        return self.unload_model()

    def __copy__(self) -> NoReturn:
        _refuse_copy()

    def __deepcopy__(self, memo: object) -> NoReturn:
        _refuse_copy()

    def __reduce__(self) -> NoReturn:
        _refuse_copy()

    def __repr__(self) -> str:
        return f"TrainingClient({f'model_id={self.model_id!r}' if self._is_ready else 'not ready'})"

    # How operations are made

    def _operate(
        self,
        path: str,
        request: Any,
        kind: ResultKind[Any],
        transform: Callable[[Any], Any] = lambda result: result,
    ) -> APIFuture[Any]:
        """An operation that is one JSON request. The request was built by the caller, so bad input is raised there.

        Its model and its number are filled in when they are known.
        """

        async def prepare() -> Sequence[Submission]:
            return [JsonSubmission(self._connection, path, request.model_copy(update={"model_id": self.model_id}))]

        async def collect(answers: Sequence[UntypedAPIFuture]) -> Any:
            return transform(await self._retrieve(kind, answers[0]))

        return self._turns.add(Operation(prepare=prepare, collect=collect))

    def _forward_backward(
        self, data: Sequence[Datum], loss_fn: LossFnType, config: LossConfig | None, *, forward_only: bool
    ) -> Operation[ForwardBackwardOutput]:
        data = checked_data(data)
        check_loss_fn(loss_fn)
        costs = [chunks.byte_size(datum) for datum in data]

        async def prepare() -> Sequence[Submission]:
            return await self._encode(data, costs, loss_fn, config, forward_only=forward_only)

        kind = FORWARD if forward_only else FORWARD_BACKWARD
        return self._data_operation(prepare, kind, byte_cost=sum(costs))

    def _custom_backward(
        self,
        data: Sequence[Datum],
        forward: APIFuture[ForwardBackwardOutput],
        compute: Callable[[Sequence[custom_loss.FloatArray]], custom_loss.LossResult],
    ) -> Operation[ForwardBackwardOutput]:
        """The second half of a custom loss: it takes its place in line now, and its data once the loss is known."""
        computed: list[custom_loss.LossResult] = []

        def weigh(output: ForwardBackwardOutput) -> list[Datum]:
            with self._turns.user_code():
                computed.append(compute(custom_loss.logprobs_from(output, data)))
            return custom_loss.backward_data(data, computed[0].gradients)

        async def prepare() -> Sequence[Submission]:
            weighted = await run_user_code(weigh, await forward)
            costs = [chunks.byte_size(datum) for datum in weighted]
            return await self._encode(weighted, costs, "cross_entropy", None, forward_only=False)

        # It counts for no bytes: it would hold them while the loss is computed, which may wait for other operations.
        operation = self._data_operation(prepare, FORWARD_BACKWARD, byte_cost=0)
        operation.runs_user_code = True
        collect = operation.collect

        async def collect_with_metrics(answers: Sequence[UntypedAPIFuture]) -> ForwardBackwardOutput:
            return custom_loss.with_custom_metrics(await collect(answers), computed[0])

        operation.collect = collect_with_metrics
        return operation

    def _data_operation(
        self,
        prepare: Callable[[], Coroutine[Any, Any, Sequence[Submission]]],
        kind: ResultKind[ForwardBackwardOutput],
        byte_cost: int,
    ) -> Operation[ForwardBackwardOutput]:
        async def collect(answers: Sequence[UntypedAPIFuture]) -> ForwardBackwardOutput:
            return chunks.join(await _all(self._retrieve(kind, answer) for answer in answers))

        return Operation(prepare=prepare, collect=collect, byte_cost=byte_cost, in_parallel=self._sends_chunks_together)

    async def _encode(
        self,
        data: Sequence[Datum],
        costs: Sequence[int],
        loss_fn: LossFnType,
        config: LossConfig | None,
        *,
        forward_only: bool,
    ) -> Sequence[Submission]:
        flags = await self._connection.flags()
        runs = chunks.split(data, costs, flags.fwdbwd_max_chunk_len, flags.fwdbwd_max_chunk_bytes_count)
        submissions = [
            ForwardBackwardSubmission(
                self._connection, self.model_id, run, loss_fn, config, forward_only, flags.proto_compress_fwdbwd
            )
            for run in runs
        ]
        for submission in submissions:
            await run_coding(submission.encode)
        return submissions

    def _sends_chunks_together(self) -> bool:
        flags = self._connection.account.flags
        chosen = self._connection.config.parallel_chunks
        return chosen if chosen is not None else flags is None or flags.parallel_fwdbwd_chunks

    async def _retrieve(self, kind: ResultKind[T], answer: UntypedAPIFuture) -> T:
        return await retrieve(self._connection, kind, answer.request_id, subject=TRAINING)

    def _load(self, path: str, weights_access_token: str | None, *, optimizer: bool) -> APIFuture[LoadWeightsResponse]:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
        request = LoadWeightsRequest(
            model_id=TO_BE_NAMED, seq_id=1, path=path, optimizer=optimizer, weights_access_token=weights_access_token
        )
        return self._operate("/api/v1/load_weights", request, LOAD_WEIGHTS)

    async def _get_tokenizer(self) -> Tokenizer:
        from tinsmith.client.tokenizers import get_tokenizer, known_here

        model = (await when_made(self._made)).info.model_data
        name = model.model_name or model.tokenizer_id
        if name is None:
            raise UnsupportedByServerError(
                "The server names neither a model nor a tokenizer for this run; load a tokenizer yourself."
            )
        return await asyncio.to_thread(get_tokenizer, name, known_here(model.tokenizer_id))

    async def _unload(self, _: Sequence[UntypedAPIFuture]) -> UnloadModelResponse:
        body = wire_json.encode(UnloadModelRequest(model_id=self.model_id))
        answer = await self._connection.call_for(UntypedAPIFuture, Call("POST", "/api/v1/unload_model", body))
        return await self._retrieve(UNLOAD_MODEL, answer)

    def _check_handle_session(self, handle: loss_graph.LossHandle) -> None:
        if handle.session_id != self._session.session_id:
            raise InvalidInputError(
                f"The loss {handle.name!r} belongs to session {handle.session_id}, and this client to session "
                f"{self._session.session_id}. Create the loss with the ServiceClient that made this client.",
                field="loss_fn",
                value=handle.session_id,
            )


async def _looked_up(connection: Connection, make: Callable[[], Coroutine[Any, Any, MadeModel]]) -> _Known:
    made = await make()
    call = Call("POST", "/api/v1/get_info", wire_json.encode(GetInfoRequest(model_id=made.model_id)))
    known = _Known(made, await connection.call_for(GetInfoResponse, call))
    logger.info("Model %s is ready.", made.model_id)
    return known


def _public_save(result: SaveWeightsForSamplerResponseInternal) -> SaveWeightsForSamplerResponse:
    if result.path is None:
        raise UnsupportedByServerError("The server saved the weights but named no path for them.")
    return SaveWeightsForSamplerResponse(path=result.path)


def _dict(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if metadata is None else dict(metadata)


async def _all(coroutines: Any) -> list[Any]:
    """Awaits all of them; the first error ends the others too."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _refuse_copy() -> NoReturn:
    raise TypeError(
        "A TrainingClient cannot be copied or pickled: two copies would give the same number to different operations. "
        "Share the object between threads, or create another client from a saved state."
    )


BackcompatTrainingClientFuture = TrainingClient
"""The official package has a class of its own for a client that is not ready yet."""
