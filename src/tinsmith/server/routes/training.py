"""Training: forward and backward passes, optimizer steps, custom losses."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from starlette.responses import Response

from tinsmith.errors import APIStatusError, InvalidInputError
from tinsmith.server.checks import CustomInput, check_custom_loss, check_step, check_training, refuse
from tinsmith.server.routes._broken import meant_by
from tinsmith.server.routes._call import (
    JSON,
    PROTOBUF,
    Call,
    Endpoint,
    TooLargeError,
    forget_way,
    parse_json,
    status_error,
)
from tinsmith.server.routes._found import model_named, open_session
from tinsmith.server.routes._submit import (
    accept,
    acknowledged,
    job_for,
    number_field,
    numbered_body,
    object_in,
    operation,
    settle,
    text_field,
    trainable,
)
from tinsmith.server.store.records import Done, Model, NewJob, NewLoss
from tinsmith.types import (
    CreateCustomLossRequest,
    CreateCustomLossResponse,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    UntypedAPIFuture,
)
from tinsmith.wire import json, proto

# --- forward and backward --------------------------------------------------------------------------------------------


class Arrived(NamedTuple):
    """A training request: which operation it is, and its content or what is wrong with it."""

    model_id: str
    seq_id: int
    content: ForwardBackwardInput | InvalidInputError
    payload: bytes
    """The protobuf form, for the worker."""


async def forward_backward(call: Call) -> Response:
    """Add the gradients of a loss on some examples to the model's; protobuf, or JSON from old clients."""
    config = call.services.config
    if call.expect_type(PROTOBUF, JSON) == JSON:
        body = await call.json_body(config.max_json_bytes)
        return await _train(call, await call.decoded(_from_json, body))
    try:
        body = await call.body(config.max_body_bytes, config.max_decompressed_bytes)
    except TooLargeError as error:
        return await _train(call, _unreadable(await call.beginning(error), error))
    return await _train(call, await call.decoded(_from_protobuf, body))


async def forward(call: Call) -> Response:
    """The same without gradients. New clients send `forward_backward` with `forward_only` instead."""
    body = await call.json_body(call.services.config.max_json_bytes)
    return await _train(call, await call.decoded(_from_forward_json, body))


async def _train(call: Call, arrived: Arrived) -> Response:
    model = await model_named(call, arrived.model_id)
    job = job_for(call, "forward_backward", model, arrived.seq_id)
    try:
        tokens = await _check(call, arrived, model)
    except InvalidInputError as refusal:
        return acknowledged(await accept(call, job, refusal))
    return acknowledged(await accept(call, msgspec.structs.replace(job, payload=arrived.payload, size=tokens)))


async def _check(call: Call, arrived: Arrived, model: Model) -> int:
    """The number of tokens."""
    facts, examples = trainable(call, model), arrived.content
    if isinstance(examples, InvalidInputError):
        raise examples
    custom = await _custom_inputs(call, examples) if examples.loss_fn == "custom" else None
    return await call.worked(len(arrived.payload), lambda: check_training(examples, facts, custom))


async def _custom_inputs(call: Call, examples: ForwardBackwardInput) -> list[CustomInput]:
    loss_id = (examples.loss_fn_config or {}).get("loss_id")
    if not isinstance(loss_id, str):
        raise refuse("loss_fn_config['loss_id']", "is missing: it names the custom loss", loss_id)
    loss = await call.stored(call.store.losses.get, loss_id, call.owner)
    if loss is None:
        raise refuse("loss_fn_config['loss_id']", f"is {loss_id!r}, which is no custom loss of yours", loss_id)
    definition = json.decode(CreateCustomLossRequest, loss.definition)
    return [CustomInput(one.name, one.rank) for one in definition.inputs]


def _from_protobuf(body: bytes) -> Arrived:
    try:
        request = proto.decode_forward_backward_request(body)
    except InvalidInputError as error:
        return _wrong(body, error)
    return Arrived(request.model_id, request.seq_id, request.input, body)


def _wrong(body: bytes, error: InvalidInputError) -> Arrived:
    """A request that cannot be carried out may still say which operation it was meant to be."""
    try:
        model_id, seq_id = proto.decode_forward_backward_ids(body)
    except InvalidInputError:
        return _unreadable(body, status_error(400, error.message))
    if not model_id or seq_id < 1:
        raise status_error(422, error.message)
    return Arrived(model_id, seq_id, forget_way(error), b"")


def _unreadable(beginning: bytes, error: APIStatusError) -> Arrived:
    meant = meant_by(beginning)
    if meant is None:
        raise error
    return Arrived(*meant, InvalidInputError(error.message), b"")


def _from_json(body: bytes) -> Arrived:
    return _from_fields(body, ForwardBackwardRequest)


def _from_forward_json(body: bytes) -> Arrived:
    return _from_fields(body, ForwardRequest)


def _from_fields(body: bytes, cls: type[ForwardBackwardRequest] | type[ForwardRequest]) -> Arrived:
    fields = object_in(parse_json(body))
    model_id, seq_id = text_field(fields, "model_id"), number_field(fields, "seq_id", 1, 2**31 - 1)
    try:
        request = cls.from_builtins(fields)
        forward_only = isinstance(request, ForwardRequest)
        examples = request.forward_input if isinstance(request, ForwardRequest) else request.forward_backward_input
        prepared = proto.prepare_forward_backward(
            examples.data, examples.loss_fn, examples.loss_fn_config, forward_only=forward_only
        )
    except InvalidInputError as error:
        return Arrived(model_id, seq_id, forget_way(error), b"")
    return Arrived(model_id, seq_id, examples, prepared.finish(model_id, seq_id))


# --- the rest --------------------------------------------------------------------------------------------------------


async def optim_step(call: Call) -> Response:
    """Move the weights by the gradients gathered so far."""
    return await operation(call, "optim_step", await numbered_body(call), OptimStepRequest, _check_optim_step)


async def _check_optim_step(call: Call, request: OptimStepRequest, model: Model) -> OptimStepRequest:
    check_step(request.optim_params)
    return request


async def create_custom_loss(call: Call) -> Response:
    """Upload a loss as a graph of operations. The engine knows which operations are allowed."""
    fields = await numbered_body(call)
    session = await open_session(call, text_field(fields, "session_id"))
    number = number_field(fields, "custom_loss_seq_id", 0)
    job = NewJob(kind="create_custom_loss", owner=call.owner, payload=b"", session_id=session.session_id, seq_id=number)
    try:
        request = CreateCustomLossRequest.from_builtins(fields)
        check_custom_loss(request)
    except InvalidInputError as refusal:
        return acknowledged(await accept(call, job, refusal))
    definition = json.encode(request)
    call.services.paperwork.charge(call.owner, len(definition))
    loss = await call.stored(
        call.store.losses.create,
        NewLoss(
            session_id=session.session_id,
            custom_loss_seq_id=number,
            owner=call.owner,
            name=request.name,
            definition=definition,
        ),
    )
    result = json.encode(CreateCustomLossResponse(loss_id=loss.loss_id))
    return acknowledged(await settle(call, job, Done(result=result, content_type=JSON)))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/api/v1/forward_backward",
        forward_backward,
        ForwardBackwardRequest,
        UntypedAPIFuture,
        takes_protobuf=True,
    ),
    Endpoint("POST", "/api/v1/forward", forward, ForwardRequest, UntypedAPIFuture),
    Endpoint("POST", "/api/v1/optim_step", optim_step, OptimStepRequest, UntypedAPIFuture),
    Endpoint("POST", "/api/v1/create_custom_loss", create_custom_loss, CreateCustomLossRequest, UntypedAPIFuture),
)
