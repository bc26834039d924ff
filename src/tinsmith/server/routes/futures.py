"""Results: fetched one by one or announced together, and given up."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from starlette.responses import Response

from tinsmith.errors import APIStatusError
from tinsmith.server import logs
from tinsmith.server.messages import Replay
from tinsmith.server.routes._call import JSON, PROTOBUF, Call, Endpoint, reply, reply_plain, status_error
from tinsmith.server.routes._found import sampler_named
from tinsmith.server.routes._submit import give_up
from tinsmith.server.store.records import Completion, Completions, Done, Expired, Failed, Lane, Status
from tinsmith.types import (
    CancelFutureRequest,
    FutureCompletion,
    FutureFailed,
    FutureFinished,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    RequestErrorCategory,
    RequestFailedResponse,
    ResultMetadataResponse,
    TryAgainResponse,
)
from tinsmith.wire import json, proto

_AWAY = "the server's database is out of reach; work goes on when it is back"
_AWAY_SECONDS = 5.0
_LEAST_SECONDS = 0.2
"""Of a poll that brings no news. Clients of 0.38 that are closed at the very moment of an answer never end on Python
3.11, and they are closed when they have fetched their last result, which they have just told."""
_LANES: tuple[Lane, ...] = ("train", "sample")
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


async def retrieve_future(call: Call) -> Response:
    """The result of an operation, waited for up to half a minute; 408 if it takes longer or comes to a halt."""
    request = await call.read(FutureRetrieveRequest)
    logs.about(request_id=request.request_id)
    waiting, seconds = call.services.waiting, call.services.config.long_poll_seconds
    status = await waiting.until_done(request.request_id, call.owner, seconds, _halts(call, request.request_id))
    try:
        if status is None and waiting.is_blind:
            raise TimeoutError
        status = status or await waiting.status(request.request_id)
    except TimeoutError:
        return _paused(request.request_id, _AWAY)
    await call.check_again()
    if status is None or status.owner != call.owner:
        raise await _unknown(call, request.request_id)
    return await _result(call, request, status)


async def _while_database_is_away() -> Response:
    """Clients ask again at once, whatever they are told, so they are kept for a moment."""
    await asyncio.sleep(_AWAY_SECONDS)
    return _paused("", _AWAY)


async def _unknown(call: Call, request_id: str) -> APIStatusError:
    """410 tells a sampling client to ask again, 404 that it made a mistake: the caller's own sessions decide."""
    session = await call.stored(call.store.sessions.get, request_id.partition(":")[0], call.owner)
    if session is None:
        return status_error(404, f"There is no request {request_id!r}.")
    return await _never_arrived(call, request_id) or _expired(request_id)


async def _never_arrived(call: Call, request_id: str) -> APIStatusError | None:
    """An operation that was acknowledged and is not here is one that a restored backup does not have."""
    model_id, _, number = request_id.rpartition(":")
    if not _NUMBER.fullmatch(number) or await call.stored(call.store.models.get, model_id, call.owner) is None:
        return None
    missing = await call.stored(call.store.jobs.first_missing, model_id)
    if int(number) < missing:
        return None
    return status_error(
        410,
        f"The server does not know operation {number} of {model_id}; it has those up to {missing - 1}. It was probably "
        "restored from a backup. Go on from a checkpoint, in a new client.",
    )


def _expired(request_id: str) -> APIStatusError:
    return status_error(410, f"The result of {request_id!r} is not kept any longer. Submit the request again.")


async def _result(call: Call, request: FutureRetrieveRequest, status: Status) -> Response:
    match status.outcome:
        case None:
            return await _pending(call, status)
        case Expired():
            raise _expired(status.request_id)
        case Failed(error=error, category=category):
            return reply(RequestFailedResponse(error=error, category=RequestErrorCategory(category)))
        case Done() as done:
            return await _finished(call, request, status, done)
    return reply(
        RequestFailedResponse(
            error="The request was cancelled by its client, or its session ended.", category=RequestErrorCategory.User
        )
    )


async def _pending(call: Call, status: Status) -> Response:
    if status.is_held_up:
        reason: str | None = await _missing(call, status)
    else:
        reason = _reason(call, status.request_id, status.base_model, _lane(status))
    if reason is None:
        return reply(TryAgainResponse(request_id=status.request_id), status=408)
    return _paused(status.request_id, reason)


def _paused(request_id: str, reason: str) -> Response:
    waits = TryAgainResponse(request_id=request_id, queue_state="paused_capacity", queue_state_reason=reason)
    return reply(waits, status=408)


async def _missing(call: Call, status: Status) -> str:
    """The number may be on its way. It never comes if its body could not be read and its client went on regardless."""
    number = await call.stored(call.store.jobs.first_missing, status.request_id.rpartition(":")[0])
    return (
        f"the operation with the lower number (seq_id) {number} of this model has not arrived; if it was given up, the "
        "model cannot go on: make a new one, from its last checkpoint"
    )


def _halts(call: Call, request_id: str) -> Callable[[Status], bool]:
    """Whether work on an operation comes to a halt during this poll: then its client hears of it now, and waits for
    the rest in its next one. Whoever polls for the first time has not heard of a halt that began before, either.

    What is over at the next look was no halt.
    """
    is_first = call.request.headers.get("x-tinker-request-iteration") == "0"
    lanes: list[tuple[str | None, Lane]] = [(model, lane) for model in call.services.models for lane in _LANES]
    went_on = {of for of in lanes if _reason(call, request_id, *of) is None}
    was_seen = False

    def halts(status: Status) -> bool:
        nonlocal was_seen
        where = status.base_model, _lane(status)
        lasts, was_seen = was_seen, _reason(call, request_id, *where) is not None
        if not was_seen:
            went_on.add(where)
        return was_seen and lasts and (is_first or where in went_on)

    return halts


def _lane(status: Status) -> Lane:
    return "sample" if status.kind == "sample" else "train"


def _reason(call: Call, request_id: str, base_model: str | None, lane: Lane) -> str | None:
    """Why nothing is done about this operation at the moment."""
    if base_model is None:
        return None
    workers, stream = call.services.workers, request_id.rpartition(":")[0]
    if not workers.is_ready(base_model, lane):
        what = "being loaded" if base_model in call.services.models else "not served at the moment"
        return workers.held_up(base_model, lane=lane) or f"{base_model} is {what}"
    return workers.held_up(base_model, stream, lane) or _replay(workers.replay(base_model, lane), stream)


def _replay(replay: Replay | None, stream: str) -> str | None:
    """A worker does one thing at a time, so others wait too; whose model it is does not concern them."""
    if replay is None:
        return None
    whose = "" if stream == replay.model_id else " another model"
    return f"rebuilding{whose} after a restart: {replay.replayed} of {replay.total} operations replayed"


async def _finished(call: Call, request: FutureRetrieveRequest, status: Status, done: Done) -> Response:
    size = len(done.result)
    if request.allow_metadata_only and size > call.services.config.inline_result_bytes:
        return reply(ResultMetadataResponse(status="complete_metadata", response_payload_size=size))
    if done.content_type == PROTOBUF and PROTOBUF not in call.request.headers.get("accept", ""):
        return Response(await call.decoded(_AS_JSON[status.kind], done.result), media_type=JSON)
    return Response(done.result, media_type=done.content_type)


def _sample_json(result: bytes) -> bytes:
    return json.encode(proto.decode_sample_response(result))


def _training_json(result: bytes) -> bytes:
    return json.encode(proto.decode_forward_backward_output(result))


_AS_JSON: dict[str, Callable[[bytes], bytes]] = {"sample": _sample_json, "forward_backward": _training_json}
"""For old clients, which do not read protobuf."""


async def retrieve_futures(call: Call) -> Response:
    """What finished in a sampling session since the cursor, waited for up to half a minute, or `timeout` if it is less.

    With a `timeout` of 0 a client tells which results it has fetched, and hardly waits for others.
    """
    request = await call.read(FuturesRetrieveRequest)
    target = request.target
    sampler = await sampler_named(call, target.sampling_session_id)
    if request.retrieved_request_ids:
        await call.stored(call.store.results.free, call.owner, request.retrieved_request_ids)
    seconds = call.services.config.long_poll_seconds
    if request.timeout is not None:
        seconds = min(seconds, max(_LEAST_SECONDS, request.timeout))
    found = await _completions(call, sampler.sampler_id, target.cloned_sampler_id, request.prev_cursor, seconds)
    await call.check_again()
    return reply(FuturesRetrieveResponse(completions=[*map(_completion, found.items)], cursor=found.cursor))


async def _completions(call: Call, sampler_id: str, clone: int, cursor: int, seconds: float) -> Completions:
    clock = asyncio.get_running_loop()
    end = clock.time() + seconds
    seen: int | None = cursor
    while seen is not None:
        seen = await call.services.waiting.until_news(sampler_id, seen, max(0.0, end - clock.time()))
        if seen is not None:
            # The news may be about another client of the same sampling session.
            found = await call.stored(call.store.results.completions, sampler_id, clone, cursor)
            if found.items:
                return found
    return Completions(items=[], cursor=cursor)


def _completion(done: Completion) -> FutureCompletion:
    if done.state == "failed":
        return FutureFailed(request_id=done.request_id)
    return FutureFinished(request_id=done.request_id, response_payload_uncompressed_size=done.size)


async def cancel_future(call: Call) -> Response:
    """The client has lost interest. A request that runs already is stopped as soon as its worker sees it."""
    request = await call.read(CancelFutureRequest)
    logs.about(request_id=request.request_id)
    status = await call.services.waiting.status(request.request_id)
    if status is None or status.owner != call.owner:
        raise status_error(404, f"There is no request {request.request_id!r}.")
    if status.state == "queued":  # else submitting and cancelling by turns would fill the database
        call.services.paperwork.charge(call.owner, 0)
    await give_up(call, request.request_id, status.base_model)
    return reply_plain({})


ENDPOINTS = (
    Endpoint(
        "POST",
        "/api/v1/retrieve_future",
        retrieve_future,
        FutureRetrieveRequest,
        gives_protobuf=True,
        when_away=_while_database_is_away,
    ),
    Endpoint("POST", "/api/v1/retrieve_futures", retrieve_futures, FuturesRetrieveRequest, FuturesRetrieveResponse),
    Endpoint("POST", "/api/v1/cancel_future", cancel_future, CancelFutureRequest),
)
