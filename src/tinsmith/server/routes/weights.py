"""Weights: saved, loaded, described, copied. Saving and loading are operations of a model and keep its order."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from starlette.responses import Response

from tinsmith.errors import InvalidInputError
from tinsmith.server import audit
from tinsmith.server.age import check_recipients
from tinsmith.server.checkpoints import check_name
from tinsmith.server.checks import check_base_model, check_optimizer, check_text, check_ttl, refuse, text_metadata
from tinsmith.server.messages import LoadJob
from tinsmith.server.routes._call import Call, Endpoint, reply, status_error
from tinsmith.server.routes._found import checkpoint_at, find_checkpoint, open_session
from tinsmith.server.routes._submit import (
    accept,
    acknowledged,
    number_field,
    numbered_body,
    operation,
    text_field,
)
from tinsmith.server.routes.models import accept_model
from tinsmith.server.routes.sessions import DEFAULT_PROJECT
from tinsmith.server.store import ids
from tinsmith.server.store.checkpoints import NoRoomError
from tinsmith.server.store.records import Checkpoint, CheckpointKey, Model, NewCheckpoint, NewJob, NewModel
from tinsmith.types import (
    AdamOptimizerConfig,
    CopyWeightsRequest,
    CopyWeightsResponse,
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UntypedAPIFuture,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinsmith.types._brief import brief
from tinsmith.wire import json

ACCESS_TOKEN_HEADER = "x-tinker-weights-access-token"

# --- saving ----------------------------------------------------------------------------------------------------------


async def save_weights(call: Call) -> Response:
    """Save weights and optimizer state under a name, so that training can go on from there."""
    return await operation(call, "save_weights", await numbered_body(call), SaveWeightsRequest, _check_save)


async def _check_save(call: Call, request: SaveWeightsRequest, model: Model) -> SaveWeightsRequest:
    if request.path is None:
        raise refuse("path", "is missing: give the checkpoint a name")
    check_name(request.path)
    check_ttl(request.ttl_seconds)
    text_metadata(request.user_metadata)
    await check_disk(call)
    return request


async def save_weights_for_sampler(call: Call) -> Response:
    """Save what a sampler needs: under a name, or for one sampling session that is opened along with it."""
    fields = await numbered_body(call)
    return await operation(call, "save_weights_for_sampler", fields, SaveWeightsForSamplerRequest, _check_sampler_save)


async def _check_sampler_save(
    call: Call, request: SaveWeightsForSamplerRequest, model: Model
) -> SaveWeightsForSamplerRequest:
    number = request.sampling_session_seq_id
    if request.kind == "inflight":
        _check_inflight(request)
    if request.path is not None:
        check_name(request.path)
        await check_disk(call)
    elif number is None or number < 0:
        raise refuse("path", "is missing: give a name, or a sampling_session_seq_id from 0 on")
    check_ttl(request.ttl_seconds)
    text_metadata(request.user_metadata)
    return request


def _check_inflight(request: SaveWeightsForSamplerRequest) -> None:
    if request.path is not None:
        raise refuse(
            "path",
            f'is {brief(request.path)}, but weights of kind "inflight" have no name; leave it out or save a "snapshot"',
            request.path,
        )
    if request.ttl_seconds is not None:
        raise refuse(
            "ttl_seconds",
            f'is {request.ttl_seconds}, but weights of kind "inflight" go when newer ones take their place; leave it '
            'out, or save a "snapshot"',
            request.ttl_seconds,
        )
    number = request.sampling_session_seq_id
    if number is None or number < 0:
        raise refuse("sampling_session_seq_id", 'is missing or negative; weights of kind "inflight" need one', number)


async def save_weights_external(call: Call) -> Response:
    """Save weights in the PEFT format, for other tools to read; encrypted, if public keys are given."""
    fields = await numbered_body(call)
    return await operation(call, "save_weights_external", fields, SaveWeightsExternalRequest, _check_export)


async def _check_export(call: Call, request: SaveWeightsExternalRequest, model: Model) -> SaveWeightsExternalRequest:
    check_name(request.path)
    check_ttl(request.ttl_seconds)
    if request.age_encryption_recipients:
        check_recipients(request.age_encryption_recipients)
    await check_disk(call)
    return request


async def check_disk(call: Call) -> None:
    """So that nobody waits in vain. How much a save needs is known when it is written, and checked then."""
    most = call.services.config.max_checkpoint_bytes
    if most is not None and (used := await call.stored(call.store.checkpoints.kept_bytes, call.owner)) >= most:
        raise NoRoomError(used, 0, most)


# --- loading ---------------------------------------------------------------------------------------------------------


async def load_weights(call: Call) -> Response:
    """Load a checkpoint into a model, or make a model of it."""
    fields = await numbered_body(call)
    if fields.get("model_id") is None:
        return await _create_from_weights(call, fields)
    return await operation(call, "load_weights", fields, LoadWeightsRequest, _check_load)


async def _check_load(call: Call, request: LoadWeightsRequest, model: Model) -> LoadWeightsRequest:
    checkpoint = await _loadable(call, request)
    if checkpoint.base_model != model.base_model:
        raise refuse("path", f"holds weights of {checkpoint.base_model!r}; this model is a {model.base_model!r}")
    theirs, ours = (msgspec.structs.replace(one.lora, seed=None) for one in (checkpoint, model))
    if theirs != ours:
        raise refuse("path", f"holds an adapter of another shape ({theirs}) than this model's ({ours})")
    return _load_job(call, request, checkpoint)


async def _create_from_weights(call: Call, fields: dict[str, Any]) -> Response:
    session = await open_session(call, text_field(fields, "session_id"))
    model_id = ids.model_id(session.session_id, number_field(fields, "model_seq_id", 0))
    job = NewJob(
        kind="load_weights",
        owner=call.owner,
        payload=b"",
        session_id=session.session_id,
        model_id=model_id,
        seq_id=0,
    )
    try:
        request = LoadWeightsRequest.from_builtins(fields)
        checkpoint = await _loadable(call, request)
        check_optimizer(request.optimizer_config or AdamOptimizerConfig())
        base_model = check_base_model(request.base_model or checkpoint.base_model, call.services.models).name
        if base_model != checkpoint.base_model:
            raise refuse("base_model", f"is {base_model!r}, but those weights belong to {checkpoint.base_model!r}")
        metadata = text_metadata(request.user_metadata)
    except InvalidInputError as refusal:
        return acknowledged(await accept(call, job, refusal))
    model = NewModel(
        model_id=model_id,
        owner=call.owner,
        base_model=base_model,
        lora=checkpoint.lora,
        optimizer_config=checkpoint.optimizer_config,
        session_id=session.session_id,
        user_metadata=metadata,
    )
    job = msgspec.structs.replace(job, base_model=base_model, payload=json.encode(_load_job(call, request, checkpoint)))
    return await accept_model(call, job, model)


async def _loadable(call: Call, request: LoadWeightsRequest) -> Checkpoint:
    key = CheckpointKey.of(request.path)
    call.named["source"] = key.tinker_path
    if key.kind != "weights":
        raise refuse("path", f"{request.path} cannot be trained on: load a checkpoint made with save_state")
    found = await find_checkpoint(call, key, request.weights_access_token)
    if found is None:
        raise InvalidInputError(f"There is no checkpoint {request.path}.", field="path", value=request.path)
    return found


def _load_job(call: Call, request: LoadWeightsRequest, checkpoint: Checkpoint) -> LoadJob:
    """Its token has served its purpose; credentials are not stored. Whose it was is: the checkpoint is read later."""
    needed_token = checkpoint.owner != call.owner and not checkpoint.public
    fields = {**msgspec.structs.asdict(request), "weights_access_token": None}
    return LoadJob(**fields, reader=checkpoint.owner if needed_token else None)


# --- looking and copying ---------------------------------------------------------------------------------------------


async def weights_info(call: Call) -> Response:
    """What must be known to make a model that a checkpoint can be loaded into."""
    request = await call.read(WeightsInfoRequest)
    checkpoint = await checkpoint_at(call, request.tinker_path)
    lora = checkpoint.lora
    return reply(
        WeightsInfoResponse(
            base_model=checkpoint.base_model,
            is_lora=True,
            lora_rank=lora.rank,
            train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
        )
    )


async def copy_weights(call: Call) -> Response:
    """Copy a checkpoint into a run of its own. The same idempotency key, or place in a session, means the same copy."""
    request = await call.read(CopyWeightsRequest)
    ttl_seconds = check_ttl(request.ttl_seconds)
    check_text("destination_project_id", request.destination_project_id)
    call.named["source"] = CheckpointKey.of(request.source_path).tinker_path
    token = request.weights_access_token or call.request.headers.get(ACCESS_TOKEN_HEADER)
    source = await checkpoint_at(call, request.source_path, token)
    run = await _copy_run(call, request, source)
    key = CheckpointKey(run_id=run.model_id, kind=source.key.kind, name=source.key.name)
    if await find_checkpoint(call, key) is None:
        await check_disk(call)
        call.services.paperwork.charge(call.owner, 0)
        await call.filed(_copy, call, source, run, key, ttl_seconds)
    return reply(CopyWeightsResponse(tinker_path=key.tinker_path))


async def _copy_run(call: Call, request: CopyWeightsRequest, source: Checkpoint) -> NewModel:
    """The run that holds the copy: in a session if one is named, else in a project."""
    run = NewModel(
        model_id=_copy_id(call),
        owner=call.owner,
        base_model=source.base_model,
        lora=source.lora,
        optimizer_config=source.optimizer_config,
        project_id=request.destination_project_id or DEFAULT_PROJECT,
        trainable=False,
    )
    if request.session_id is None:
        return run
    session = await open_session(call, request.session_id)
    model_id = ids.model_id(session.session_id, number_field(request.to_builtins(), "model_seq_id", 0))
    taken = await call.stored(call.store.models.get, model_id, call.owner)
    if taken is not None and taken.trainable:
        raise refuse("model_seq_id", f"is {request.model_seq_id}, which is a model in training; take another number")
    return msgspec.structs.replace(
        run, model_id=model_id, session_id=session.session_id, project_id=request.destination_project_id
    )


def _copy_id(call: Call) -> str:
    key = call.request.headers.get("x-idempotency-key") or secrets.token_hex()
    # As JSON, in which no other owner with another key makes the same text.
    return f"copy-{hashlib.sha256(json.encode([call.owner, key])).hexdigest()[:24]}"


def _copy(call: Call, source: Checkpoint, run: NewModel, key: CheckpointKey, ttl_seconds: int | None) -> None:
    path = source.key.tinker_path
    try:
        call.services.folders.copy(
            path, key.tinker_path, lambda size: _record_copy(call, source, run, key, size, ttl_seconds)
        )
    except FileNotFoundError:
        raise status_error(404, f"{path} was deleted, withdrawn or replaced before it was copied.") from None


def _record_copy(
    call: Call, source: Checkpoint, run: NewModel, key: CheckpointKey, size: int, ttl_seconds: int | None
) -> None:
    reader = call.owner if source.public else source.owner
    if not call.store.checkpoints.is_still(source, reader):
        raise FileNotFoundError  # some of the files may be of one checkpoint and some of its successor
    call.store.checkpoints.save(
        NewCheckpoint(
            key=key,
            owner=run.owner,
            base_model=run.base_model,
            lora=run.lora,
            optimizer_config=run.optimizer_config,
            size_bytes=size,
            request_id=key.run_id,
            user_metadata=source.user_metadata,
            expires=expiry(ttl_seconds),
        ),
        most_bytes=call.services.config.max_checkpoint_bytes,
        event=audit.done(call, "checkpoint_copy", key, source=source.key.tinker_path),
        run=run,
    )


def expiry(ttl_seconds: int | None) -> datetime | None:
    return None if ttl_seconds is None else datetime.now(UTC) + timedelta(seconds=ttl_seconds)


ENDPOINTS = (
    Endpoint("POST", "/api/v1/save_weights", save_weights, SaveWeightsRequest, UntypedAPIFuture),
    Endpoint(
        "POST",
        "/api/v1/save_weights_for_sampler",
        save_weights_for_sampler,
        SaveWeightsForSamplerRequest,
        UntypedAPIFuture,
    ),
    Endpoint(
        "POST", "/api/v1/save_weights_external", save_weights_external, SaveWeightsExternalRequest, UntypedAPIFuture
    ),
    Endpoint("POST", "/api/v1/load_weights", load_weights, LoadWeightsRequest, UntypedAPIFuture),
    Endpoint("POST", "/api/v1/weights_info", weights_info, WeightsInfoRequest, WeightsInfoResponse),
    Endpoint("POST", "/api/v1/copy_weights", copy_weights, CopyWeightsRequest, CopyWeightsResponse),
)
