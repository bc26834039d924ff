"""The API on a port: uvicorn, with two things it does not do by itself."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette

from tinsmith.errors import ConfigError
from tinsmith.server.app import drain

_BACKLOG = 2048
_GRACE_SECONDS = 10


class ApiServer(uvicorn.Server):
    """Ends long polls before it waits for open requests to finish, so that stopping takes no half minute."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_SECONDS)
        )
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain(self._app)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for `ApiServer.run(sockets=[...])`; port 0 takes a free one.

    It says that it speaks TCP, which sockets usually leave out: only then does asyncio switch Nagle's algorithm off on
    the connections, which would hold back the second half of every answer for 40 ms.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
