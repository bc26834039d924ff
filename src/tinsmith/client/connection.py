"""A client's way to the server: headers, credential, retries and the meaning of answers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import platform
import sys
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

from tinsmith._version import PROTOCOL_VERSION, __version__
from tinsmith.client import futures
from tinsmith.client.account import account_of
from tinsmith.client.config import Config
from tinsmith.client.futures import APIFuture
from tinsmith.client.hooks import Attempt, BillingPause, Hook, Hooks, QueueStateLogger
from tinsmith.client.loop import BackgroundLoop, background_loop
from tinsmith.client.redaction import hide_known
from tinsmith.client.retry import (
    SYSTEM_CLOCK,
    Action,
    Clock,
    Retry,
    RetryPolicy,
    classify,
    is_user_error,
    parse_retry_after,
    with_retries,
)
from tinsmith.client.telemetry import TelemetryReporter, telemetry_hook
from tinsmith.client.transport import HttpRequest, HttpResponse, Traffic, Transport, Upload
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    ClientClosedError,
    InvalidInputError,
    ResponseSummary,
    status_error_class,
)
from tinsmith.types import AuthTokenResponse, ClientConfigRequest, ClientConfigResponse, TelemetryResponse
from tinsmith.types._model import Model
from tinsmith.wire import json as wire_json

logger = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Model)

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
KEY_HEADER = "x-api-key"
TOKEN_PATH = "/api/v1/auth/token"
MAX_REDIRECTS = 5
WARNING_INTERVAL_SECONDS = 10.0
TELEMETRY_TIMEOUT_SECONDS = 5.0
CLOSE_SECONDS = 2.0
LAST_WORDS_SECONDS = 5.0
"""How long closing a client waits for metrics that are on their way."""
MAX_LOGGED = 500
"""Characters of an error in a line of the log; some servers answer with whole pages."""
NO_RETRIES = RetryPolicy(max_seconds=0.0, max_attempts=1, billing_pause_limit=0.0)

_HINTS = {
    401: "Check the API key (api_key=... or TINKER_API_KEY) and that it belongs to this server.",
    402: "Check the billing of the account.",
    403: "The key is valid but may not do this; check who owns the resource.",
    404: "Check the id or path; what belongs to another account is not found either.",
    413: "Send less at once.",
    429: "Lower the number of requests in flight.",
}


class Call(NamedTuple):
    """One logical request; its retries share everything but the attempt number."""

    method: str
    path: str
    body: bytes = b""
    traffic: Traffic = Traffic.TRAIN
    content_type: str = JSON
    accept: str = JSON
    headers: Mapping[str, str] = {}
    timeout: float | None = None
    retries: bool = True
    idempotent: bool = True
    """Whether the server recognises a repetition (by a sequence number, say); decides about 409."""
    expected: tuple[int, ...] = ()
    """Statuses of 300 and above that are answers rather than errors."""
    upload: Upload | None = None
    """In place of a body that is too large to be in memory."""


class Connection:
    """Owned by one client and used on the background loop. Pools close when the owner is collected."""

    clock: Clock = SYSTEM_CLOCK

    def __init__(self, config: Config, loop: BackgroundLoop | None = None) -> None:
        self.config = config
        self.loop = loop or background_loop()
        self.account = account_of(config, self.loop.asyncio_loop)
        self._local_hooks: tuple[Hook, ...] = (QueueStateLogger(), *config.hooks)
        self.hooks = Hooks(self._local_hooks)
        self.last_progress = self.clock.now()
        self._transport = Transport(config)
        self._static_headers = {**_lower(_identity_headers()), **_lower(config.default_headers)}
        self._secrets = [secret for secret in (config.api_key, *config.default_headers.values()) if secret]
        self._closed = False
        """No new work."""
        self._closing: asyncio.Task[None] | None = None
        self._disconnected = False
        """Nothing goes out any more, not even the goodbye."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._last_words: set[asyncio.Task[Any]] = set()
        self._on_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._reporter: TelemetryReporter | None = None
        self._warned_at = -math.inf
        self._away_since: float | None = None
        """When the server could not be reached for the first time, if the user was told."""

    # Sending

    async def call(self, call: Call, retry: Retry | None = None) -> HttpResponse:
        """Sends with the account's credential, retries, and raises for a status of 300 or more.

        A caller with limits of his own passes a `Retry`, which may span several calls.
        """
        await self.flags()
        return await self._call_as(call, None, retry)

    async def call_for(self, result_type: type[M], call: Call, retry: Retry | None = None) -> M:
        """The same, with the answer decoded."""
        return decode(result_type, await self.call(call, retry), call)

    async def flags(self) -> ClientConfigResponse:
        return await self.account.load_flags(self._fetch_flags)

    def retry_policy(self, max_seconds: float | None = None) -> RetryPolicy:
        flags = self.account.flags
        return RetryPolicy(
            max_seconds=self.config.retry_budget if max_seconds is None else max_seconds,
            billing_pause_limit=float(flags.billing_exception_max_pause_duration_sec) if flags else 0.0,
        )

    async def _call_as(self, call: Call, credential: str | None, retry: Retry | None = None) -> HttpResponse:
        key = f"tinsmith-{uuid.uuid4()}" if call.method != "GET" else None

        async def attempt(number: int) -> HttpResponse:
            if self._disconnected:
                raise closed_error()
            value = credential or await self.account.token.current(self._exchange)
            request = self._request(call, number, value, key)
            response = await self._send(call.traffic, request)
            if response.status == 401 and credential is None and self.account.token.discard(value):
                # A token may be revoked before it expires. A new one is tried once.
                value = await self.account.token.current(self._exchange)
                request = self._request(call, number, value, key)
                response = await self._send(call.traffic, request)
            if response.status not in call.expected:
                raise_for_status(response, request, (value, *self._secrets))
            return response

        def observe(number: int, elapsed: float, outcome: HttpResponse | Exception, pause: float | None) -> None:
            self.observe(call, number, elapsed, outcome, pause)

        if retry is None:
            policy = self.retry_policy() if call.retries else NO_RETRIES
            retry = Retry(policy, idempotent=call.idempotent, clock=self.clock)
        return await with_retries(attempt, retry, observe)

    def _request(self, call: Call, number: int, credential: str, key: str | None) -> HttpRequest:
        timeout = call.timeout or self.config.timeout
        headers = {
            **self._static_headers,
            KEY_HEADER: credential,
            "accept": call.accept,
            "x-stainless-retry-count": str(number - 1),
            "x-stainless-read-timeout": f"{timeout:g}",
        }
        if call.method != "GET":
            headers["content-type"] = call.content_type
        if key is not None:
            headers["x-idempotency-key"] = key
        headers.update(_lower(call.headers))
        return HttpRequest(call.method, self.config.base_url + call.path, headers, call.body, timeout, call.upload)

    async def _send(self, traffic: Traffic, request: HttpRequest) -> HttpResponse:
        response = await self._transport.send(traffic, request)
        for _ in range(MAX_REDIRECTS):
            location = response.headers.get("location")
            if request.method != "GET" or not 300 <= response.status < 400 or not location:
                break
            request = _redirected(request, location)
            response = await self._transport.send(traffic, request)
        _note_deprecation(response)
        return response

    @contextlib.asynccontextmanager
    async def download(
        self, url: str, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """Reads a URL the server gave us, without our credential."""
        self.check_open()
        request = HttpRequest("GET", url, headers, b"", self.config.timeout)
        async with self._transport.stream(Traffic.REST, request) as (response, pieces):
            raise_for_status(response, request)
            yield response, pieces

    @contextlib.asynccontextmanager
    async def read(self, call: Call) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """Sends with the account's credential and reads the answer piece by piece. Nothing is repeated."""
        self.check_open()
        await self.flags()
        credential = await self.account.token.current(self._exchange)
        request = self._request(call, 1, credential, None)
        async with self._transport.stream(call.traffic, request) as (response, pieces):
            if response.status >= 300:
                response = response._replace(body=await anext(pieces, b""))
            raise_for_status(response, request, (credential, *self._secrets))
            yield response, pieces

    # Configuration and credential

    async def _fetch_flags(self) -> ClientConfigResponse:
        body = wire_json.encode(ClientConfigRequest(sdk_version=PROTOCOL_VERSION))
        call = Call("POST", "/api/v1/client/config", body, Traffic.SESSION)
        credential = await self.account.token.raw()
        try:
            return decode(ClientConfigResponse, await self._call_as(call, credential), call)
        except (APIStatusError, APIResponseValidationError) as error:
            if error.status_code not in (200, 404):
                raise
            raise APIResponseValidationError(
                error.response,
                error.body,
                f"The server at {self.config.base_url} does not speak this API: POST /api/v1/client/config was "
                f"answered with {_describe(error)}. Check base_url (TINKER_BASE_URL).",
            ) from error

    async def _exchange(self, credential: str) -> str:
        call = Call("POST", TOKEN_PATH, b"{}", Traffic.SESSION)
        return decode(AuthTokenResponse, await self._call_as(call, credential), call).jwt

    async def claims(self) -> dict[str, Any] | None:
        await self.flags()
        return await self.account.token.claims(self._exchange)

    # Telling the user

    def observe(
        self, call: Call, number: int, elapsed: float, outcome: HttpResponse | Exception, pause: float | None
    ) -> None:
        """One record per try for the hooks, and a line in the log when a call is going to be repeated."""
        if isinstance(outcome, Exception):
            status, error = getattr(outcome, "status_code", None), type(outcome).__name__
        else:
            status, error = outcome.status, None
        path = call.path.partition("?")[0]
        self.hooks.emit(Attempt(call.method, path, number, status, error, elapsed, pause))
        if isinstance(outcome, Exception) and pause is not None:
            self.tell_pause(outcome, pause)
        elif self._away_since is not None and not isinstance(outcome, Exception):
            logger.warning("The server answers again after %.0f s.", self.clock.now() - self._away_since)
            self._away_since = None

    def tell_pause(self, error: Exception, pause: float) -> None:
        """At once, then at most every ten seconds: a dead server must not go unnoticed, nor fill the log."""
        if classify(error).action is Action.PAUSE:
            self.hooks.emit(BillingPause("requests", pause))
        now = self.clock.now()
        if now - self._warned_at >= WARNING_INTERVAL_SECONDS:
            self._warned_at = now
            if self._away_since is None and isinstance(error, APIConnectionError):
                self._away_since = now
            # As text: a handler that keeps records would keep the error's frames, and with them the client.
            logger.warning("%s Trying again in %.1f s.", _shortened(str(error)), pause)

    # Running and reporting

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> APIFuture[T]:
        """Runs a coroutine on the loop; its error is reported, and closing the client ends it."""
        self.check_open()
        return futures.run(lambda: self.guard(make()), self.loop)

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        """Makes the running task one that closing the client ends."""
        task = asyncio.current_task()
        assert task is not None
        if task in self._tasks:
            yield
            return
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    @contextlib.contextmanager
    def outlasting(self) -> Iterator[None]:
        """Makes the running task one that closing the client waits for, a few seconds at most."""
        task = asyncio.current_task()
        assert task is not None
        self._last_words.add(task)
        try:
            yield
        finally:
            self._last_words.discard(task)

    async def say_last_words(self, timeout: float) -> None:
        """Waits for what may outlast the rest; what takes longer is not sent."""
        unsaid = set(self._last_words)
        if unsaid:
            _, unsaid = await asyncio.wait(unsaid, timeout=timeout)
        for task in unsaid:
            task.cancel()
        if unsaid:
            logger.warning(
                "Calls of log_metrics that were not sent before the client was closed: %d. To be sure of one, wait for "
                "its result().",
                len(unsaid),
            )

    async def guard(self, coroutine: Coroutine[Any, Any, T], *, report: bool = True) -> T:
        """Awaits for a task of this client, so that closing the client ends it."""
        if self._closed:  # closing has gone through the tasks already, and would miss this one
            coroutine.close()
            raise closed_error()
        with self.tracked():
            try:
                return await coroutine
            except asyncio.CancelledError:
                if self._closed:
                    raise closed_error() from None
                raise
            except Exception as error:
                if report:
                    self.report(error)
                raise

    def report(self, error: Exception) -> None:
        """Tells the server about an error that reaches the user, if reporting is on. Never waits."""
        if self._reporter is None and self.config.telemetry and not self._closed:
            self.start_reporting(None)
        if self._reporter is not None:
            self._reporter.record_exception(error)

    def start_reporting(self, session_id: str | None) -> None:
        """Begins to report for a session, or for a client without one."""
        if not self.config.telemetry:
            return
        if self._reporter is not None:
            self.loop.start_task(self._reporter.close())
        self._reporter = TelemetryReporter(
            functools.partial(_post_telemetry, weakref.ref(self)),
            session_id=session_id,
            sdk_version=PROTOCOL_VERSION,
            is_user_error=is_user_error,
            secrets=self._secrets,
        )
        self._reporter.start()
        self.hooks = Hooks((*self._local_hooks, telemetry_hook(self._reporter)))

    # Closing

    def check_open(self) -> None:
        background_loop()  # raises in a forked child
        if self._closed:
            raise closed_error()

    def on_close(self, action: Callable[[], None]) -> None:
        """Registers a method to be called when the client is closed; its object is held weakly."""
        self._on_close = [ref for ref in self._on_close if ref() is not None]
        self._on_close.append(weakref.WeakMethod(action))

    async def close(self, farewell: Callable[[], Awaitable[None]] | None = None) -> None:
        """Ends every call in progress with `ClientClosedError`, lets the owner say goodbye, and closes the pools.

        Metrics that were logged before are sent first.

        Whoever waits learns of it first: a server that does not answer the goodbye must not keep them waiting.
        """
        if self._closing is None:
            # A task of its own: the pools are closed even if whoever asked for it stops waiting.
            self._closing = self.loop.start_task(self._close(farewell))
        await asyncio.shield(self._closing)

    async def _close(self, farewell: Callable[[], Awaitable[None]] | None) -> None:
        self._closed = True
        for ref in self._on_close:
            action = ref()
            if action is not None:
                action()
        tasks = self._tasks - self._last_words
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        await self.say_last_words(LAST_WORDS_SECONDS)
        if farewell is not None:
            await farewell()
        if self._reporter is not None:
            await self._reporter.close()
        self._disconnected = True
        await self._transport.close()


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_LOGGED else text[: MAX_LOGGED - 3] + "..."


def closed_error() -> ClientClosedError:
    return ClientClosedError("This client is closed. Create a new ServiceClient to go on.")


async def _post_telemetry(ref: weakref.ref[Connection], body: bytes) -> None:
    connection = ref()
    if connection is not None:
        if connection.account.flags is None:  # nobody has reached this server yet, and telemetry shall not be the one
            raise APIConnectionError(message="The server has not been reached yet.")
        call = Call(
            "POST", "/api/v1/telemetry", body, Traffic.TELEMETRY, timeout=TELEMETRY_TIMEOUT_SECONDS, retries=False
        )
        await connection.call_for(TelemetryResponse, call)


def decode(result_type: type[M], response: HttpResponse, call: Call) -> M:
    """Decodes a JSON answer, or says what came instead."""
    try:
        return wire_json.decode(result_type, response.body)
    except InvalidInputError as error:
        raise APIResponseValidationError(
            ResponseSummary(response.status, _shown_headers(response)),
            _body_of(response.body),
            f"{call.method} {call.path} was answered with a body that does not fit {result_type.__name__}: {error} "
            "The server is not one this client knows, or something in between answers for it.",
        ) from error


def raise_for_status(response: HttpResponse, request: HttpRequest, secrets: Collection[str] = ()) -> None:
    """Some servers quote the key they refuse, so secrets are taken out of what becomes the error."""
    status = response.status
    if status < 300:
        return
    headers = {name: hide_known(value, secrets) for name, value in _shown_headers(response).items()}
    body = _body_of(_without(response.body, secrets))
    hint = f"It redirects to {headers.get('location')}; use that as base_url." if status < 400 else _HINTS.get(status)
    raise status_error_class(status)(
        f"Error code: {status} - {body} ({request.method} {urlsplit(request.url).path}).{f' {hint}' if hint else ''}",
        ResponseSummary(status, headers, request.summary),
        body,
        retry_after=parse_retry_after(headers),
    )


def _without(body: bytes, secrets: Collection[str]) -> bytes:
    if not any(secret.encode() in body for secret in secrets):
        return body
    return hide_known(body.decode("utf-8", "replace"), secrets).encode()


def _shown_headers(response: HttpResponse) -> dict[str, str]:
    """What an error keeps of the headers: by lower-case name, and no cookies."""
    return {name.lower(): value for name, value in response.headers.items() if name.lower() != "set-cookie"}


def _body_of(body: bytes) -> object:
    if not body:
        return None
    try:
        return wire_json.loads(body)
    except InvalidInputError:
        return body[:2000].decode("utf-8", "replace")


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    """Names of headers in lower case, so that one replaces the other however it is written."""
    return {name.lower(): value for name, value in headers.items()}


def _describe(error: APIStatusError | APIResponseValidationError) -> str:
    if error.status_code == 404:
        return "404 Not Found"
    kind = error.response.headers.get("content-type", "no content type")
    return f"a body of type {kind!r} that is no JSON object"


def _redirected(request: HttpRequest, location: str) -> HttpRequest:
    url = urljoin(request.url, location)
    same_origin = urlsplit(url)[:2] == urlsplit(request.url)[:2]
    return request._replace(url=url, headers=request.headers if same_origin else {})


def _note_deprecation(response: HttpResponse) -> None:
    note = response.headers.get("x-deprecation-note")
    if note:
        level = logging.ERROR if response.headers.get("x-deprecation-level") == "error" else logging.WARNING
        logger.log(level, "%s", note)


def _identity_headers() -> dict[str, str]:
    return {
        "User-Agent": f"AsyncTinker/Python {PROTOCOL_VERSION} tinsmith/{__version__}",
        "X-Stainless-Package-Version": PROTOCOL_VERSION,
        "X-Stainless-OS": platform.system() or "Unknown",
        "X-Stainless-Arch": {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(
            platform.machine().lower(), platform.machine() or "unknown"
        ),
        "X-Stainless-Runtime": platform.python_implementation(),
        "X-Stainless-Runtime-Version": ".".join(map(str, sys.version_info[:3])),
        "X-Stainless-Async": "async:asyncio",
    }
