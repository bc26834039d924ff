"""The body of a request that may be answered before it has arrived."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.types import Message

_DRAIN_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
"""A sender that pauses for longer may be waiting for the answer."""


class Body:
    """Passes on what comes, and knows whether there is more.

    Whoever is answered in the middle of sending does not see the answer: the connection is closed, and the system of
    the sender throws away what it had received. So what nobody wanted is read as well, up to a limit.
    """

    def __init__(self, request: Request) -> None:
        self._receive = request.receive
        self._is_over = not ("content-length" in request.headers or "transfer-encoding" in request.headers)
        # Who asks before sending would be told to go on.
        self._is_announced_only = "expect" in request.headers

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_over = not message.get("more_body", False)
        return message

    async def drain(self, limit: int) -> None:
        """Read the rest, and forget it."""
        if self._is_over or self._is_announced_only:
            return
        clock = asyncio.get_running_loop()
        end = clock.time() + _DRAIN_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_SECONDS) as patience:
                while not self._is_over and limit > 0:
                    limit -= len((await self.receive()).get("body", b""))
                    patience.reschedule(min(end, clock.time() + _PAUSE_SECONDS))
