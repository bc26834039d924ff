"""The process that speaks with Ray for the API process, as the driver of its workers' actors. They end with it.

It reads `ClusterSettings` and then an `Order` in each line of its standard input, and writes a `Report` in each line to
what was its standard output. When its input ends, the server is gone, and so is everything here.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Awaitable
from itertools import count
from typing import Any, TextIO, cast
from uuid import uuid4

import msgspec
import ray
from ray.exceptions import RayError

from tinsmith._version import __version__
from tinsmith.server import logs
from tinsmith.server.bell import first_line
from tinsmith.server.messages import Message, WorkerSettings
from tinsmith.server.on_ray.actor import WorkerActor
from tinsmith.server.on_ray.cluster import Cluster
from tinsmith.server.on_ray.messages import ClusterSettings, Order, Report
from tinsmith.server.on_ray.refusals import RefusedError, other_version, reason
from tinsmith.server.on_ray.speaking import Begun, Heard
from tinsmith.server.process_life import WORKER_ENVIRONMENT
from tinsmith.server.suspects import UNSEEN

log = logging.getLogger("tinsmith.server.on_ray.bridge")  # which has another name when it is started

TELL_SECONDS = 5.0
WATCH_SECONDS = 10.0
_INPUT = 0
_MAX_LINE_BYTES = 2**24
_COLOURS = re.compile(r"\x1b\[\d*m")


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # both may reach the whole group, and the parent decides
    # Libraries print: what goes to the parent has a descriptor of its own.
    output = os.dup(1)
    os.dup2(2, 1)
    settings = msgspec.json.decode(first_line(_INPUT), type=ClusterSettings)
    logs.configure(settings.log_format, settings.log_level)
    let_ray_log()
    bridge = Bridge(output)
    try:
        cluster = Cluster(settings, namespace=f"tinsmith-{uuid4().hex}")
    except RefusedError as error:
        bridge.tell(Report(refused=str(error)))
        os._exit(1)
    # Ray takes the signals over, and would end us before our parent says so.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    bridge.tell(Report(is_ready=True, uses_gpus=cluster.uses_gpus))
    try:
        asyncio.run(bridge.run(cluster))
    except Exception:
        log.exception("The Ray cluster is not what it was when this server joined it.")
        os._exit(1)
    os._exit(0)  # the end of the driver is the end of its actors; whatever Ray would tidy up goes with it


def let_ray_log() -> None:
    """What Ray says has the form of all other lines, whoever reads them; it has a handler of its own, and prints."""
    sys.stdout = cast(TextIO, _Printed())
    rays = logging.getLogger("ray")
    rays.handlers.clear()
    rays.propagate = True
    rays.setLevel(logging.WARNING)


class _Printed(io.TextIOBase):
    def write(self, text: str) -> int:
        if said := " ".join(_COLOURS.sub("", text).split()):
            log.warning("Ray says: %s", said)
        return len(text)


class Bridge:
    def __init__(self, output: int) -> None:
        self._output = output
        self._lives: dict[int, _ActorLife] = {}
        self._introductions = count()

    async def run(self, cluster: Cluster) -> None:
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(_INPUT, "rb", buffering=0))
        watching = asyncio.create_task(_watch(cluster))
        async for line in reader:
            order = msgspec.json.decode(line, type=Order)
            if order.do == "begin":
                self._begin(order, cluster)
            elif (life := self._lives.get(order.life)) is not None:
                life.kill()
        watching.cancel()

    def _begin(self, order: Order, cluster: Cluster) -> None:
        """One that Ray does not take concerns nobody else: the name of its last life may still be known there.

        Any other error means that the cluster is not what it was, and this process ends, to join it anew.
        """
        try:
            self._lives[order.life] = _ActorLife(self, order, cluster)
        except ValueError as error:
            log.exception("An actor could not be made.")
            why = Message(failed=f"Ray did not take its actor: {reason(error)}")
            self.tell(Report(life=order.life, messages=[why], ended=UNSEEN))

    def tell(self, report: Report) -> None:
        line = msgspec.json.encode(report) + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, which our input will tell
            while line:
                line = line[os.write(self._output, line) :]

    def is_over(self, number: int) -> None:
        self.introduce(self._lives.pop(number).settings.base_model)

    def introduce(self, base_model: str) -> None:
        """Who trains hears to whom it sends the weights of samplers.

        Ray would keep what is sent to one that still waits for room, and it may do so for days.
        """
        lives = [life for life in self._lives.values() if life.settings.base_model == base_model and life.has_begun]
        replicas = [life.actor for life in lives if life.settings.role == "sample"]
        for life in lives:
            if life.settings.role == "train":
                life.actor.send_to.remote(next(self._introductions), replicas)


async def _watch(cluster: Cluster) -> None:
    """Ray says nothing of actors that waited for room when another cluster came to the same address, and would wait on.

    If another one is asked for its nodes, Ray ends this process itself.
    """
    with contextlib.suppress(RayError):
        while await asyncio.to_thread(cluster.has_this_node):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(WATCH_SECONDS)
    log.error("The Ray cluster has lost the node of this server; it is joined anew.")
    os._exit(1)


class _ActorLife:
    """One actor from its start to its end."""

    def __init__(self, bridge: Bridge, order: Order, cluster: Cluster) -> None:
        self._bridge = bridge
        self._number = order.life
        self._cluster = cluster
        self._is_killed = False
        self.has_begun = False
        self.settings = msgspec.json.decode(order.settings, type=WorkerSettings)
        base_model, place = self.settings.base_model, self.settings.place
        self._whose = f"{base_model}, {place}" if place else base_model
        trainer = f"{base_model}/train"
        name = {"name": trainer} if self.settings.role == "train" else {}
        actor = ray.remote(WorkerActor).options(
            max_restarts=0, runtime_env={"env_vars": WORKER_ENVIRONMENT}, **name, **cluster.options(base_model, place)
        )
        self.actor: Any = actor.remote(bytes(order.settings), trainer, cluster.member_options(base_model, place))
        self._task = asyncio.create_task(self._live())

    def kill(self) -> None:
        self._is_killed = True
        self._kill()

    async def _live(self) -> None:
        status = UNSEEN
        try:
            status = await self._work()
        except RayError as error:
            if not self._is_killed:  # else the server knows why
                self._say(Message(failed=f"its actor is gone: {reason(error)}"))
        except Exception:
            log.exception("The actor of %s is lost.", self._whose)
        finally:
            self._kill()
            self._cluster.release(self.settings.base_model, self.settings.place)
            self._bridge.tell(Report(life=self._number, ended=status))
            self._bridge.is_over(self._number)

    async def _work(self) -> int:
        begun: Begun = await self._patiently(self.actor.begin.remote())
        self.has_begun = True
        self._bridge.introduce(self.settings.base_model)
        self._say(Message(where=begun.where, process=begun.process))
        if begun.version != __version__:
            self._say(Message(failed=other_version(begun.version, begun.where), is_final=True))
            return 1
        self._bridge.tell(Report(life=self._number, line=await self.actor.line.remote()))
        return await self._followed()

    async def _followed(self) -> int:
        """To its end: the status."""
        dying_with: int | None = None
        while True:
            try:
                heard: Heard = await self.actor.heard.remote()
            except RayError:
                if dying_with is None:
                    raise
                return dying_with
            for line in heard.log_lines:
                sys.stderr.write(line)
            sys.stderr.flush()
            if heard.is_dying:
                dying_with = heard.status
            elif heard.status is not None:
                return heard.status

    async def _patiently(self, begun: Awaitable[Begun]) -> Begun:
        """Says what is waited for: a node may have gone, and its bundle wait for another."""
        waiting, has_logged = asyncio.ensure_future(begun), False
        while not (await asyncio.wait({waiting}, timeout=TELL_SECONDS))[0]:
            self._say(Message(held_up="a worker waits for room on the Ray cluster, or for its process to start there"))
            if not has_logged:
                log.warning("%s waits for room on the Ray cluster, or for its process to start there.", self._whose)
            has_logged = True
        return waiting.result()

    def _say(self, message: Message) -> None:
        self._bridge.tell(Report(life=self._number, messages=[message]))

    def _kill(self) -> None:
        with contextlib.suppress(Exception):  # it is gone already, or the cluster is
            ray.kill(self.actor)


if __name__ == "__main__":
    main()
