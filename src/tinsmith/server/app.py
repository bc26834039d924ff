"""The API process: routes, the one place where errors become answers, and what runs beside the requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from tinsmith.errors import APIStatusError, InvalidInputError
from tinsmith.server import openapi
from tinsmith.server.auth import Authority, Caller
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.config import ServerConfig
from tinsmith.server.models import ModelFacts
from tinsmith.server.quotas import Backlog, Incoming, OpenRequests
from tinsmith.server.recent import Recent
from tinsmith.server.routes import ENDPOINTS
from tinsmith.server.routes._body import Body
from tinsmith.server.routes._call import Call, Endpoint, HeldMemory, Services, reply_plain, shortened, status_error
from tinsmith.server.routes._intake import Intake
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.tidying import Tidying
from tinsmith.server.waiting import Waiting, Workers

log = logging.getLogger(__name__)

T = TypeVar("T")

_STORE_THREADS = 8
_DECODE_THREADS = 2
_IN_USE_SECONDS = 5.0
_NOBODY = Caller("")
_TOO_SLOW = 408
_CLIENT_GONE = 499
_UNKNOWN_BODY_BYTES = 2**20


def create_app(config: ServerConfig, store: Store, models: Mapping[str, ModelFacts], workers: Workers) -> Starlette:
    """The whole API. The store, and whatever else is passed in, is the caller's to close."""
    services = _services(config, store, models, workers)
    metrics = Metrics(services)
    app = Starlette(
        routes=[
            *(_route(endpoint, services, metrics) for endpoint in ENDPOINTS),
            Route("/metrics", lambda request: metrics.page()),
            Route("/openapi.json", _once(lambda: msgspec.json.encode(openapi.document()))),
            Route("/docs", lambda request: HTMLResponse(openapi.PAGE)),
        ],
        exception_handlers={HTTPException: _no_such_route},
        lifespan=lambda app: _lifespan(services),
    )
    app.router.redirect_slashes = False
    app.state.services = services
    return app


def drain(app: Starlette) -> None:
    """Let every long poll end now; to be called on the event loop when the server is about to stop."""
    services: Services = app.state.services
    services.waiting.drain()


def _services(config: ServerConfig, store: Store, models: Mapping[str, ModelFacts], workers: Workers) -> Services:
    storing = ThreadPoolExecutor(_STORE_THREADS, "store")

    def in_thread(work: Callable[[Any], T]) -> Callable[[Any], Awaitable[T]]:
        return lambda argument: asyncio.get_running_loop().run_in_executor(storing, work, argument)

    return Services(
        config=config,
        store=store,
        models={name: _limited(facts, config.max_context) for name, facts in models.items()},
        workers=workers,
        authority=Authority(config, store),
        waiting=Waiting(in_thread(store.results.statuses), in_thread(store.results.newest)),
        folders=CheckpointFolders(config.checkpoints),
        intake=Intake(in_thread(store.jobs.enqueue_many)),
        open_requests=OpenRequests(config.max_open_requests),
        incoming=Incoming(config.max_incoming_bytes),
        backlog=Backlog(
            config.max_queued_requests,
            config.max_queued_bytes,
            lambda: asyncio.get_running_loop().run_in_executor(storing, store.jobs.queued),
            lambda *number: asyncio.get_running_loop().run_in_executor(storing, store.jobs.is_awaited, *number),
        ),
        storing=storing,
        decoding=ThreadPoolExecutor(_DECODE_THREADS, "decode"),
        models_in_use=Recent(_IN_USE_SECONDS),
        samplers_in_use=Recent(_IN_USE_SECONDS),
    )


def _limited(facts: ModelFacts, max_context: int | None) -> ModelFacts:
    return facts if max_context is None else replace(facts, max_context=min(facts.max_context, max_context))


# --- beside the requests ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _lifespan(services: Services) -> AsyncIterator[None]:
    services.workers.on_done(services.waiting.notice)
    await services.workers.start()
    tidying = Tidying(
        services.config,
        services.store,
        services.folders,
        services.waiting,
        services.workers,
        services.samplers_in_use,
    )
    beside = [asyncio.create_task(services.waiting.run()), asyncio.create_task(tidying.run(services.storing))]
    try:
        yield
    finally:
        services.waiting.drain()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await services.workers.stop()
        services.storing.shutdown()
        services.decoding.shutdown()


# --- one request -----------------------------------------------------------------------------------------------------


def _route(endpoint: Endpoint, services: Services, metrics: Metrics) -> Route:
    async def handle(request: Request) -> Response:
        started = time.perf_counter()
        body = Body(request)
        response = await _answer(endpoint, Request(request.scope, body.receive), services)
        if response.status_code != _TOO_SLOW:
            await body.drain(services.config.max_body_bytes)
        metrics.count(endpoint, response.status_code, time.perf_counter() - started)
        return response

    return Route(endpoint.path, handle, methods=[endpoint.method], name=endpoint.answer.__name__)


async def _answer(endpoint: Endpoint, request: Request, services: Services) -> Response:
    try:
        caller = _NOBODY if endpoint.is_open else await _caller(request, services)
        memory = HeldMemory(services.incoming, caller.owner)
        with services.open_requests.one_more(caller.owner), memory:
            return await endpoint.answer(Call(request, caller, services, memory))
    except APIStatusError as error:
        return _refusal(error.status_code, error.message, error.retry_after)
    except InvalidInputError as error:
        return _refusal(422, error.message)
    except RecursionError:
        return _refusal(422, "The body is nested too deeply.")
    except ClientDisconnect:
        return Response(status_code=_CLIENT_GONE)
    except (StoreUnavailableError, TimeoutError) as error:
        log.error("%s %s: the database is out of reach or full: %s", endpoint.method, endpoint.path, error)
        return _refusal(503, "The server's database is out of reach or full. Send the request again.")
    except Exception:
        log.exception("%s %s failed", endpoint.method, endpoint.path)
        return _refusal(500, "The server failed. Its log says why; the request may be sent again.")


async def _caller(request: Request, services: Services) -> Caller:
    credential = request.headers.get("x-api-key")
    if not credential:
        raise status_error(401, "The header X-API-Key is missing. Set TINKER_API_KEY.")
    known = services.authority.recall(credential)
    if known is None:
        loop = asyncio.get_running_loop()
        known = await loop.run_in_executor(services.storing, services.authority.identify, credential)
    if known is None:
        raise status_error(
            401, "This API key is unknown or was revoked. `tinsmith keys create`, run where the server is, makes one."
        )
    return known


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    await Body(request).drain(_UNKNOWN_BODY_BYTES)
    return _refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")


def _refusal(status: int, detail: str, retry_after: float | None = None) -> Response:
    """Never empty and never compressed: clients take a 400 without a length for a fault of the network."""
    response = reply_plain({"detail": shortened(detail)}, status)
    if retry_after is not None:
        response.headers["retry-after"] = str(math.ceil(retry_after))
    return response


def _once(make: Callable[[], bytes]) -> Callable[[Request], Response]:
    made: list[bytes] = []

    def answer(request: Request) -> Response:
        if not made:
            made.append(make())
        return Response(made[0], media_type="application/json")

    return answer


class Metrics:
    """What happens here, in numbers, for Prometheus."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tinsmith_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "tinsmith_request_seconds", "Time until the answer.", ["endpoint"], registry=self._registry
        )
        waiting = Gauge("tinsmith_waiting", "Open long polls.", registry=self._registry)
        waiting.set_function(lambda: len(services.waiting))
        self._jobs = Gauge(
            "tinsmith_jobs", "Jobs that wait or run.", ["base_model", "kind", "state"], registry=self._registry
        )
        self._ready = Gauge("tinsmith_ready", "Whether a model is loaded.", ["base_model"], registry=self._registry)

    def count(self, endpoint: Endpoint, status: int, seconds: float) -> None:
        self._requests.labels(endpoint.path, str(status)).inc()
        self._seconds.labels(endpoint.path).observe(seconds)

    def page(self) -> Response:
        self._jobs.clear()
        for depth in self._services.store.jobs.depths():
            self._jobs.labels(depth.base_model, depth.kind, depth.state).set(depth.count)
        for name in self._services.models:
            self._ready.labels(name).set(self._services.workers.is_ready(name))
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
