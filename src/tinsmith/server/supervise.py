"""Starts the worker processes, restarts those that die, and passes messages between them and the API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from tinsmith.server.config import ServerConfig

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
STABLE_SECONDS = 60.0
"""A worker that lived so long did not die of its start."""
STOP_SECONDS = 30.0

# OpenMP's threads wait for work by spinning, which starves whoever else wants the cores. It is read when torch loads.
WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000"}


class WorkerProcesses:
    """One process per base model."""

    def __init__(self, config: ServerConfig, folders: Mapping[str, Path]) -> None:
        self._config = config
        self._keepers = {
            name: _Keeper(name, self._settings(name, folder), self._hear) for name, folder in folders.items()
        }
        self._notices: list[Callable[[Sequence[str]], None]] = []

    def wake(self, base_model: str) -> None:
        """Tells a worker that there is work. Never blocks, never fails."""
        keeper = self._keepers.get(base_model)
        if keeper is not None:
            keeper.wake()

    def is_ready(self, base_model: str) -> bool:
        return base_model in self._keepers and self._keepers[base_model].is_ready

    def on_done(self, notice: Callable[[Sequence[str]], None]) -> None:
        self._notices.append(notice)

    async def start(self) -> None:
        for keeper in self._keepers.values():
            keeper.start()

    async def ready(self) -> None:
        """Waits until every worker has loaded its model."""
        await asyncio.gather(*(keeper.became_ready.wait() for keeper in self._keepers.values()))

    async def stop(self) -> None:
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))

    def _settings(self, name: str, folder: Path) -> bytes:
        config = self._config
        settings = {
            "base_model": name,
            "folder": str(folder),
            "database": config.database_url,
            "state": str(config.state),
            "device": config.device,
            "dtype": config.dtype,
            "kv_tokens": config.kv_tokens,
            "train_token_budget": config.train_token_budget,
        }
        return msgspec.json.encode(settings) + b"\n"

    def _hear(self, message: Mapping[str, list[str]]) -> None:
        for notice in self._notices:
            notice(message.get("done", ()))


class _Keeper:
    """Keeps one worker alive."""

    def __init__(self, name: str, settings: bytes, hear: Callable[[Mapping[str, list[str]]], None]) -> None:
        self._name = name
        self._settings = settings
        self._hear = hear
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._woken = False
        self._stopping = False
        self.became_ready = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self.became_ready.is_set()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"worker of {self._name}")

    def wake(self) -> None:
        if self._process is not None and self._process.stdin is not None and not self._woken:
            # Whoever wakes it again before the loop turns has been heard already.
            self._woken = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._woken = False
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, RuntimeError):  # it has just died; its successor looks for itself
                self._process.stdin.write(b".")

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            started = time.monotonic()
            try:
                status: int | OSError = await self._run()
            except OSError as error:  # no memory or no process left to start it with
                status = error
            if self._stopping:
                return
            lived = time.monotonic() - started
            pause = FIRST_PAUSE_SECONDS if lived >= STABLE_SECONDS else min(pause * 2, MAX_PAUSE_SECONDS)
            log.error(
                "The worker of %s ended with status %s after %.0f s; starting it again in %.1f s.",
                self._name,
                status,
                lived,
                pause,
            )
            await asyncio.sleep(pause)

    async def _run(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tinsmith.server.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**24,
            env={**WORKER_ENVIRONMENT, **os.environ},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        try:
            process.stdin.write(self._settings)
            async for line in process.stdout:
                self._heard(line)
            return await process.wait()
        finally:
            self.became_ready.clear()
            self._process = None

    def _heard(self, line: bytes) -> None:
        try:
            message = msgspec.json.decode(line)
        except msgspec.DecodeError:
            log.warning("The worker of %s printed %r.", self._name, line[:200])
            return
        if message.get("ready"):
            self.became_ready.set()
        else:
            self._hear(message)

    async def stop(self) -> None:
        """Ends the worker: when its input ends it finishes its step; one that is still loading has none to finish."""
        if self._task is None:
            return
        self._stopping = True
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            if not self.is_ready or not await _ends_within(process, STOP_SECONDS):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def _ends_within(process: asyncio.subprocess.Process, seconds: float) -> bool:
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        return False
    return True
