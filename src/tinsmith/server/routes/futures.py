"""Results: fetched one by one or announced together, and given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response

from tinsmith.errors import APIStatusError
from tinsmith.server.routes._call import JSON, PROTOBUF, Call, Endpoint, reply, reply_plain, status_error
from tinsmith.server.routes._found import sampler_named
from tinsmith.server.store.records import Completion, Completions, Done, Expired, Failed, Status
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


async def retrieve_future(call: Call) -> Response:
    """The result of an operation, waited for up to half a minute; 408 if it takes longer."""
    request = await call.read(FutureRetrieveRequest)
    waiting, seconds = call.services.waiting, call.services.config.long_poll_seconds
    status = await waiting.until_done(request.request_id, call.owner, seconds)
    status = status or await waiting.status(request.request_id)
    if status is None or status.owner != call.owner:
        raise await _unknown(call, request.request_id)
    return await _result(call, request, status)


async def _unknown(call: Call, request_id: str) -> APIStatusError:
    """410 tells a sampling client to ask again, 404 that it made a mistake: the caller's own sessions decide."""
    session = await call.stored(call.store.sessions.get, request_id.partition(":")[0], call.owner)
    if session is None:
        return status_error(404, f"There is no request {request_id!r}.")
    return _expired(request_id)


def _expired(request_id: str) -> APIStatusError:
    return status_error(410, f"The result of {request_id!r} is not kept any longer. Submit the request again.")


async def _result(call: Call, request: FutureRetrieveRequest, status: Status) -> Response:
    match status.outcome:
        case None:
            return _pending(call, status)
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


def _pending(call: Call, status: Status) -> Response:
    reason = _why_paused(call, status)
    if reason is None:
        return reply(TryAgainResponse(request_id=status.request_id), status=408)
    return reply(
        TryAgainResponse(request_id=status.request_id, queue_state="paused_capacity", queue_state_reason=reason),
        status=408,
    )


def _why_paused(call: Call, status: Status) -> str | None:
    if status.is_held_up:
        return "an operation of this model with a lower number (seq_id) has not arrived"
    if status.base_model is None or call.services.workers.is_ready(status.base_model):
        return None
    is_served = status.base_model in call.services.models
    return f"{status.base_model} is {'being loaded' if is_served else 'not served at the moment'}"


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
    """What finished in a sampling session since the cursor, waited for up to half a minute."""
    request = await call.read(FuturesRetrieveRequest)
    target = request.target
    sampler = await sampler_named(call, target.sampling_session_id)
    if request.retrieved_request_ids:
        await call.stored(call.store.results.free, call.owner, request.retrieved_request_ids)
    found = await _completions(call, sampler.sampler_id, target.cloned_sampler_id, request.prev_cursor)
    return reply(FuturesRetrieveResponse(completions=[*map(_completion, found.items)], cursor=found.cursor))


async def _completions(call: Call, sampler_id: str, clone: int, cursor: int) -> Completions:
    clock = asyncio.get_running_loop()
    end = clock.time() + call.services.config.long_poll_seconds
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
    status = await call.services.waiting.status(request.request_id)
    if status is None or status.owner != call.owner:
        raise status_error(404, f"There is no request {request.request_id!r}.")
    became = await call.stored(call.store.jobs.cancel, request.request_id, call.owner)
    if became == "cancelled":
        call.services.waiting.notice([request.request_id])
    elif became == "asked" and status.base_model is not None:
        call.services.workers.wake(status.base_model)
    return reply_plain({})


ENDPOINTS = (
    Endpoint("POST", "/api/v1/retrieve_future", retrieve_future, FutureRetrieveRequest, gives_protobuf=True),
    Endpoint("POST", "/api/v1/retrieve_futures", retrieve_futures, FuturesRetrieveRequest, FuturesRetrieveResponse),
    Endpoint("POST", "/api/v1/cancel_future", cancel_future, CancelFutureRequest),
)
