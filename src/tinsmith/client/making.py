"""Clients that can be used at once, while the server is still making what they stand for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, Self, TypeVar

from tinsmith.client.futures import APIFuture

T = TypeVar("T")


class InTheMaking(Generic[T]):
    """A future of itself: `client.result()` and `await client` give the client once it is ready, or raise why not.

    Nobody has to ask: whatever is called before waits until the client is ready, and fails if it never will be.
    """

    def __init__(self, made: APIFuture[T]) -> None:
        self._made = made

    def result(self, timeout: float | None = None) -> Self:
        """The client itself, when it is ready. A timeout leaves the making going on."""
        self._made.result(timeout)
        return self

    async def result_async(self, timeout: float | None = None) -> Self:
        await self._made.result_async(timeout)
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self._made.__await__()
        return self

    async def coroutine(self) -> Self:
        """The client, when it is ready; for what takes a coroutine and nothing else, such as `asyncio.create_task`."""
        return await self

    def future(self) -> Future[Self]:
        """The client, when it is ready; for what takes a `concurrent.futures.Future`. Cancelling it ends the making."""
        ready: APIFuture[Self] = APIFuture(on_cancel=self._made.cancel)
        self._made.add_done_callback(lambda _: self._tell(ready))
        return ready

    @property
    def _is_ready(self) -> bool:
        return self._made.done() and why_not(self._made) is None

    def _tell(self, ready: APIFuture[Self]) -> None:
        error = why_not(self._made)
        if error is None:
            ready.resolve(self)
        elif self._made.cancelled():
            ready.cancel()
        else:
            ready.fail(error)


async def when_made(made: APIFuture[T]) -> T:
    """For an operation of the client: whoever gives it up has not given up the client."""
    if not made.done():
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        made.add_done_callback(lambda _: loop.call_soon_threadsafe(over.set))
        await over.wait()
    if error := why_not(made):
        raise error
    return made.result()


def why_not(made: Future[Any]) -> BaseException | None:
    """What kept something from being made, which is over."""
    return CancelledError() if made.cancelled() else made.exception()
