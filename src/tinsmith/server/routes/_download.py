"""A file on its way to a reader: one of the reader's open requests, and broken off when its key is revoked."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tinsmith.server.exporting import BrokenExportError
from tinsmith.server.routes._call import ASK_AGAIN_SECONDS, paced
from tinsmith.server.store import StoreUnavailableError

log = logging.getLogger(__name__)


class _RevokedError(Exception):
    pass


class Download(Response):
    """`answer`, as long as its reader may read and does; `held` is given back when it is over."""

    def __init__(
        self, answer: Response, may_read: Callable[[], Awaitable[bool]], held: contextlib.ExitStack, owner: str
    ) -> None:
        self.status_code, self.raw_headers = answer.status_code, answer.raw_headers
        self._answer = answer
        self._may_read = may_read
        self._held = held
        self._owner = owner
        self._looked_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns in the middle of the answer if it is broken off; the connection is closed then."""
        with self._held:
            try:
                async with paced() as have_passed:

                    async def send_on(message: Message) -> None:
                        await self._look_again()
                        await send(message)
                        have_passed(len(message.get("body", b"")))

                    await self._answer(scope, receive, send_on)
            except TimeoutError:
                self._tell("it was not read, or too slowly")
            except _RevokedError:
                self._tell("its key was revoked")
            except BrokenExportError as error:
                self._tell(str(error))

    async def _look_again(self) -> None:
        if time.monotonic() - self._looked_at < ASK_AGAIN_SECONDS:
            return
        # What cannot be asked now is asked again: nobody can revoke a key in a database that is out of reach.
        with contextlib.suppress(StoreUnavailableError, TimeoutError):
            if not await self._may_read():
                raise _RevokedError
        self._looked_at = time.monotonic()

    def _tell(self, why: str) -> None:
        log.info("A download was broken off: %s.", why, extra={"owner": self._owner})
