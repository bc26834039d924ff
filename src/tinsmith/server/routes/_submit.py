"""Accepting an operation: its number is used up whatever happens, and a refusal is found where its result would be."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from tinsmith.errors import InvalidInputError
from tinsmith.server import audit, logs
from tinsmith.server.checks import check_base_model, refuse
from tinsmith.server.models import ModelFacts
from tinsmith.server.reasons import reason
from tinsmith.server.routes._call import Call, forget_way, parse_json, reply, shortened, status_error
from tinsmith.server.routes._found import model_named
from tinsmith.server.store import ids
from tinsmith.server.store.records import Done, Enqueued, Failed, JobKind, Model, NewJob, NewModel, Submission
from tinsmith.types import SampleRequest, UntypedAPIFuture
from tinsmith.types._model import Request
from tinsmith.wire import json

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Request)


async def accept(
    call: Call,
    job: NewJob,
    refusal: InvalidInputError | None = None,
    *,
    model: NewModel | None = None,
    sample: SampleRequest | None = None,
) -> Enqueued:
    """Queue the job, or record why it was refused. `model` is what it creates, `sample` what is to be drawn."""
    logs.about(session_id=job.session_id, model_id=job.model_id)
    if refusal is not None:
        call.services.count_refusal(forget_way(refusal))
        failed = Failed(error=shortened(refusal.message), category="user", reason=reason(refusal))
        return await settle(call, job, failed)
    if call.caller.key is not None:
        job = msgspec.structs.replace(job, key_id=call.caller.key.key_id)
    async with call.services.backlog.admitted(job):
        event = audit.submitted(call, job)
        if sample is None:
            most = call.services.config.max_models
            enqueued = await _enqueue(call, Submission(job=job, model=model, most_models=most, event=event))
        else:
            job = msgspec.structs.replace(job, replica=call.services.workers.choose_replica(job, sample))
            enqueued = await _enqueue_sample(call, Submission(job=job, event=event))
    if job.base_model is not None:
        call.services.workers.wake(job.base_model, job.replica)
    return enqueued


async def _enqueue_sample(call: Call, submission: Submission) -> Enqueued:
    """One that is submitted once more still counts as work of its replica if it is not done."""
    is_open = False
    try:
        enqueued = await _enqueue(call, submission)
        is_open = enqueued.is_new or await _is_open(call, enqueued.request_id)
    finally:
        if not is_open and submission.job.seq_id is not None:
            call.services.workers.are_over([ids.request_id(submission.job.stream, submission.job.seq_id)])
    return enqueued


async def _is_open(call: Call, request_id: str) -> bool:
    return bool(await call.stored(call.store.jobs.still_open, [request_id]))


async def _enqueue(call: Call, submission: Submission) -> Enqueued:
    job, waiting = submission.job, call.services.waiting
    if job.seq_id is None:
        return await call.services.intake.add(submission)
    request_id, is_new = ids.request_id(job.stream, job.seq_id), False
    waiting.expect(request_id, call.owner)  # before it is written, because its worker may be quicker than we are
    try:
        enqueued = await call.services.intake.add(submission)
        is_new = enqueued.is_new
    finally:
        if not is_new:
            waiting.expect_no_longer(request_id)
    return enqueued


async def settle(call: Call, job: NewJob, outcome: Done | Failed) -> Enqueued:
    """Record a job that needs no worker, with its outcome."""
    content = outcome.error.encode() if isinstance(outcome, Failed) else outcome.result
    call.services.paperwork.charge(call.owner, len(content))
    event = audit.submitted(call, job, outcome) if isinstance(outcome, Failed) else None
    enqueued = await call.services.intake.add(Submission(job=job, outcome=outcome, event=event))
    if isinstance(outcome, Failed) and enqueued.is_new:
        about = {"request_id": enqueued.request_id, "reason": outcome.reason}
        log.warning("%s was refused (%s)", job.kind, outcome.category, extra=about)
    call.services.waiting.notice([enqueued.request_id])
    return enqueued


async def give_up(call: Call, request_id: str, base_model: str | None) -> None:
    """Nobody wants this request any more. One that runs already is stopped as soon as its worker sees it."""
    became = await call.stored(call.store.jobs.cancel, request_id, call.owner)
    if became == "cancelled":
        call.services.waiting.notice([request_id])
        call.services.workers.are_over([request_id])
    elif became == "asked" and base_model is not None:
        call.services.workers.wake(base_model)


def acknowledged(enqueued: Enqueued, sample_sequence_ids: Sequence[str] | None = None) -> Response:
    logs.about(request_id=enqueued.request_id)
    ids = None if sample_sequence_ids is None else list(sample_sequence_ids)
    return reply(UntypedAPIFuture(request_id=enqueued.request_id, sample_sequence_ids=ids))


async def numbered_body(call: Call) -> dict[str, Any]:
    """The JSON object of a request, not yet checked: what it is about must be known before it can be refused."""
    return object_in(parse_json(await call.json_body()))


def object_in(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise status_error(400, "The body must be a JSON object.")
    return value


def text_field(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise status_error(422, f"{name} is missing or not a text.")
    return value


def number_field(fields: dict[str, Any], name: str, lowest: int, highest: int = 2**63 - 1) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise status_error(422, f"{name} is missing or not a whole number from {lowest} to {highest}.")
    return value


async def operation(
    call: Call,
    kind: JobKind,
    fields: dict[str, Any],
    cls: type[R],
    check: Callable[[Call, R, Model], Awaitable[R]],
) -> Response:
    """A numbered operation on a model. `check` gives back the request as the worker shall see it."""
    model = await model_named(call, text_field(fields, "model_id"))
    job = job_for(call, kind, model, number_field(fields, "seq_id", 1))
    try:
        trainable(call, model)
        request = await check(call, cls.from_builtins(fields), model)
    except InvalidInputError as refusal:
        return acknowledged(await accept(call, job, refusal))
    return acknowledged(await accept(call, msgspec.structs.replace(job, payload=json.encode(request))))


def job_for(call: Call, kind: JobKind, model: Model, seq_id: int) -> NewJob:
    return NewJob(
        kind=kind,
        owner=call.owner,
        payload=b"",
        session_id=model.session_id or "",
        base_model=model.base_model,
        model_id=model.model_id,
        seq_id=seq_id,
    )


def trainable(call: Call, model: Model) -> ModelFacts:
    """The facts of a model's base, if the model can be worked on."""
    if not model.trainable:
        raise refuse("model_id", f"{model.model_id} holds copied checkpoints only; load them into a new model")
    if model.removed is not None:
        raise refuse("model_id", f"{model.model_id} was not used for long after its session; load a checkpoint of it")
    return check_base_model(model.base_model, call.services.models)
