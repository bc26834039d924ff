"""The API on a port: uvicorn, with some things it does not do by itself."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from functools import partial
from types import FrameType

import httptools
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tinsmith.errors import ConfigError
from tinsmith.server.app import drain

log = logging.getLogger(__name__)

_BACKLOG = 2048
_GRACE_SECONDS = 10
_OPEN_FILES = 65536

_HEAD_SECONDS = 20.0
"""How long the head of a request may take, from its first byte or from the beginning of the connection."""

_KEEP_ALIVE_SECONDS = 100
"""How long a connection may be idle: longer than clients keep theirs, which is 90 s at most. One that the server closes
may have a request on its way, and a heartbeat that finds none open has to make one."""

_UNREAD_SECONDS = 60
"""How long an answer may lie unread before the connection is given up."""


_HEAD_BYTES = 64 * 1024
"""How long a head, an extension of a chunk or what follows the last chunk may be: the parser has no limit."""

_MAX_AHEAD = 256
"""How many requests may wait for the answer to an earlier one: each takes some hundred times the memory it was sent in,
and uvicorn goes on reading after every answer."""


class PatientOnce(HttpToolsProtocol):
    """A connection that is closed if the head of a request does not arrive in time, or is endless: uvicorn would wait
    for ever, and keep all of it.
    """

    _head_due: float | None = None
    _answered: RequestResponseCycle | None = None
    _is_head = True
    _is_upgrade = False
    _data = b""
    _idle_bytes = 0
    """Those that came since the last end of a head, piece of a body or end of a request."""
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        self._idle_bytes += len(data)
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._idle_bytes > _HEAD_BYTES:
            self.send_400_response(f"The head of the request is longer than {_HEAD_BYTES} bytes.")
        elif self._is_answering:
            self._head_due = None
        else:  # what is left of a request that is answered already comes under the same limit
            self._await_head()

    def on_message_begin(self) -> None:
        self._is_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_head:  # what follows the last chunk is none of the headers that a proxy has looked at
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_head, self._idle_bytes = False, 0
        num_hosts = [name for name, _ in self.headers].count(b"host")
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise ValueError("The request must have one host: a proxy may have looked at another one.")
        if len(self.pipeline) >= _MAX_AHEAD:
            raise ValueError(f"More than {_MAX_AHEAD} requests came before the answer to the first of them.")
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("This is no proxy.")
        self._is_upgrade = self.parser.should_upgrade()
        if not self._is_upgrade:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._idle_bytes = 0
        if not self._is_upgrade:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Not where the client would take it for the answer to an earlier request, or for the rest of one."""
        is_next = self.cycle is self._answered
        if self._is_answering and (not is_next or self.cycle.response_started or not self.cycle.more_body):
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _unsupported_upgrade_warning(self) -> None:
        """There is nothing to upgrade to, so it is an ordinary request, of which the parser would not read the body. It
        starts anew with the same request without the wish (some clients, as Java's, have it with every request).
        """
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        kept = [(name, value) for name, value in self.headers if name not in (b"connection", b"upgrade")]
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in kept]
        lines += [b"connection: close", b"", self._data[upgrade.args[0] :]]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        super().data_received(b"\r\n".join(lines))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._read()
        super().resume_writing()

    def _await_reader(self) -> None:
        """The system's own limit (`listen`) does not hold for who goes on sending."""
        left = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < left:
                self._await_reader()
            else:
                self.transport.abort()

        self._unread = self.loop.call_later(_UNREAD_SECONDS, look)

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the last request of a connection, and another may be answered that came before it. If the other
        side broke it off, it would also keep what came of a head until its time is over.
        """
        self._read()
        self._unset_keepalive_if_required()
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """A body that does not come, or an answer that is not read, does not hold up a stop to its last second: what is
        left then is cancelled by uvicorn, which takes that for a fault.
        """
        super().shutdown()
        self.loop.call_later(_GRACE_SECONDS / 2, self.transport.abort)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answered = cycle
        super()._start_asgi_task(cycle, partial(self._answer_or_abort, cycle, app))

    async def _answer_or_abort(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """An answer that is broken off ends the connection at once: uvicorn would wait until the rest was read."""
        await app(scope, receive, send)
        if not cycle.response_complete:
            if not self.transport.is_closing():
                self.transport.abort()
            await asyncio.sleep(0)  # so that uvicorn knows, and takes it for no fault

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        """More of a head does not buy more time."""
        self._unset_keepalive_if_required()
        self._head_due = self._head_due or self.loop.time() + _HEAD_SECONDS
        self.timeout_keep_alive_task = self.loop.call_at(self._head_due, self.timeout_keep_alive_handler)


class ApiServer(uvicorn.Server):
    """Ends long polls before it waits for open requests to finish, so that stopping takes no half minute."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                http=PatientOnce,
                ws="none",
                loop="asyncio",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            log.info("%s: the server stops.", signal.Signals(sig).name)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain(self._app)
        await super().shutdown(sockets)


def allow_many_connections() -> None:
    """Every connection is an open file, of which a process may have 1,024 unless it asks for more."""
    try:
        import resource
    except ImportError:  # no such limit on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for `ApiServer.run(sockets=[...])`; port 0 takes a free one.

    It says that it speaks TCP, which sockets usually leave out: only then does asyncio switch Nagle's algorithm off on
    the connections, which would hold back the second half of every answer for 40 ms.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; connections take it over from here
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREAD_SECONDS)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ConfigError(
            f"Cannot listen on {host}, port {port}: {reason}. Choose others with --host and --port."
        ) from error
    return listener
