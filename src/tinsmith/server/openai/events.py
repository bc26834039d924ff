"""Server-sent events: an answer that is written while it is made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinsmith.server.openai.asking import has_gone

log = logging.getLogger(__name__)

KEEP_ALIVE = b": waiting\n\n"
END = b"data: [DONE]\n\n"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""A proxy that collects the answer would spoil it."""


def event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class EventStream(Response):
    """Writes `events` for as long as there is somebody who reads them; `close` is called at the end, whatever it is.

    When `too_slow` is set, the reader is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        too_slow: asyncio.Event,
        close: Callable[[], Awaitable[None]],
        request_id: str,
    ) -> None:
        super().__init__(headers={**_HEADERS, "x-request-id": request_id})
        del self.headers["content-length"]
        self._events = events
        self._too_slow = too_slow
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns in the middle of the answer if it is broken off; the connection is closed then."""
        writing = asyncio.create_task(self._write(send))
        ends = [asyncio.create_task(has_gone(receive)), asyncio.create_task(self._wait_if_slow())]
        try:
            await asyncio.wait([writing, *ends], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, *ends):
                task.cancel()
            await asyncio.gather(writing, *ends, return_exceptions=True)
            await asyncio.shield(self._close())

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for each in self._events:
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait_if_slow(self) -> None:
        await self._too_slow.wait()
        log.info("A stream was broken off: it was not read, or too slowly.")
