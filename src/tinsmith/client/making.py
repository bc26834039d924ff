"""Clients that can be used at once, while the server is still making what they stand for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, Generic, TypeVar, cast

from tinsmith.client import futures
from tinsmith.client.futures import APIFuture
from tinsmith.client.loop import BackgroundLoop
from tinsmith.errors import ClientClosedError

C = TypeVar("C")
T = TypeVar("T")


class InTheMaking(APIFuture[C], Generic[C, T]):
    """A client that is a future of itself: `client.result()` and `await client` give it once it is ready.

    Nobody has to ask: whatever is called before waits until the client is ready, and fails if it never will be. Others
    may wait for the same client, so a timeout, or a task that is cancelled, leaves the making going on; `cancel()`
    ends it.
    """

    def __init__(self, made: APIFuture[T], loop: BackgroundLoop) -> None:
        super().__init__(on_cancel=made.cancel)
        self._made = made
        self._loop = loop
        made.add_done_callback(lambda _: self._learn())

    def result(self, timeout: float | None = None) -> C:
        """The client itself, once it is ready; raises why it never will be."""
        super().result(timeout)
        return cast("C", self)

    def __await__(self) -> Generator[Any, None, C]:
        if self.done():
            return self.result()
        made, loop = self._made, self._loop
        yield from futures.run(lambda: when_made(made), loop).__await__()
        return cast("C", self)

    @property
    def _is_ready(self) -> bool:
        return self._made.done() and why_not(self._made) is None

    def _learn(self) -> None:
        if self._made.cancelled():
            self.cancel()
        elif error := why_not(self._made):
            self.fail(error)
        else:
            self.resolve(cast("C", None))  # not itself, which would be a circle


async def when_made(made: APIFuture[T]) -> T:
    """For an operation of the client, on the loop: whoever gives it up has not given up the client."""
    if not made.done():
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        made.add_done_callback(lambda _: loop.call_soon_threadsafe(over.set))
        await over.wait()
    if error := why_not(made):
        # Without the way that it has gone: it would hold all who were ever told, and what they were about to send.
        raise error.with_traceback(None)
    return made.result()


def why_not(made: APIFuture[Any]) -> BaseException | None:
    """What kept something from being made, which is over."""
    if made.cancelled():
        return ClientClosedError(
            "This client was given up (its cancel() was called) before it was ready; make a new one."
        )
    return made.exception()
