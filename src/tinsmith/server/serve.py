"""The API on a port: uvicorn, with some things it does not do by itself."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

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


_TWO_LENGTHS = {b"content-length", b"transfer-encoding"}
"""If a proxy goes by the one and we by the other, a second request can hide in the body of the first."""

_refuse_two_lengths = Response(
    b'{"detail":"The request has both Content-Length and Transfer-Encoding. Send one of them."}',
    400,
    {"connection": "close"},
    "application/json",
)


class PatientOnce(H11Protocol):
    """A connection that is closed if the head of a request does not arrive in time: uvicorn would wait for ever."""

    _head_due: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whole_app = self.app
        self.app = self._answer_or_abort

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._await_head()
        else:
            self._head_due = None

    def _should_upgrade(self) -> bool:
        """There is nothing to upgrade to; uvicorn would say how to install something, for every such request."""
        return False

    async def _answer_or_abort(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An answer that is broken off ends the connection at once: uvicorn would wait until the rest was read."""
        answer = self.cycle
        await self._whole_app(scope, receive, send)
        if not answer.response_complete:
            if not self.transport.is_closing():
                self.transport.abort()
            await asyncio.sleep(0)  # so that uvicorn knows, and takes it for no fault

    def _await_head(self) -> None:
        """More of a head does not buy more time."""
        self._head_due = self._head_due or self.loop.time() + _HEAD_SECONDS
        self.timeout_keep_alive_task = self.loop.call_at(self._head_due, self.timeout_keep_alive_handler)


class ApiServer(uvicorn.Server):
    """Ends long polls before it waits for open requests to finish, so that stopping takes no half minute."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                self._serve_one,
                interface="asgi3",
                http=PatientOnce,
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._app = app

    async def _serve_one(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_two_lengths = scope["type"] == "http" and {name for name, _ in scope["headers"]} >= _TWO_LENGTHS
        answer = _refuse_two_lengths if has_two_lengths else self._app
        try:
            await answer(scope, receive, send)
        except h11.LocalProtocolError:
            # What came in the middle of the body was no HTTP, and uvicorn has said so in our place.
            log.info("a client broke the rules of HTTP")

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
