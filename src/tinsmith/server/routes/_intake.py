"""What arrives together is written together: the wait for the lock and the disk is the same for one as for many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from tinsmith.errors import InvalidInputError

_MAX_TOGETHER = 256

A = TypeVar("A")
W = TypeVar("W")


class Intake(Generic[A, W]):
    """`write` gives back one answer for each that arrived, in their order.

    What is not urgent may wait for more to come, `patience` seconds: the fewer writes, the less others wait for them.
    """

    def __init__(self, write: Callable[[Sequence[A]], Awaitable[list[W]]], patience: float = 0.0) -> None:
        self._write = write
        self._patience = patience
        self._arrived: list[tuple[A, asyncio.Future[W]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def add(self, arrival: A) -> W:
        """Returns when it is written."""
        future: asyncio.Future[W] = asyncio.get_running_loop().create_future()
        self._arrived.append((arrival, future))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        return await future

    async def rest(self, seconds: float) -> None:
        """Until nothing is left to be written, or for so many seconds."""
        await asyncio.sleep(0)  # what has come by now is seen first
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=seconds)

    async def _write_all(self) -> None:
        """Whatever arrives while one batch is being written makes up the next one."""
        try:
            while self._arrived:
                await asyncio.sleep(self._patience)
                batch, self._arrived = self._arrived[:_MAX_TOGETHER], self._arrived[_MAX_TOGETHER:]
                await self._write_batch(batch)
        finally:
            self._writer = None

    async def _write_batch(self, batch: list[tuple[A, asyncio.Future[W]]]) -> None:
        try:
            answers = await self._write([arrival for arrival, _ in batch])
        except InvalidInputError as error:
            if len(batch) == 1:
                _fail(batch, error)
                return
            # Only the one that cannot be stored is to blame. It is found in a few steps: others wait meanwhile.
            middle = len(batch) // 2
            await self._write_batch(batch[:middle])
            await self._write_batch(batch[middle:])
        except Exception as error:  # noqa: BLE001 - it belongs to those who wait
            _fail(batch, error)
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


def _fail(batch: Sequence[tuple[object, asyncio.Future[Any]]], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
