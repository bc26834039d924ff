"""The API process: routes, the one place where errors become answers, and what runs beside the requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from tinsmith.errors import APIStatusError, InvalidInputError
from tinsmith.server import audit, logs, openapi, web
from tinsmith.server.auth import Authority, Caller, Door
from tinsmith.server.config import ServerConfig
from tinsmith.server.endpoints import ENDPOINTS
from tinsmith.server.full_disk import WaitError
from tinsmith.server.metrics import Metrics
from tinsmith.server.models import ModelFacts
from tinsmith.server.openai import completions as openai
from tinsmith.server.openai.places import Places
from tinsmith.server.outage import first_line
from tinsmith.server.quotas import Backlog, Conversions, Incoming, OpenRequests, Paperwork
from tinsmith.server.rates import Rates
from tinsmith.server.reasons import reason
from tinsmith.server.recent import Recent
from tinsmith.server.routes._body import Body
from tinsmith.server.routes._call import Call, Endpoint, HeldMemory, Services, forget_way, identified, plain_refusal
from tinsmith.server.routes._intake import Intake
from tinsmith.server.storage import open_storage
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.streams import Streams
from tinsmith.server.texts import Texts
from tinsmith.server.tidying import Tidying
from tinsmith.server.waiting import Waiting, Workers
from tinsmith.server.worker_metrics import worked

log = logging.getLogger(__name__)
access = logging.getLogger("tinsmith.server.access")

T = TypeVar("T")

_STORE_THREADS = 8
_DECODE_THREADS = 2
_FILE_THREADS = 4
_IN_USE_SECONDS = 5.0
_STORE_RETRY_SECONDS = 5.0
_COUNT_SECONDS = 10.0
_HEARTBEAT_PATIENCE_SECONDS = 0.1
_LOGGED_BYTES_PER_SECOND = 128 * 1024
_NOBODY = Caller("")
_TOO_SLOW = 408
_CLIENT_GONE = 499
_UNKNOWN_BODY_BYTES = 2**20
_MANY = {
    "asample",
    "chat_completions",
    "completions",
    "cancel_future",
    "client_config",
    "client_dynamic_config",
    "forward",
    "forward_backward",
    "healthz",
    "log_metrics",
    "optim_step",
    "overview",
    "recent_samples",
    "retrieve_future",
    "retrieve_futures",
    "run_points",
    "run_series",
    "run_with_progress",
    "runs_with_progress",
    "save_weights_for_sampler",
    "session_heartbeat",
    "telemetry",
}
"""Functions that answer what clients ask all the time. Their routes are looked at first."""


def create_app(config: ServerConfig, store: Store, models: Mapping[str, ModelFacts], workers: Workers) -> Starlette:
    """The whole API. The store, and whatever else is passed in, is the caller's to close."""
    services = _services(config, store, models, workers)
    metrics = Metrics(services)
    app = Starlette(
        routes=[
            *(route for endpoint in sorted(ENDPOINTS, key=_is_rare) for route in _routes(endpoint, services, metrics)),
            Route("/metrics", metrics.page),
            Route("/openapi.json", _once(lambda: msgspec.json.encode(openapi.document()))),
            Route("/docs", lambda request: HTMLResponse(openapi.PAGE)),
            *web.routes(services),
        ],
        exception_handlers={HTTPException: _no_such_route(metrics)},
        lifespan=lambda app: _lifespan(services),
    )
    app.router.redirect_slashes = False
    app.state.services = services
    return app


def _is_rare(endpoint: Endpoint) -> bool:
    return endpoint.answer.__name__ not in _MANY


def drain(app: Starlette) -> None:
    """Let every long poll end now; to be called on the event loop when the server is about to stop."""
    services: Services = app.state.services
    services.streams.drain()
    services.waiting.drain()


def _services(config: ServerConfig, store: Store, models: Mapping[str, ModelFacts], workers: Workers) -> Services:
    storing = ThreadPoolExecutor(_STORE_THREADS, "store")
    submitting = ThreadPoolExecutor(1, "submit")  # of its own: an acknowledgement does not wait behind other requests

    def in_thread(work: Callable[[Any], T], threads: Executor = storing) -> Callable[[Any], Awaitable[T]]:
        return lambda argument: asyncio.get_running_loop().run_in_executor(threads, work, argument)

    authority = Authority(config, store)
    intake = Intake(in_thread(store.jobs.enqueue_many, submitting))
    return Services(
        config=config,
        store=store,
        models={name: _limited(facts, config.max_context) for name, facts in models.items()},
        workers=workers,
        authority=authority,
        door=Door(authority, store.keys, storing),
        waiting=Waiting(in_thread(store.results.statuses), in_thread(store.results.newest), intake.rest),
        storage=open_storage(config.state, config.storage, config.cache_bytes, store),
        intake=intake,
        heartbeats=Intake(in_thread(store.sessions.heartbeats), _HEARTBEAT_PATIENCE_SECONDS),
        open_requests=OpenRequests(config.max_open_requests),
        conversions=Conversions(),
        incoming=Incoming(config.max_incoming_bytes),
        backlog=Backlog(
            config.max_queued_requests,
            config.max_queued_bytes,
            lambda: asyncio.get_running_loop().run_in_executor(storing, store.jobs.queued),
            lambda *number: asyncio.get_running_loop().run_in_executor(storing, store.jobs.is_awaited, *number),
            lambda: worked(figure for name in models for figure in workers.figures(name)),
            count_seconds=_COUNT_SECONDS if store.lead.can_be_shared else math.inf,
        ),
        refusals=Counter(),
        paperwork=Paperwork(config.max_paperwork_bytes, config.paperwork_bytes_per_second),
        logged_metrics=Paperwork(config.max_paperwork_bytes, _LOGGED_BYTES_PER_SECOND),
        storing=storing,
        submitting=submitting,
        decoding=ThreadPoolExecutor(_DECODE_THREADS, "decode"),
        filing=ThreadPoolExecutor(_FILE_THREADS, "files"),
        models_in_use=Recent(_IN_USE_SECONDS),
        samplers_in_use=Recent(_IN_USE_SECONDS),
        texts=Texts(models),
        streams=Streams(),
        places=Places(config, store),
        rates=Rates(),
    )


def _limited(facts: ModelFacts, max_context: int | None) -> ModelFacts:
    return facts if max_context is None else replace(facts, max_context=min(facts.max_context, max_context))


# --- beside the requests ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _lifespan(services: Services) -> AsyncIterator[None]:
    services.workers.on_done(services.waiting.notice)
    services.workers.on_drawn(services.streams.hear)
    await services.workers.start()
    tidying = Tidying(
        services.config,
        services.store,
        services.storage,
        services.waiting,
        services.workers,
        services.samplers_in_use,
    )
    running = (services.waiting.run(), tidying.run(services.storing), services.places.run())
    beside = [asyncio.create_task(each) for each in running]
    try:
        yield
    finally:
        services.streams.drain()
        services.waiting.drain()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await services.places.close()
        await services.workers.stop()
        services.submitting.shutdown()
        services.storing.shutdown()
        services.decoding.shutdown()
        services.filing.shutdown()


# --- one request -----------------------------------------------------------------------------------------------------


def _routes(endpoint: Endpoint, services: Services, metrics: Metrics) -> list[Route]:
    async def handle(request: Request) -> Response:
        started = time.perf_counter()
        body = Body(request)
        with logs.one_request():
            response = await _answer(endpoint, Request(request.scope, body.receive), services, metrics)
            if response.status_code != _TOO_SLOW:
                await body.drain(services.config.max_body_bytes)
            seconds = time.perf_counter() - started
            metrics.count(endpoint, response.status_code, seconds)
            _log_access(endpoint, request, response.status_code, seconds)
        return response

    paths = [endpoint.path, *filter(None, [endpoint.also_at])]
    return [Route(path, handle, methods=[endpoint.method], name=endpoint.answer.__name__) for path in paths]


async def _answer(endpoint: Endpoint, request: Request, services: Services, metrics: Metrics) -> Response:
    try:
        caller = _NOBODY if endpoint.is_open else await identified(request, services)
        logs.about(owner=caller.owner or None, key_id=caller.key.key_id if caller.key else None)
        memory = HeldMemory(services.incoming, caller.owner)
        with services.open_requests.one_more(caller.owner), memory:
            return await _audited(endpoint, Call(request, caller, services, memory))
    except Exception as error:  # noqa: BLE001 - it becomes an answer, and a line of the log if it is not expected
        response = await _refused(endpoint, error, services, metrics)
        forget_way(error)
        return response


async def _refused(endpoint: Endpoint, error: Exception, services: Services, metrics: Metrics) -> Response:
    match error:
        case APIStatusError():
            _note_refusal(error, services)
            return _refusal(endpoint, error.status_code, error.message, error)
        case InvalidInputError():
            _note_refusal(error, services)
            return _refusal(endpoint, 422, error.message, error)
        case RecursionError():
            return _refusal(endpoint, 422, "The body is nested too deeply.")
        case ClientDisconnect():
            return Response(status_code=_CLIENT_GONE)
        case StoreUnavailableError() | TimeoutError():
            metrics.count_database_error()
            logs.about(reason=f"the database is out of reach or full: {first_line(error)}")
            if endpoint.when_away is not None:
                return await endpoint.when_away()
            detail = "The server's database is out of reach or full. Send the request again."
            return _with_retry(_refusal(endpoint, 503, detail), _STORE_RETRY_SECONDS)
        case WaitError():
            logs.about(reason=str(error))
            detail = f"This cannot be done now: {error}. Send the request again."
            return _with_retry(_refusal(endpoint, 503, detail), _STORE_RETRY_SECONDS)
    log.error("%s %s failed", endpoint.method, endpoint.path, exc_info=error)
    return _refusal(endpoint, 500, "The server failed. Its log says why; the request may be sent again.")


def _note_refusal(error: APIStatusError | InvalidInputError, services: Services) -> None:
    services.count_refusal(error)
    logs.about(reason=reason(error))


async def _audited(endpoint: Endpoint, call: Call) -> Response:
    """To be refused something that would have been an event of the audit trail is one too."""
    try:
        return await endpoint.answer(call)
    except (APIStatusError, InvalidInputError) as error:
        event = audit.refused(call, endpoint.answer.__name__, error)
        if event is not None:
            call.services.paperwork.charge(call.owner, 0)
            await call.stored(call.store.audit.record, event)
        raise


def _log_access(endpoint: Endpoint, request: Request, status: int, seconds: float) -> None:
    """What training and sampling consist of is told to those who debug; there may be thousands of it a second."""
    name = endpoint.answer.__name__
    is_usual = name == "readyz" or (name in _MANY and status in (200, 408, 410, 429, _CLIENT_GONE))
    level = logging.WARNING if status >= 500 else logging.DEBUG if is_usual else logging.INFO
    if access.isEnabledFor(level):
        place = {"session_id": request.path_params.get("session_id"), "model_id": request.path_params.get("run_id")}
        logs.about(**{name: value for name, value in place.items() if value is not None})
        fields = {
            "method": endpoint.method,
            "route": endpoint.path,
            "status": status,
            "seconds": seconds,
            "address": request.client and request.client.host,
        }
        access.log(level, "%s %s: %d", endpoint.method, endpoint.path, status, extra=fields)


def _no_such_route(metrics: Metrics) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        await Body(request).drain(_UNKNOWN_BODY_BYTES)
        metrics.count_unknown(error.status_code)
        access.info("no such route: %d", error.status_code, extra={"address": request.client and request.client.host})
        path = request.url.path
        refusal = openai.no_such_endpoint if path.startswith((openai.PREFIX, openai.ALSO)) else plain_refusal
        return refusal(error.status_code, f"{request.method} {path}: {error.detail}.", None)

    return handle


def _refusal(endpoint: Endpoint, status: int, detail: str, error: Exception | None = None) -> Response:
    """Never empty and never compressed: clients take a 400 without a length for a fault of the network."""
    response = endpoint.refusal(status, detail, error)
    return _with_retry(response, error.retry_after if isinstance(error, APIStatusError) else None)


def _with_retry(response: Response, seconds: float | None) -> Response:
    if seconds is not None:
        response.headers["retry-after"] = str(math.ceil(seconds))
    return response


def _once(make: Callable[[], bytes]) -> Callable[[Request], Response]:
    made: list[bytes] = []

    def answer(request: Request) -> Response:
        if not made:
            made.append(make())
        return Response(made[0], media_type="application/json")

    return answer
