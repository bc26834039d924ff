"""The API process's end of the bridge to a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from itertools import count

import msgspec

from tinsmith.errors import ConfigError, MissingExtraError
from tinsmith.server.config import ServerConfig
from tinsmith.server.lives import CannotBeginError, Life, Lives
from tinsmith.server.messages import WorkerSettings
from tinsmith.server.on_ray.messages import ClusterSettings, Order, Report, Seat
from tinsmith.server.suspects import UNSEEN

log = logging.getLogger(__name__)

BRIDGE_MODULE = "tinsmith.server.on_ray.bridge"
STOP_SECONDS = 15.0
_MAX_LINE_BYTES = 2**26


class RayLives(Lives):
    """`places` are those of the workers of each base model, with how many processes each has."""

    def __init__(self, config: ServerConfig, places: Mapping[str, Mapping[str, int]]) -> None:
        self._settings = ClusterSettings(
            address=config.ray,
            seats=tuple(
                Seat(base_model=base_model, place=place, cpus=config.worker_cpus, processes=processes)
                for base_model, those in places.items()
                for place, processes in those.items()
            ),
            device=config.device,
            kept_here=_kept_here(config),
            log_format=config.log_format,
            log_level=config.log_level,
        )
        self._bridge: _Bridge | None = None
        self._building = asyncio.Lock()

    async def prepare(self) -> None:
        if find_spec("ray") is None:
            raise MissingExtraError("ray", "ray", "Serving with --ray")
        try:
            await self._open_bridge()
        except CannotBeginError as error:
            raise ConfigError(str(error)) from error

    async def begin(self, settings: WorkerSettings) -> Life:
        return (await self._open_bridge()).begin(settings)

    async def close(self) -> None:
        if self._bridge is not None:
            await self._bridge.close()

    async def _open_bridge(self) -> _Bridge:
        """The one that there is, or another if that was lost."""
        async with self._building:
            if self._bridge is None or self._bridge.is_over:
                self._bridge = await _Bridge.build(self._settings)
            return self._bridge


def _kept_here(config: ServerConfig) -> str:
    database, storage = config.database.partition(":")[0], config.storage.partition(":")[0]
    here = {"the database (give a PostgreSQL URL with --database)": not database.startswith("postgres")}
    here["the checkpoints (give the URL of a bucket with --storage)"] = storage in ("", "memory")
    return " and ".join(what for what, is_here in here.items() if is_here)


class _Bridge:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input, self._output = process.stdin, process.stdout
        self._numbers = count(1)
        self._lives: dict[int, RayLife] = {}
        self._listening: asyncio.Task[None] | None = None
        self.is_over = False

    @classmethod
    async def build(cls, settings: ClusterSettings) -> _Bridge:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            BRIDGE_MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
        bridge = cls(process)
        try:
            bridge._input.write(msgspec.json.encode(settings) + b"\n")
            first = await bridge._output.readline()
            report = msgspec.json.decode(first, type=Report) if first else Report(refused=_gone(await process.wait()))
        except BaseException:
            await bridge.close()
            raise
        if not report.is_ready:
            await bridge.close()
            raise CannotBeginError(report.refused)
        bridge._listening = asyncio.create_task(bridge._listen(), name="the bridge to Ray")
        return bridge

    def begin(self, settings: WorkerSettings) -> RayLife:
        number = next(self._numbers)
        life = self._lives[number] = RayLife(self, number)
        self.tell(Order(life=number, do="begin", settings=msgspec.Raw(msgspec.json.encode(settings))))
        return life

    def tell(self, order: Order) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # it has just gone, and all lives end with it
            self._input.write(msgspec.json.encode(order) + b"\n")

    async def close(self) -> None:
        self._input.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._listening is not None:
            await self._listening

    async def _listen(self) -> None:
        async for line in self._output:
            report = msgspec.json.decode(line, type=Report)
            life = self._lives.get(report.life)
            if life is None:
                continue
            life.hear(report)
            if report.ended is not None:
                del self._lives[report.life]
        self.is_over = True
        status = await self._process.wait()
        if self._lives:
            log.error("%s; the workers end with it.", _gone(status))
        for life in self._lives.values():
            life.hear(Report(ended=UNSEEN))


def _gone(status: int) -> str:
    return f"The connection to the Ray cluster is lost (its process ended with status {status}); is the cluster up?"


class RayLife(Life):
    def __init__(self, bridge: _Bridge, number: int) -> None:
        self._bridge = bridge
        self._number = number
        self._said: asyncio.Queue[msgspec.Raw | None] = asyncio.Queue()
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def hear(self, report: Report) -> None:
        for message in report.messages:
            self._said.put_nowait(message)
        if report.ended is not None and not self._end.done():
            self._said.put_nowait(None)
            self._end.set_result(report.ended)

    def wake(self) -> None:
        self._tell("wake")

    async def heard(self) -> AsyncIterator[bytes]:
        while (message := await self._said.get()) is not None:
            yield bytes(message)

    async def ended(self) -> int:
        return await asyncio.shield(self._end)

    def dismiss(self) -> None:
        self._tell("dismiss")

    def kill(self) -> None:
        self._tell("kill")

    def _tell(self, what: str) -> None:
        if not self._end.done():
            self._bridge.tell(Order(life=self._number, do=what))  # type: ignore[arg-type]
