"""The process that speaks with Ray for the API process, as the driver of its workers' actors. They end with it.

It reads `ClusterSettings` and then an `Order` in each line of its standard input, and writes a `Report` in each line to
what was its standard output. When its input ends, the server is gone, and so is everything here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from typing import Any
from uuid import uuid4

import msgspec
import ray
from ray.exceptions import RayError

from tinsmith._version import __version__
from tinsmith.server import logs
from tinsmith.server.bell import first_line
from tinsmith.server.messages import Message, WorkerSettings
from tinsmith.server.on_ray.actor import Begun, Heard, WorkerActor
from tinsmith.server.on_ray.cluster import Cluster
from tinsmith.server.on_ray.messages import ClusterSettings, Order, Report
from tinsmith.server.on_ray.refusals import RefusedError
from tinsmith.server.process_life import WORKER_ENVIRONMENT
from tinsmith.server.suspects import UNSEEN

log = logging.getLogger("tinsmith.server.on_ray.bridge")  # which has another name when it is started

TELL_SECONDS = 5.0
_INPUT = 0
_MAX_LINE_BYTES = 2**24


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # both may reach the whole group, and the parent decides
    # Libraries print: what goes to the parent has a descriptor of its own.
    output = os.dup(1)
    os.dup2(2, 1)
    settings = msgspec.json.decode(first_line(_INPUT), type=ClusterSettings)
    logs.configure(settings.log_format, settings.log_level)
    bridge = Bridge(output)
    try:
        cluster = Cluster(settings, namespace=f"tinsmith-{uuid4().hex}")
    except RefusedError as error:
        bridge.tell(Report(refused=str(error)))
        os._exit(1)
    # Ray takes the signals over, and would end us before our parent says so.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    bridge.tell(Report(is_ready=True))
    asyncio.run(bridge.run(cluster))
    os._exit(0)  # the end of the driver is the end of its actors; whatever Ray would tidy up goes with it


class Bridge:
    def __init__(self, output: int) -> None:
        self._output = output
        self._lives: dict[int, _ActorLife] = {}

    async def run(self, cluster: Cluster) -> None:
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(_INPUT, "rb", buffering=0))
        async for line in reader:
            order = msgspec.json.decode(line, type=Order)
            if order.do == "begin":
                self._lives[order.life] = _ActorLife(self, order, cluster)
            elif (life := self._lives.get(order.life)) is not None:
                life.obey(order)

    def tell(self, report: Report) -> None:
        line = msgspec.json.encode(report) + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, which our input will tell
            while line:
                line = line[os.write(self._output, line) :]

    def is_over(self, number: int) -> None:
        del self._lives[number]


class _ActorLife:
    """One actor from its start to its end."""

    def __init__(self, bridge: Bridge, order: Order, cluster: Cluster) -> None:
        self._bridge = bridge
        self._number = order.life
        self._settings = msgspec.json.decode(order.settings, type=WorkerSettings)
        base_model, place = self._settings.base_model, self._settings.place
        self._whose = f"{base_model}, {place}" if place else base_model
        trainer = f"{base_model}/train"
        name = {"name": trainer} if self._settings.role == "train" else {}
        actor = ray.remote(WorkerActor).options(
            max_restarts=0, runtime_env={"env_vars": WORKER_ENVIRONMENT}, **name, **cluster.options(base_model, place)
        )
        self._actor: Any = actor.remote(bytes(order.settings), trainer)
        self._task = asyncio.create_task(self._live())

    def obey(self, order: Order) -> None:
        if order.do == "kill":
            self._kill()
        else:
            getattr(self._actor, order.do).remote()

    async def _live(self) -> None:
        status = UNSEEN
        try:
            status = await self._work()
        except RayError as error:
            log.error("The actor of %s is lost: %s", self._whose, " ".join(str(error).split()))
            self._say(Message(failed=f"its actor is gone: {_reason(error)}"))
        except Exception:
            log.exception("The actor of %s is lost.", self._whose)
        finally:
            self._kill()
            self._bridge.tell(Report(life=self._number, ended=status))
            self._bridge.is_over(self._number)

    async def _work(self) -> int:
        begun: Begun = await self._patiently(self._actor.begin.remote())
        self._say(Message(where=begun.where, process=begun.process))
        if begun.version != __version__:
            text = f"Tinsmith is of version {begun.version} on {begun.where} and {__version__} here; install the same"
            self._say(Message(failed=text, is_final=True))
            return 1
        while True:
            heard: Heard = await self._actor.heard.remote()
            for line in heard.log_lines:
                sys.stderr.write(line)
            sys.stderr.flush()
            if heard.messages:
                raw = [msgspec.Raw(message) for message in heard.messages]
                self._bridge.tell(Report(life=self._number, messages=raw))
            if heard.status is not None:
                return heard.status

    async def _patiently(self, begun: Awaitable[Begun]) -> Begun:
        """Says what is waited for: a node may have gone, and its bundle wait for another."""
        waiting = asyncio.ensure_future(begun)
        while not (await asyncio.wait({waiting}, timeout=TELL_SECONDS))[0]:
            self._say(Message(held_up="a worker waits for room on the Ray cluster, or for its process to start there"))
        return waiting.result()

    def _say(self, message: Message) -> None:
        self._bridge.tell(Report(life=self._number, messages=[msgspec.Raw(msgspec.json.encode(message))]))

    def _kill(self) -> None:
        with contextlib.suppress(Exception):  # it is gone already, or the cluster is
            ray.kill(self._actor)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__


if __name__ == "__main__":
    main()
