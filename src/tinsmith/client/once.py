"""Something that many ask for at the same time and that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tinsmith.errors import ClientClosedError

T = TypeVar("T")


class Once(Generic[T]):
    """Whoever asks while it is being done shares the outcome, also a failure: a dead server is tried once, not once
    per caller in turn. When the one who does it is cancelled or closed, the next one takes over. Used on the loop.
    """

    def __init__(self) -> None:
        self._running: asyncio.Future[T] | None = None

    async def do(self, work: Callable[[], Awaitable[T]]) -> T:
        while self._running is not None:
            running = self._running
            await asyncio.wait([running])
            if not running.cancelled():
                return running.result()
        return await self._lead(work)

    async def _lead(self, work: Callable[[], Awaitable[T]]) -> T:
        outcome = self._running = asyncio.get_running_loop().create_future()
        try:
            result = await work()
            outcome.set_result(result)
            return result
        except ClientClosedError:
            raise  # that concerns one client; the others go on
        except Exception as error:
            outcome.set_exception(error)
            outcome.exception()  # seen, even if nobody else waits
            raise
        finally:
            self._running = None
            outcome.cancel()
