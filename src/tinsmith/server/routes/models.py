"""Models in training: made, looked up, unloaded."""

from __future__ import annotations

import secrets

import msgspec
from starlette.responses import Response

from tinsmith.errors import InvalidInputError
from tinsmith.server.checks import check_base_model, check_lora, check_optimizer, text_metadata
from tinsmith.server.routes._call import Call, Endpoint, reply
from tinsmith.server.routes._found import model_named, open_session
from tinsmith.server.routes._submit import accept, acknowledged, number_field, numbered_body, text_field
from tinsmith.server.store import ids
from tinsmith.server.store.models import TooManyModelsError
from tinsmith.server.store.records import Lora, Model, NewJob, NewModel
from tinsmith.types import (
    AdamOptimizerConfig,
    CreateModelRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    ModelData,
    UnloadModelRequest,
    UntypedAPIFuture,
)
from tinsmith.wire import json


async def create_model(call: Call) -> Response:
    """Make a model: a new adapter on a base model. It is the operation number 0 of that model."""
    fields = await numbered_body(call)
    session = await open_session(call, text_field(fields, "session_id"))
    model_id = ids.model_id(session.session_id, number_field(fields, "model_seq_id", 0))
    job = NewJob(
        kind="create_model",
        owner=call.owner,
        payload=b"",
        session_id=session.session_id,
        model_id=model_id,
        seq_id=0,
    )
    try:
        request = _complete(CreateModelRequest.from_builtins(fields))
        check_base_model(request.base_model, call.services.models)
        check_optimizer(request.optimizer_config)
        model = _new_model(call, model_id, request)
    except InvalidInputError as refusal:
        return acknowledged(await accept(call, job, refusal))
    job = msgspec.structs.replace(job, base_model=request.base_model, payload=json.encode(request))
    return await accept_model(call, job, model)


class NoMoreModelsError(InvalidInputError):
    """Not an answer to come again: an owner's models become fewer in days, and no client waits for that."""

    limit = "models"

    def __init__(self, most: int, idle_seconds: int) -> None:
        super().__init__(
            f"No further model can be made: this owner has {most:,} already, as many as may be. Those of sessions that "
            f"have ended go when nobody has used them for {idle_seconds / 86400:.3g} days; whoever runs the server can "
            "allow more with --max-models.",
            field="base_model",
        )


async def accept_model(call: Call, job: NewJob, model: NewModel) -> Response:
    try:
        return acknowledged(await accept(call, job, model=model))
    except TooManyModelsError:
        config = call.services.config
        return acknowledged(await accept(call, job, NoMoreModelsError(config.max_models, config.idle_seconds)))


def _complete(request: CreateModelRequest) -> CreateModelRequest:
    """With every choice made: a model that is rebuilt after a crash must begin with the same weights."""
    lora = check_lora(request.lora_config)
    seed = secrets.randbits(62) if lora.seed is None else lora.seed
    return request.model_copy(update={"lora_config": lora.model_copy(update={"seed": seed})})


def _new_model(call: Call, model_id: str, request: CreateModelRequest) -> NewModel:
    return NewModel(
        model_id=model_id,
        owner=call.owner,
        base_model=request.base_model,
        lora=lora_record(request.lora_config),
        optimizer_config=request.optimizer_config.to_builtins(),
        session_id=request.session_id,
        user_metadata=text_metadata(request.user_metadata),
    )


def lora_record(config: LoraConfig | None) -> Lora:
    lora = check_lora(config)
    return Lora(
        rank=lora.rank,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


async def get_info(call: Call) -> Response:
    """What a model is, and which tokenizer goes with it."""
    request = await call.read(GetInfoRequest)
    return reply(_info(call, await model_named(call, request.model_id)))


def _info(call: Call, model: Model) -> GetInfoResponse:
    facts = call.services.models.get(model.base_model)
    return GetInfoResponse(
        type="get_info",
        model_id=model.model_id,
        model_data=ModelData(
            arch=facts.architecture if facts else None,
            model_name=model.base_model,
            tokenizer_id=facts.tokenizer_id if facts else None,
        ),
        optimizer_config=AdamOptimizerConfig(),
        is_lora=True,
        lora_rank=model.lora.rank,
        model_name=model.base_model,
    )


async def unload_model(call: Call) -> Response:
    """Take a model out of memory until it is used again. Only old clients do this, and they give it no number."""
    request = await call.read(UnloadModelRequest)
    model = await model_named(call, request.model_id)
    job = NewJob(
        kind="unload_model",
        owner=call.owner,
        payload=json.encode(request),
        session_id=model.session_id or "",
        base_model=model.base_model,
    )
    return acknowledged(await accept(call, job))


ENDPOINTS = (
    Endpoint("POST", "/api/v1/create_model", create_model, CreateModelRequest, UntypedAPIFuture),
    Endpoint("POST", "/api/v1/get_info", get_info, GetInfoRequest, GetInfoResponse),
    Endpoint("POST", "/api/v1/unload_model", unload_model, UnloadModelRequest, UntypedAPIFuture),
)
