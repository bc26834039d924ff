"""A load balancer as simple as one can be: connections go to one server after the other, if it takes them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit


class LoadBalancer:
    """In a thread of its own; whoever it is given may come and go."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers = itertools.cycle([(str(parts.hostname), parts.port) for parts in map(urlsplit, urls)])
        self._num_servers = len(urls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="balancer")

    def __enter__(self) -> Self:
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._listening = starting.result()
        self.url = f"http://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._listening.close()
        open_ones = asyncio.all_tasks() - {asyncio.current_task()}
        for each in open_ones:
            each.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for _ in range(self._num_servers):
                with suppress(OSError):
                    there, back = await asyncio.open_connection(*next(self._servers)), (reader, writer)
                    await asyncio.gather(_copy(reader, there[1]), _copy(there[0], back[1]))
                    return
        finally:
            writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        with suppress(OSError):
            while piece := await source.read(2**16):
                target.write(piece)
                await target.drain()
    finally:
        target.close()
