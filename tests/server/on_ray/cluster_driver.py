"""Where later replicas go, and what a bridge makes of an actor that Ray refuses; a program that tells in JSON."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import ray

from tinsmith.server.messages import Message, WorkerSettings
from tinsmith.server.on_ray import bridge
from tinsmith.server.on_ray.actor import WorkerActor
from tinsmith.server.on_ray.bridge import Bridge
from tinsmith.server.on_ray.cluster import Cluster
from tinsmith.server.on_ray.messages import ClusterSettings, Order, Report, Seat

SEATS = tuple(Seat(base_model="m", place=place, cpus=1, processes=1) for place in ("train", "sample-0"))


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def later_replica(cluster: Cluster) -> Any:
    """The first node is full, and another one has joined that has room, which whoever placed us waits for."""
    tell("placed")
    sys.stdin.readline()
    options = cluster.options("m", "sample-1")
    is_placed = options["scheduling_strategy"].placement_group.wait(5)
    cluster.release("m", "sample-1")
    return {"is_placed": is_placed}


async def without_state(folder: Path) -> Any:
    """What a worker says whose state folder cannot be made on its node."""
    (folder / "file").touch()
    settings = WorkerSettings(base_model="m", folder="", database="", state=str(folder / "file" / "state"))
    actor: Any = ray.remote(WorkerActor).options(num_cpus=0).remote(msgspec.json.encode(settings), "", [])
    await actor.begin.remote()
    address = await actor.line.remote()
    with socket.create_connection((address.host, address.port)) as line, line.makefile("rb") as said:
        line.sendall(address.secret.encode())
        message = msgspec.json.decode(said.readline(), type=Message)
    ray.kill(actor)
    return {"failed": message.failed, "is_final": message.is_final}


class Idle(WorkerActor):
    """Does nothing until it is killed."""

    def _work(self) -> None:
        threading.Event().wait()

    async def num_replicas(self) -> int:
        return len(self._replicas)


async def orders(cluster: Cluster, folder: Path) -> Any:
    """A second trainer while the first has its name, a replica that is killed, and one for which there is no room."""
    bridge.WorkerActor = Idle  # type: ignore[misc]
    read, written = os.pipe()
    made = Bridge(written)
    workers = ("train", "train"), ("train", "train"), ("sample", "sample-0"), ("sample", "sample-1")
    for life, (role, place) in enumerate(workers, 1):
        settings = WorkerSettings(
            base_model="m", folder=str(folder), database="", state=str(folder), role=role, place=place
        )
        made._begin(Order(life=life, do="begin", settings=msgspec.Raw(msgspec.json.encode(settings))), cluster)
    refused = msgspec.json.decode(os.read(read, 2**16).splitlines()[0], type=Report)
    (said,) = refused.messages
    living = [*made._lives]
    trainer = made._lives[1].actor
    while not (num_replicas := await trainer.num_replicas.remote()):  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.1)
    made._lives[3].kill()
    while 3 in made._lives:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.1)
    told = [msgspec.json.decode(line, type=Report) for line in os.read(read, 2**16).splitlines()]
    return {
        "taken": {"life": refused.life, "ended": refused.ended, "said": said.failed, "living": living},
        "num_replicas": num_replicas,
        "killed": [message.failed for each in told if each.life == 3 for message in each.messages if message.failed],
    }


if __name__ == "__main__":
    settings = ClusterSettings(address=sys.argv[1], seats=SEATS, device="cpu", kept_here="the database")
    cluster = Cluster(settings, "test")
    folder = Path(sys.argv[2])
    found = {"later": later_replica(cluster), "without_state": asyncio.run(without_state(folder))}
    found |= asyncio.run(orders(cluster, folder))
    tell(json.dumps(found))
