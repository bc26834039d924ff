"""A worker that lives in a process below this one, and is spoken to through its standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import msgspec

from tinsmith.server.lives import CannotBeginError, Life
from tinsmith.server.messages import WorkerSettings

# Both are read once, when the process starts and torch loads.
WORKER_ENVIRONMENT = {
    # OpenMP's threads wait for work by spinning, which starves whoever else wants the cores.
    "GOMP_SPINCOUNT": "1000",
    # glibc takes every large tensor from the system anew, page by page: a fourteenth of the time of training on a CPU.
    # It can keep and reuse them; the worker gives back what it does not use when it has nothing to do.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296",
}
MAX_LINE_BYTES = 2**24


class ProcessLife(Life):
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input, self._output = process.stdin, process.stdout

    @classmethod
    async def begin(cls, module: str, settings: WorkerSettings) -> ProcessLife:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                env={**WORKER_ENVIRONMENT, **os.environ},
            )
        except OSError as error:  # no memory or no process left to start it with
            raise CannotBeginError(f"its process cannot be started: {error}") from error
        life = cls(process)
        life._input.write(msgspec.json.encode(settings) + b"\n")
        return life

    def wake(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # it has just died; its successor looks for itself
            self._input.write(b".")

    async def heard(self) -> AsyncIterator[bytes]:
        async for line in self._output:
            yield line

    async def ended(self) -> int:
        return await self._process.wait()

    def dismiss(self) -> None:
        self._input.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
