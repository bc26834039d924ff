"""The service client: opens the session and makes the other clients."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tinsmith.client import futures, loss_graph
from tinsmith.client.checks import check_metadata, check_text, parse_checkpoint_path
from tinsmith.client.config import Config, check_config
from tinsmith.client.connection import Call, Connection
from tinsmith.client.console import session_url, sessions_url
from tinsmith.client.credentials import check_key
from tinsmith.client.download import ProgressCallback, download_files
from tinsmith.client.futures import APIFuture
from tinsmith.client.hooks import MODEL_CREATION
from tinsmith.client.polling import retrieve
from tinsmith.client.rest import RestClient, link_signer
from tinsmith.client.retry import RetryConfig
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.session import FinishStatus, Session
from tinsmith.client.training import LOAD_WEIGHTS, MadeModel, TrainingClient, json_result
from tinsmith.errors import InvalidInputError, TinkerError, UnsupportedByServerError
from tinsmith.types import (
    AdamOptimizerConfig,
    CreateCustomLossRequest,
    CreateCustomLossResponse,
    CreateModelRequest,
    CreateModelResponse,
    CustomLossInputRank,
    GetServerCapabilitiesResponse,
    LoadWeightsRequest,
    LoraConfig,
    OptimizerConfig,
    UntypedAPIFuture,
    WeightsInfoResponse,
)
from tinsmith.wire import json as wire_json

logger = logging.getLogger(__name__)

CREATE_MODEL = json_result("CreateModel", CreateModelResponse)
CREATE_CUSTOM_LOSS = json_result("CreateCustomLoss", CreateCustomLossResponse)
EXPORT_SECONDS = 3600
TO_BE_OPENED = ""
"""In place of the id of the session, which is opened when something is sent."""


class ServiceClient:
    """The way in. Nothing is sent before the first use; then a session is opened and kept alive until `close()`.

    As a context manager it finishes the session with the right reason when the block is left.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        config: Config | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            names = ", ".join(sorted(kwargs))
            warnings.warn(f"ServiceClient does not know {names}; ignored.", FutureWarning, stacklevel=2)
        if config is not None and (project_id or base_url or api_key or default_headers_overrides):
            raise InvalidInputError("A config was given together with settings it holds; put them into the config.")
        if config is None:
            config = Config.from_env(
                base_url=base_url, api_key=api_key, project_id=project_id, default_headers=default_headers_overrides
            )
        self._connection = Connection(check_config(config))
        self._session = Session(self._connection, user_metadata=user_metadata, display_name=display_name)
        self._traced_losses: set[str] = set()
        self._lock = threading.Lock()

    # Training clients. They can be used at once, before the server has made the model.

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """A new model: `base_model` with a fresh LoRA adapter."""
        check_text("base_model", base_model)
        if not (train_mlp or train_attn or train_unembed):
            raise InvalidInputError("Nothing would be trained: set one of train_mlp, train_attn, train_unembed.")
        lora = LoraConfig(rank=rank, seed=seed, train_unembed=train_unembed, train_mlp=train_mlp, train_attn=train_attn)
        request = CreateModelRequest(
            session_id=TO_BE_OPENED,
            model_seq_id=next(self._session.model_numbers),
            base_model=base_model,
            user_metadata=check_metadata(user_metadata),
            lora_config=lora,
            optimizer_config=optimizer or AdamOptimizerConfig(),
        )
        return TrainingClient(self._session, lambda: self._create_model(request))

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        return await self.create_lora_training_client(
            base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata, optimizer
        )

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """A new model with saved weights and a fresh optimizer."""
        return self._from_state(path, base_model, user_metadata, weights_access_token, optimizer, False)

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        return await self._from_state(path, base_model, user_metadata, weights_access_token, optimizer, False)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """A new model with saved weights and optimizer state: training goes on as if it had not stopped."""
        return self._from_state(path, base_model, user_metadata, weights_access_token, None, True)

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        return await self._from_state(path, base_model, user_metadata, weights_access_token, None, True)

    # Sampling clients. They too can be used at once.

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Samples from saved weights (`model_path`) or from a base model."""
        return SamplingClient.create(
            self._session,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        return await self.create_sampling_client(model_path, base_model, retry_config, record_stability_info)

    # Custom losses

    def create_custom_loss(
        self, fn: loss_graph.PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
    ) -> APIFuture[loss_graph.LossHandle]:
        """Traces `fn(logprobs, *inputs)`, a loss of one datum, for `TrainingClient.forward_backward_custom`.

        Where the server runs such losses it is uploaded; elsewhere it runs on this machine. The function must be
        made of torch, math and operator calls, and return a scalar and metrics named `custom/NAME:sum` or `:mean`.
        """
        traced = loss_graph.trace_loss(fn, input_ranks)
        return self._connection.run(lambda: self._register_loss(traced))

    # Weights

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Copies a checkpoint into this client's project and gives the new path."""
        return self.rest.copy_weights(path, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token)

    def download_checkpoint(
        self,
        path: str,
        folder: str | Path,
        on_progress: ProgressCallback | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Path]:
        """Fetches a checkpoint as files into a folder; called again after an interruption, it goes on.

        A training checkpoint is loaded into a new run and exported for the time of the download.
        """
        return self._download(path, Path(folder), on_progress).result(timeout)

    async def download_checkpoint_async(
        self,
        path: str,
        folder: str | Path,
        on_progress: ProgressCallback | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Path]:
        return await self._download(path, Path(folder), on_progress).result_async(timeout)

    # Information

    def get_server_capabilities(self, *, timeout: float | None = None) -> GetServerCapabilitiesResponse:
        """Which models can be trained and sampled. `RestClient` tells it, too, and needs no session for anything."""
        return self.rest.get_server_capabilities().result(timeout)

    async def get_server_capabilities_async(self, *, timeout: float | None = None) -> GetServerCapabilitiesResponse:
        return await self.rest.get_server_capabilities().result_async(timeout)

    def get_console_url(self) -> str:
        session_id = self._session.session_id
        return session_url(session_id) if session_id else sessions_url()

    @property
    def rest(self) -> RestClient:
        """A REST client on the same connection."""
        return RestClient(self._connection)

    def create_rest_client(self) -> RestClient:
        """Deprecated: use `RestClient()` or the property `rest`."""
        warnings.warn("create_rest_client() is deprecated; use RestClient().", FutureWarning, stacklevel=2)
        return self.rest

    @property
    def holder(self) -> Session:
        """Kept for old callers: the session, opened if it was not."""
        futures.run(self._session.open, self._connection.loop).result()
        return self._session

    def get_telemetry(self) -> None:
        """Kept for old callers; there is nothing to get."""

    # Closing

    def close(self, status: FinishStatus, detail: str | None = None) -> APIFuture[None]:
        """Finishes the session with a reason (the first one counts) and closes all clients made from this one.

        Futures that are not done then fail with `ClientClosedError`, as does every later call.
        """
        if status not in ("success", "errored", "interrupted"):
            raise InvalidInputError(
                f"status is {status!r}; it must be 'success', 'errored' or 'interrupted'.",
                field="status",
                value=status,
            )
        return futures.run(lambda: self._close(status, detail), self._connection.loop)

    def __enter__(self) -> Self:
        self._connection.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(_status(kind)).result()

    async def __aenter__(self) -> Self:
        self._connection.check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(_status(kind))

    def __repr__(self) -> str:
        return f"ServiceClient(base_url={self._connection.config.base_url!r}, session={self._session.session_id!r})"

    # How it is done

    async def _close(self, status: FinishStatus, detail: str | None) -> None:
        await self._connection.close(functools.partial(self._session.finish, status, detail))

    async def _create_model(self, request: CreateModelRequest) -> MadeModel:
        answer = await self._submit("/api/v1/create_model", request)
        created = await retrieve(self._connection, CREATE_MODEL, answer.request_id, subject=MODEL_CREATION)
        return MadeModel(created.model_id)

    def _from_state(
        self,
        path: str,
        base_model: str | None,
        user_metadata: Mapping[str, str] | None,
        token: str | None,
        optimizer: OptimizerConfig | None,
        with_optimizer: bool,
    ) -> TrainingClient:
        parse_checkpoint_path("path", path)
        token = None if token is None else check_key(token, "weights_access_token")
        number = next(self._session.model_numbers)
        in_one_request = LoadWeightsRequest(
            session_id=TO_BE_OPENED,
            model_seq_id=number,
            base_model=base_model,
            user_metadata=check_metadata(user_metadata),
            path=path,
            optimizer=with_optimizer,
            optimizer_config=optimizer,
            weights_access_token=token,
        )

        async def create() -> MadeModel:
            if (await self._connection.flags()).create_model_via_load_weights:
                await self._load(in_one_request)
                return MadeModel(f"{self._session.session_id}:train:{number}")
            info = await self._weights_info(path, token)
            family = info.optimizer_config if with_optimizer else optimizer or AdamOptimizerConfig()
            request = CreateModelRequest(
                session_id=TO_BE_OPENED,
                model_seq_id=number,
                base_model=base_model or info.base_model,
                user_metadata=in_one_request.user_metadata,
                lora_config=_lora_of(path, info),
                optimizer_config=family,
            )
            model_id, _ = await self._create_model(request)
            await self._load(
                LoadWeightsRequest(
                    model_id=model_id, seq_id=1, path=path, optimizer=with_optimizer, weights_access_token=token
                )
            )
            return MadeModel(model_id, num_operations=1)

        return TrainingClient(self._session, create)

    async def _load(self, request: LoadWeightsRequest) -> None:
        answer = await self._submit("/api/v1/load_weights", request)
        await retrieve(self._connection, LOAD_WEIGHTS, answer.request_id, subject=MODEL_CREATION)

    async def _weights_info(self, path: str, token: str | None) -> WeightsInfoResponse:
        """Asked with the other account's credential if one was given, for only that one may know."""
        connection = self._connection
        call = Call("POST", "/api/v1/weights_info", wire_json.encode({"tinker_path": path}))
        if token is None:
            return await connection.call_for(WeightsInfoResponse, call)
        other = Connection(
            msgspec.structs.replace(connection.config, api_key=token, credential_command=None, telemetry=False),
            connection.loop,
        )
        try:
            return await other.call_for(WeightsInfoResponse, call)
        finally:
            await other.close()

    async def _register_loss(self, traced: loss_graph.TracedLoss) -> loss_graph.LossHandle:
        handle = traced.in_session(await self._session.open())
        with self._lock:
            if handle.key in self._traced_losses:
                raise InvalidInputError(
                    f"The loss {handle.name!r} was created in this session already; keep and reuse its handle.",
                    field="fn",
                    value=handle.name,
                )
            self._traced_losses.add(handle.key)
        try:
            return await self._upload_loss(handle)
        except BaseException:
            self._traced_losses.discard(handle.key)
            raise

    async def _upload_loss(self, handle: loss_graph.LossHandle) -> loss_graph.LossHandle:
        if not (await self._connection.flags()).custom_loss_server_side:
            return handle
        request = CreateCustomLossRequest(
            session_id=handle.session_id,
            custom_loss_seq_id=next(self._session.loss_numbers),
            name=handle.name,
            inputs=list(handle.inputs),
            graph=handle.graph,
        )
        answer = await self._submit("/api/v1/create_custom_loss", request)
        created = await retrieve(self._connection, CREATE_CUSTOM_LOSS, answer.request_id, subject="Custom loss")
        return dataclasses.replace(handle, loss_id=created.loss_id)

    def _download(self, path: str, folder: Path, on_progress: ProgressCallback | None) -> APIFuture[list[Path]]:
        kind = parse_checkpoint_path("path", path).checkpoint_type
        if kind == "sampler":
            raise InvalidInputError(
                f"{path} holds sampler weights, which cannot be downloaded. Download a training checkpoint "
                "(.../weights/...) or an export (.../external_weights/...).",
                field="path",
                value=path,
            )
        if kind == "external":
            return self.rest.download_external_weights(path, folder, on_progress)
        return self._connection.run(lambda: self._export_and_download(path, folder, on_progress))

    async def _export_and_download(self, path: str, folder: Path, on_progress: ProgressCallback | None) -> list[Path]:
        client = self.create_training_client_from_state(path)
        exported = (await client.save_weights_external("download", ttl_seconds=EXPORT_SECONDS)).path
        try:
            # Every call makes an export of its own, and nobody promises that their bytes are equal.
            return await download_files(
                self._connection,
                link_signer(self._connection, exported),
                folder,
                label=path,
                on_progress=on_progress,
                keep_parts=False,
            )
        finally:
            await self._delete_export(exported)

    async def _delete_export(self, path: str) -> None:
        """It expires by itself, so a failure is worth a line and no more."""
        try:
            await self.rest.delete_checkpoint_from_tinker_path(path)
        except TinkerError as error:
            logger.warning("The export %s could not be deleted (%s); it expires in an hour.", path, error)

    async def _submit(self, path: str, request: Any) -> UntypedAPIFuture:
        if request.session_id == TO_BE_OPENED:
            request = request.model_copy(update={"session_id": await self._session.open()})
        return await self._connection.call_for(UntypedAPIFuture, Call("POST", path, wire_json.encode(request)))


def _status(kind: type[BaseException] | None) -> FinishStatus:
    if kind is None:
        return "success"
    return "errored" if issubclass(kind, Exception) else "interrupted"


def _lora_of(path: str, info: WeightsInfoResponse) -> LoraConfig:
    if not info.is_lora or info.lora_rank is None:
        raise UnsupportedByServerError(f"{path} holds no LoRA adapter, so no training client can be made from it.")
    return LoraConfig(
        rank=info.lora_rank,
        train_unembed=info.train_unembed is not False,
        train_mlp=info.train_mlp is not False,
        train_attn=info.train_attn is not False,
    )
