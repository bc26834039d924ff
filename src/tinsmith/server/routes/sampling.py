"""Sampling: sessions that know their weights, and the samples asked of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from tinsmith.errors import InvalidInputError
from tinsmith.server.checks import MAX_SAMPLES, check_base_model, check_base_of, check_sampler, check_sampling, refuse
from tinsmith.server.routes._call import Call, Endpoint, forget_way, parse_json, reply, reply_plain, status_error
from tinsmith.server.routes._found import checkpoint_at, open_session, sampler_named
from tinsmith.server.routes._submit import accept, acknowledged, number_field, object_in, text_field
from tinsmith.server.store.records import Checkpoint, NewJob, NewSampler
from tinsmith.types import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
    UntypedAPIFuture,
)

_SAMPLED_KINDS = ("weights", "sampler_weights")


async def create_sampling_session(call: Call) -> Response:
    """Open a place to sample from: a base model, or saved weights."""
    request = await call.read(CreateSamplingSessionRequest)
    session = await open_session(call, request.session_id)
    if request.sampling_session_seq_id < 0:
        raise refuse("sampling_session_seq_id", f"is {request.sampling_session_seq_id}; count from 0")
    checkpoint = None if request.model_path is None else await _sampled_checkpoint(call, request.model_path)
    base_model = _base_model(call, request.base_model, checkpoint)
    call.services.paperwork.charge(call.owner, 0)
    sampler = await call.stored(
        call.store.samplers.create,
        NewSampler(
            session_id=session.session_id,
            sampling_session_seq_id=request.sampling_session_seq_id,
            owner=call.owner,
            base_model=base_model,
            model_path=request.model_path,
            saved_by=checkpoint.request_id if checkpoint else None,
        ),
    )
    if (sampler.base_model, sampler.model_path, sampler.model_id) != (base_model, request.model_path, None):
        number = request.sampling_session_seq_id
        raise refuse("sampling_session_seq_id", f"is {number}, which samples from other weights; take a new number")
    return reply(CreateSamplingSessionResponse(sampling_session_id=sampler.sampler_id))


async def _sampled_checkpoint(call: Call, path: str) -> Checkpoint:
    checkpoint = await checkpoint_at(call, path)
    if checkpoint.key.kind not in _SAMPLED_KINDS:
        raise refuse("model_path", f"{path} is an export; sample from weights or sampler_weights")
    return checkpoint


def _base_model(call: Call, asked: str | None, checkpoint: Checkpoint | None) -> str:
    if checkpoint is not None:
        if asked not in (None, checkpoint.base_model):
            raise refuse("base_model", f"is {asked!r}, but those weights belong to {checkpoint.base_model!r}")
        return check_base_of(checkpoint, call.services.models).name
    if asked is None:
        raise refuse("base_model", "or model_path must be given")
    return check_base_model(asked, call.services.models).name


async def join_sampling_session(call: Call) -> Response:
    """A number of its own for one more client of a sampling session."""
    request = await call.read(JoinSamplingSessionRequest)
    number = await call.stored(call.store.samplers.join, request.sampling_session_id, call.owner)
    if number is None:
        raise status_error(404, f"There is no sampling session {request.sampling_session_id!r}.")
    return reply(JoinSamplingSessionResponse(client_counter=number))


async def get_sampler(call: Call) -> Response:
    """What a sampling session samples from."""
    sampler = await sampler_named(call, call.part("sampler_id"))
    facts = call.services.models.get(sampler.base_model)
    answer = {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}
    # Beyond the API, as `get_info` has it for training: our client finds the tokenizer of a folder by it.
    return reply_plain({**answer, "tokenizer_id": facts.tokenizer_id if facts else None})


class _Arrived(NamedTuple):
    fields: dict[str, Any]
    request: SampleRequest | InvalidInputError


async def asample(call: Call) -> Response:
    """Ask for samples of one prompt."""
    body = await call.json_body(call.services.config.max_json_bytes)
    fields, request = await call.decoded(_read, body)
    sampler = await sampler_named(call, text_field(fields, "sampling_session_id"))
    # The acknowledgement names every sample, so it needs to know how many there will be.
    num_samples = number_field({"num_samples": 1, **fields}, "num_samples", 1, MAX_SAMPLES)
    job = NewJob(
        kind="sample",
        owner=call.owner,
        payload=body,
        session_id=sampler.session_id,
        base_model=sampler.base_model,
        sampler_id=sampler.sampler_id,
        seq_id=number_field(fields, "seq_id", 0),
        samples=num_samples,
    )
    refusal = None
    try:
        if isinstance(request, InvalidInputError):
            raise request
        check_sampler(sampler)
        tokens = check_sampling(request, check_base_model(sampler.base_model, call.services.models))
        job = msgspec.structs.replace(job, size=tokens)
    except InvalidInputError as error:
        refusal = error
    enqueued = await accept(call, job, refusal, sample=None if isinstance(request, InvalidInputError) else request)
    return acknowledged(enqueued, [f"{enqueued.request_id}:{index}" for index in range(num_samples)])


def _read(body: bytes) -> _Arrived:
    fields = object_in(parse_json(body))
    try:
        return _Arrived(fields, SampleRequest.from_builtins(fields))
    except InvalidInputError as error:
        return _Arrived(fields, forget_way(error))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/api/v1/create_sampling_session",
        create_sampling_session,
        CreateSamplingSessionRequest,
        CreateSamplingSessionResponse,
    ),
    Endpoint(
        "POST",
        "/api/v1/join_sampling_session",
        join_sampling_session,
        JoinSamplingSessionRequest,
        JoinSamplingSessionResponse,
    ),
    Endpoint("GET", "/api/v1/samplers/{sampler_id}", get_sampler, gives=GetSamplerResponse),
    Endpoint("POST", "/api/v1/asample", asample, SampleRequest, UntypedAPIFuture),
)
