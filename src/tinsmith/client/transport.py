"""One request in, one reply out: the only module that knows the HTTP library.

Each class of traffic has its own connection pool, so that thousands of waiting polls never delay a training call.
Redirects are not followed here: the credential travels in a header of our own, which must not reach another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tinsmith.client.config import Config
from tinsmith.errors import APIConnectionError, APITimeoutError, ConfigError, RequestSummary

if TYPE_CHECKING:
    import pyqwest

IDLE_SECONDS = 60.0
MIN_IN_FLIGHT = 4
EVERY_HOST = "*,0.0.0.0/0,::/0"
_NOT_TLS = "InvalidContentType"
"""What the library calls an answer to the first message of TLS that is none."""


class Traffic(enum.Enum):
    """A class of requests with a pool of its own; the value is how many may be in flight at once."""

    SESSION = ("session", 50)
    TRAIN = ("train", 50)
    TRAIN_POLL = ("train-poll", 200)
    SAMPLE = ("sample", 400)
    POLL = ("poll", 2000)  # for samples, which may wait in thousands
    REST = ("rest", 50)
    TELEMETRY = ("telemetry", 4)

    @property
    def max_in_flight(self) -> int:
        return self.value[1]


Upload = Callable[[], AsyncIterator[bytes]]
"""Makes the pieces of a body, once for every try."""


class HttpRequest(NamedTuple):
    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout: float
    upload: Upload | None = None
    """What is sent in place of the body, if it is too large to be in memory."""

    @property
    def summary(self) -> RequestSummary:
        """Without the query, which may be the signature of a link."""
        return RequestSummary(self.method, self.url.partition("?")[0])

    def __repr__(self) -> str:
        """Tools that show local variables must not show the key."""
        return f"HttpRequest({' '.join(self.summary)}, {len(self.body)} bytes)"


class HttpResponse(NamedTuple):
    status: int
    headers: Mapping[str, str]
    """Looked up without regard to case."""
    body: bytes


class Transport:
    """The pools of one account. Made on the background loop, used there only."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pools: dict[Traffic, _Pool] = {}

    async def send(self, traffic: Traffic, request: HttpRequest) -> HttpResponse:
        pool = self._pool(traffic)
        async with pool.slots:
            with _translated_errors(request):
                async with asyncio.timeout(request.timeout):
                    content = request.upload() if request.upload else request.body
                    reply = await pool.client.execute(request.method, request.url, request.headers, content)
        return HttpResponse(reply.status, reply.headers, reply.content)

    @contextlib.asynccontextmanager
    async def stream(
        self, traffic: Traffic, request: HttpRequest
    ) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """A reply whose body is read piece by piece; the timeout bounds each wait, not the whole."""
        async with contextlib.AsyncExitStack() as stack:
            with _translated_errors(request):
                client = self._pool(traffic).client
                async with asyncio.timeout(request.timeout):
                    reply = await stack.enter_async_context(
                        client.stream(request.method, request.url, request.headers, request.body)
                    )
            # Out of the translation: what the reader of the body raises is not ours to rename.
            yield HttpResponse(reply.status, reply.headers, b""), _pieces(reply, request)

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.transport.aclose()
        self._pools.clear()

    def _pool(self, traffic: Traffic) -> _Pool:
        if traffic not in self._pools:
            self._pools[traffic] = _open_pool(self._config, traffic)
        return self._pools[traffic]


class _Pool(NamedTuple):
    transport: Any
    client: Any
    slots: asyncio.Semaphore


def _open_pool(config: Config, traffic: Traffic) -> _Pool:
    import pyqwest  # here, so that importing the package costs nothing

    limit = _max_in_flight(config, traffic)
    transport = pyqwest.HTTPTransport(
        tls_include_system_certs=True,
        proxy=_no_proxy() if config.proxy == "" else config.proxy,
        connect_timeout=config.connect_timeout,
        pool_idle_timeout=IDLE_SECONDS,
        pool_max_idle_per_host=limit,
        use_system_dns=True,
        follow_redirects=False,
        enable_otel=False,
    )
    return _Pool(transport, pyqwest.Client(transport), asyncio.Semaphore(limit))


def _no_proxy() -> pyqwest.Proxy:
    """One that is used for no host, which keeps the library from looking for others in the environment."""
    import pyqwest

    return pyqwest.Proxy("http://127.0.0.1:9", no_proxy=EVERY_HOST)


def _max_in_flight(config: Config, traffic: Traffic) -> int:
    """Without TLS every request in flight is an open file; all pools together take half of what the process may open.

    With TLS, HTTP/2 carries them over a few connections.
    """
    if config.base_url.startswith("https:"):
        return traffic.max_in_flight
    wanted = sum(each.max_in_flight for each in Traffic)
    share = traffic.max_in_flight * (_open_file_limit() // 2) // wanted
    return min(traffic.max_in_flight, max(MIN_IN_FLIGHT, share))


def _open_file_limit() -> int:
    try:
        import resource
    except ImportError:  # no such limit on Windows
        return 4096
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


async def _pieces(reply: pyqwest.Response, request: HttpRequest) -> AsyncIterator[bytes]:
    content = reply.content
    while True:
        with _translated_errors(request):
            async with asyncio.timeout(request.timeout):
                piece = await anext(content, None)
        if piece is None:
            return
        yield bytes(piece)


@contextlib.contextmanager
def _translated_errors(request: HttpRequest) -> Iterator[None]:
    """Foreign errors become ours in one place; what the library says is kept as the reason."""
    import pyqwest

    what = " ".join(request.summary)
    try:
        yield
    except pyqwest.ConnectTimeout as error:
        raise APITimeoutError(request.summary, f"{what} failed: no connection could be made in time.") from error
    except TimeoutError as error:
        raise APITimeoutError(request.summary, f"{what} gave no answer within {request.timeout:g} s.") from error
    except (
        ConnectionError,  # there never was a connection: `retry.may_have_arrived` relies on that
        pyqwest.RemoteProtocolError,
        pyqwest.ReadError,
        pyqwest.WriteError,
        pyqwest.StreamError,
    ) as error:
        raise APIConnectionError(request.summary, f"{what} failed: {_reason(error)}.{_hint(error, request)}") from error
    except ValueError as error:
        if "header" in str(error):  # its text quotes the header, which may be the key
            raise ConfigError(
                f"{what} cannot be sent: a header or the API key holds a character HTTP forbids."
            ) from None
        raise ConfigError(f"{what} cannot be sent: {error}") from error


def _hint(error: Exception, request: HttpRequest) -> str:
    if not isinstance(error, ConnectionError):
        return ""
    if _NOT_TLS in str(error):
        place = request.summary.url.partition("://")[2].partition("/api/v1/")[0]
        return f" The server speaks plain HTTP; use http://{place}."
    return " Is the server running? Check base_url."


def _reason(error: Exception) -> str:
    """The innermost cause: the library prints the whole chain, outermost first."""
    return str(error).rsplit(": ", 1)[-1] or type(error).__name__
