"""The API process's end of the bridge to a Ray cluster, and of the lines to the workers there."""

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
from tinsmith.server.messages import Message, WorkerSettings
from tinsmith.server.on_ray.messages import ClusterSettings, LineAddress, Order, Report, Seat
from tinsmith.server.process_life import MAX_LINE_BYTES
from tinsmith.server.suspects import UNSEEN

log = logging.getLogger(__name__)

BRIDGE_MODULE = "tinsmith.server.on_ray.bridge"
STOP_SECONDS = 15.0
CALL_SECONDS = 30.0
LAST_WORDS_SECONDS = 5.0
KILL_SECONDS = 30.0
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
                # When a cluster comes back, its nodes with GPUs may do so after others.
                device = "cuda" if self._bridge.uses_gpus else "cpu"
                self._settings = msgspec.structs.replace(self._settings, device=device)
            return self._bridge


def _kept_here(config: ServerConfig) -> str:
    here = {
        "the database (give a PostgreSQL URL with --database)": not config.database.startswith("postgres"),
        "the checkpoints (give the URL of a bucket with --storage)": not config.storage,
    }
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
        self.uses_gpus = False
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
        except BaseException:  # it may be waiting for room, and nothing of it is at work
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if not report.is_ready:
            await bridge.close()
            raise CannotBeginError(report.refused)
        bridge.uses_gpus = report.uses_gpus
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

    def kill(self) -> None:
        """Ray ends its actors with it."""
        log.error("The process that speaks with the Ray cluster does nothing any more; it is killed.")
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            self._process.kill()

    async def close(self) -> None:
        self._input.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        if self._listening is not None:
            await self._listening

    async def _listen(self) -> None:
        try:
            async for line in self._output:
                self._hear(msgspec.json.decode(line, type=Report))
        except (ValueError, msgspec.DecodeError):  # a line that is none, or that does not end
            log.exception("What the process says that speaks with the Ray cluster is not understood.")
            self.kill()
        self.is_over = True
        status = await self._process.wait()
        if self._lives:
            log.error("%s; the workers end with it.", _gone(status))
        for life in self._lives.values():
            life.hear(Report(ended=UNSEEN))

    def _hear(self, report: Report) -> None:
        if (life := self._lives.get(report.life)) is not None:
            life.hear(report)
            if report.ended is not None:
                del self._lives[report.life]


def _gone(status: int) -> str:
    return f"The connection to the Ray cluster is lost (its process ended with status {status}); is the cluster up?"


class RayLife(Life):
    """Begun and ended through the bridge, and spoken with directly: a worker begins to work when it is called."""

    def __init__(self, bridge: _Bridge, number: int) -> None:
        self._bridge = bridge
        self._number = number
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._line: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def hear(self, report: Report) -> None:
        for message in report.messages:
            self._say(message)
        if report.line is not None:
            self._listening = asyncio.create_task(self._listen(report.line))
        if report.ended is not None and self._ending is None:
            self._ending = asyncio.create_task(self._end_with(report.ended))

    async def _listen(self, address: LineAddress) -> None:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                reader, line = await asyncio.open_connection(address.host, address.port, limit=MAX_LINE_BYTES)
        except OSError as error:
            if self._ending is None:  # else it is gone, and the bridge has told why
                self._say(Message(failed=_unreachable(address, error)))
                self.kill()
            return
        line.write(address.secret.encode())
        self._line = line
        try:
            with contextlib.suppress(OSError):  # how it ended, the bridge tells
                async for message in reader:
                    self._said.put_nowait(message)
        except ValueError as error:
            self._say(Message(failed=f"what it said was too long: {error}"))
            self.kill()
        finally:
            line.close()

    async def _end_with(self, status: int) -> None:
        """When all is heard that it said: its process is gone, and so is its end of the line, if its machine is up."""
        if self._listening is not None:
            await asyncio.wait({self._listening}, timeout=LAST_WORDS_SECONDS)
            self._listening.cancel()
        self._said.put_nowait(None)
        self._end.set_result(status)

    def _say(self, message: Message) -> None:
        self._said.put_nowait(msgspec.json.encode(message))

    async def heard(self) -> AsyncIterator[bytes]:
        while (message := await self._said.get()) is not None:
            yield message

    async def ended(self) -> int:
        return await asyncio.shield(self._end)

    def wake(self) -> None:
        if self._line is not None:  # else it looks for itself when it begins
            with contextlib.suppress(OSError, RuntimeError):  # it has just died; its successor looks for itself
                self._line.write(b".")

    def dismiss(self) -> None:
        """What it says until it ends is still heard."""
        if self._line is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._line.write_eof()

    def kill(self) -> None:
        if self._ending is None:
            self._bridge.tell(Order(life=self._number, do="kill"))
            asyncio.get_running_loop().call_later(KILL_SECONDS, self._make_sure)

    def _make_sure(self) -> None:
        if self._ending is None:
            self._bridge.kill()


def _unreachable(address: LineAddress, error: OSError) -> str:
    where, why = f"{address.host}:{address.port}", error.strerror or type(error).__name__
    return f"it cannot be reached at {where} ({why}); the nodes of a Ray cluster must reach each other at all ports"
