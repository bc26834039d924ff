"""One request on its way through an endpoint: who asks, what was sent, and the services that answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.errors import APIStatusError, InvalidInputError, ResponseSummary, status_error_class
from tinsmith.server.auth import Authority, Caller, Door
from tinsmith.server.checkpoints import Folders
from tinsmith.server.config import ServerConfig, is_loopback
from tinsmith.server.models import ModelFacts
from tinsmith.server.quotas import Backlog, Conversions, Incoming, OpenRequests, Paperwork
from tinsmith.server.rates import Rates
from tinsmith.server.reasons import limit_of
from tinsmith.server.recent import Recent
from tinsmith.server.routes._intake import Intake
from tinsmith.server.storage import Storage
from tinsmith.server.store import Store
from tinsmith.server.store.records import Enqueued, Heartbeat, Sampler, SessionState, Submission
from tinsmith.server.store.records import Model as TrainedModel
from tinsmith.server.streams import Streams
from tinsmith.server.texts import Texts
from tinsmith.server.waiting import Waiting, Workers
from tinsmith.types._model import Model
from tinsmith.wire import json

if TYPE_CHECKING:
    from tinsmith.server.openai.places import Places

M = TypeVar("M", bound=Model)
E = TypeVar("E", bound=Exception)
P = ParamSpec("P")
T = TypeVar("T")

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_SMALL_BODY_BYTES = 4 * 2**20
_WORTH_A_THREAD = 64 * 1024
"""Bytes above which decoding would hold up the other requests for a millisecond or more."""

_SILENCE_SECONDS = 60.0
"""How long a body or a file may pause on its way: a client that is gone without a word must not be waited for."""

_LEAST_BYTES_PER_SECOND = 16 * 1024
"""How quickly it must pass, after a pause that it may make once: a trickle would hold its connection for days."""

_FIRST_PIECE_SECONDS = 0.5
"""How long is waited for the first bytes of a body that is too large; its sender may be waiting for the answer."""

_WINDOW_BYTES = 8 * 2**20
"""What a zstd decoder should support, by RFC 8878; a frame that wants more memory than this is refused."""

_PIECE_BYTES = 1024
"""Inflated at a time: even if every block in it were as small and its content as large as can be, that is 32 MiB."""


_BEGINNING_BYTES = 2**17 + 1024
"""Kept of a body that is too large: nothing is to be had of a zstd frame before its first block is whole."""

_LARGE_JSON_BYTES = 2**20
_JSON_GROWTH = 8
"""So many times larger than its text is what JSON is decoded to, as long as it is good for anything."""

_LONGEST_DETAIL = 1000

ASK_AGAIN_SECONDS = 1.0
"""How long a key is taken for good within one request."""


def status_error(status: int, detail: str) -> APIStatusError:
    """The error that becomes an answer with this status."""
    return status_error_class(status)(detail, ResponseSummary(status, {}))


def forget_way(error: E) -> E:
    """The error, for whoever keeps it or is done with it, without the functions that it has passed.

    One of them often holds the error in turn, or what is waiting for it. Such a circle would live on, with the body of
    the request and all that was decoded of it, until the next look for rubbish, which is a minute away.
    """
    earlier: BaseException | None = error
    while earlier is not None and earlier.__traceback__ is not None:  # errors may be the causes of each other
        earlier.__traceback__ = None
        earlier = earlier.__cause__ or earlier.__context__
    return error


class TooLargeError(APIStatusError):
    """413: a body is larger than what is accepted of it."""

    def __init__(self, message: str, begun: bytes) -> None:
        super().__init__(message, ResponseSummary(413, {}))
        self.begun = begun
        """The first bytes as they came, if any were read."""


def shortened(detail: str) -> str:
    """The beginning and the end, which has the remedy: a value of megabytes is not sent back, nor kept."""
    half = _LONGEST_DETAIL // 2
    return detail if len(detail) <= _LONGEST_DETAIL else f"{detail[:half]} ... {detail[-half:]}"


@dataclass(frozen=True)
class Services:
    """What every endpoint may use."""

    config: ServerConfig
    store: Store
    models: Mapping[str, ModelFacts]
    workers: Workers
    authority: Authority
    door: Door
    waiting: Waiting
    storage: Storage
    intake: Intake[Submission, Enqueued]
    heartbeats: Intake[Heartbeat, SessionState | None]
    open_requests: OpenRequests
    conversions: Conversions
    incoming: Incoming
    backlog: Backlog
    paperwork: Paperwork
    logged_metrics: Paperwork
    """Apart, so that whoever logs a lot can still open sessions; what is logged is thinned every minute."""
    refusals: Counter[str]
    """How often a limit was the reason to refuse, by its name."""
    storing: Executor
    submitting: Executor
    decoding: Executor
    filing: Executor
    """For what may have to fetch files from elsewhere first: nobody else waits for that."""
    models_in_use: Recent[tuple[str, str], TrainedModel]
    """By owner and id: every operation of a training loop asks for the same one."""
    samplers_in_use: Recent[tuple[str, str], Sampler]
    texts: Texts
    streams: Streams
    places: Places
    rates: Rates

    @property
    def folders(self) -> Folders:
        """Those of checkpoints."""
        return self.storage.checkpoints

    def count_refusal(self, error: Exception) -> None:
        """If a limit was the reason."""
        if (limit := limit_of(error)) is not None:
            self.refusals[limit] += 1


async def identified(request: Request, services: Services) -> Caller:
    """Who is asking, by the credential that was sent along."""
    credential = request.headers.get("x-api-key") or _bearer(request)
    if not credential:
        raise status_error(
            401,
            "There is no API key in the header X-API-Key, nor as a bearer token. Set TINKER_API_KEY, or "
            "OPENAI_API_KEY.",
        )
    caller = await services.door.caller(credential)
    if caller is None:
        raise status_error(
            401, "This API key is unknown or was revoked. `tinsmith keys create`, run where the server is, makes one."
        )
    if caller.key is None:
        _check_host(request)
    return caller


def _check_host(request: Request) -> None:
    """Without keys, whoever is on this machine is let in, and so would be a web page whose name leads to it."""
    host = request.url.hostname
    if host is not None and not is_loopback(host):
        raise status_error(
            403,
            f"This server has no API keys, so it answers to names of its own machine alone, such as 127.0.0.1, and not "
            f"to {host[:100]!r}. To reach it by that name, make a key where it runs: `tinsmith keys create NAME`.",
        )


def _bearer(request: Request) -> str | None:
    """The key as clients of OpenAI's API send it."""
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else None


class HeldMemory:
    """What the body of one request takes up, of what its owner may; given back when the request is answered."""

    def __init__(self, incoming: Incoming, owner: str) -> None:
        self._incoming = incoming
        self._owner = owner
        self._size = 0

    def grow(self, size: int) -> None:
        self._incoming.hold(self._owner, size)
        self._size += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._incoming.let_go(self._owner, self._size)


@dataclass(frozen=True)
class Call:
    request: Request
    caller: Caller
    services: Services
    memory: HeldMemory
    since: float = field(default_factory=time.monotonic)
    named: dict[str, str] = field(default_factory=dict)
    """What it is about, besides what its path names: for the audit trail, if it is refused."""

    @property
    def owner(self) -> str:
        return self.caller.owner

    @property
    def store(self) -> Store:
        return self.services.store

    async def check_again(self) -> None:
        """The key may have been revoked since the request came. Who came only now need not be asked again."""
        if time.monotonic() - self.since > ASK_AGAIN_SECONDS:
            await identified(self.request, self.services)

    def part(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])

    async def stored(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call of the store (or anything else that blocks) in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.services.storing, lambda: work(*args, **kwargs))

    async def filed(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what needs the files of checkpoints in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.services.filing, lambda: work(*args, **kwargs))

    async def decoded(self, decode: Callable[[bytes], T], body: bytes) -> T:
        return await self.worked(len(body), lambda: decode(body))

    async def worked(self, size: int, work: Callable[[], T]) -> T:
        """Work on so many bytes: here, or in a thread if it would take long."""
        if size < _WORTH_A_THREAD:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.services.decoding, work)

    async def read(self, cls: type[M], limit: int = _SMALL_BODY_BYTES) -> M:
        """The JSON body as an object of this class."""
        body = await self.json_body(limit)
        return await self.decoded(lambda data: cls.from_builtins(parse_json(data)), body)

    async def json_body(self, limit: int = _SMALL_BODY_BYTES) -> bytes:
        self.expect_type(JSON)
        body = await self.body(limit, limit)
        if len(body) > _LARGE_JSON_BYTES:
            self.memory.grow(_JSON_GROWTH * len(body))
        return body

    def expect_type(self, *legal: str) -> str:
        """The content type, which must be one of these; none at all counts as the first."""
        sent = self.request.headers.get("content-type", legal[0]).partition(";")[0].strip().lower()
        if sent not in legal:
            raise status_error(415, f"The content type {sent!r} is not understood here; send {' or '.join(legal)}.")
        return sent

    async def body(self, limit: int, inflated_limit: int) -> bytes:
        """What was sent, unpacked; `TooLargeError` if that is more than the limits."""
        raw = await _read(self.request, limit, self.memory)
        await self.check_again()
        encoding = self.request.headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            return raw
        if encoding != "zstd":
            raise status_error(415, f"The content encoding {encoding!r} is not understood; send zstd or none.")
        return await self.decoded(lambda data: _inflated(data, inflated_limit, self.memory), raw)

    async def beginning(self, too_large: TooLargeError) -> bytes:
        """The first bytes of a body that is too large, unpacked; none where they are not to be had."""
        begun = too_large.begun
        if not begun and "expect" not in self.request.headers:
            begun = await _first_bytes(self.request)
        if self.request.headers.get("content-encoding", "identity").strip().lower() == "zstd":
            return _first_inflated(begun)
        return begun


def plain_refusal(status: int, detail: str, error: Exception | None = None) -> Response:
    return reply_plain({"detail": shortened(detail)}, status)


class Endpoint(NamedTuple):
    """One line of the API: where it is, what answers it, and what goes in and out."""

    method: str
    path: str
    answer: Callable[[Call], Awaitable[Response]]
    takes: type[Model] | None = None
    gives: type[Model] | None = None
    takes_protobuf: bool = False
    gives_protobuf: bool = False
    is_open: bool = False
    """Whether it answers without a key."""

    also_at: str = ""
    """Another path under which it is found."""

    refusal: Callable[[int, str, Exception | None], Response] = plain_refusal
    """How its refusals are written: from the status, what is to be said, and the error, if there was one."""

    when_away: Callable[[], Awaitable[Response]] | None = None
    """What answers while the database is out of reach and no caller can be told from another; else that is a 503."""


def parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except InvalidInputError as error:
        raise status_error(400, error.message) from None


def reply(value: Model, status: int = 200) -> Response:
    return Response(json.encode(value), status, media_type=JSON)


def reply_plain(value: object, status: int = 200) -> Response:
    return Response(json.encode(value), status, media_type=JSON)


def nothing() -> Response:
    return Response(status_code=204)


@contextlib.asynccontextmanager
async def paced() -> AsyncIterator[Callable[[int], None]]:
    """`TimeoutError` if bytes pass too slowly, or none for long; what is given is to be told how many have passed."""
    clock = asyncio.get_running_loop()
    started, passed = clock.time(), 0
    async with asyncio.timeout(_SILENCE_SECONDS) as patience:

        def have_passed(size: int) -> None:
            nonlocal passed
            passed += size
            earned = passed / _LEAST_BYTES_PER_SECOND
            patience.reschedule(min(clock.time(), started + earned) + _SILENCE_SECONDS)

        yield have_passed


async def _read(request: Request, limit: int, memory: HeldMemory) -> bytes:
    """The body, as far as the limit allows: what is larger is refused before it takes memory."""
    declared = request.headers.get("content-length", "")
    expected = int(declared) if declared.isdecimal() else 0
    if expected > limit:
        raise TooLargeError(_too_large(expected, limit), b"")
    memory.grow(expected)  # at once: bodies that were half received when the room ended would all be in vain
    body = bytearray()
    stream: AsyncIterator[bytes] = request.stream()
    try:
        async with paced() as have_passed:
            async for piece in stream:
                if len(body) + len(piece) > limit:
                    begun = bytes(body[:_BEGINNING_BYTES] + piece[:_BEGINNING_BYTES])
                    raise TooLargeError(_too_large(len(body) + len(piece), limit), begun)
                memory.grow(0 if expected else len(piece))
                body += piece
                have_passed(len(piece))
    except TimeoutError:
        raise status_error(
            408, f"The body stopped, or came too slowly, after {len(body):,} bytes. Send the request again."
        ) from None
    return bytes(body)


def _too_large(size: int, limit: int) -> str:
    return f"The body has {size:,} bytes or more; at most {limit:,} are accepted. Send it in parts."


async def _first_bytes(request: Request) -> bytes:
    begun = bytearray()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_PIECE_SECONDS):
            async for piece in request.stream():
                begun += piece
                if len(begun) >= _BEGINNING_BYTES:
                    break
    return bytes(begun)


def _first_inflated(begun: bytes) -> bytes:
    """No more than is needed, whatever the rest would unpack to."""
    import zstandard

    try:
        return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(begun).read(_PIECE_BYTES)
    except zstandard.ZstdError:
        return b""


def _inflated(body: bytes, limit: int, memory: HeldMemory) -> bytes:
    """The content of one whole zstd frame. Whatever it claims or holds, little more than `limit` bytes come of it."""
    import zstandard

    content, position = bytearray(), 0
    frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
    try:
        while position < len(body) and not frame.eof:
            piece = frame.decompress(body[position : position + _PIECE_BYTES])
            position += _PIECE_BYTES
            if len(content) + len(piece) > limit:
                message = f"The body inflates to more than {limit:,} bytes. Send it in parts."
                raise TooLargeError(message, body[:_BEGINNING_BYTES])
            memory.grow(len(piece))
            content += piece
    except zstandard.ZstdError as error:
        raise status_error(400, f"The body is not a zstd frame: {error}") from None
    if not frame.eof or frame.unused_data or position < len(body):
        raise status_error(400, "The body must be one whole zstd frame and nothing else.")
    return bytes(content)
