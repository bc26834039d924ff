"""Where later replicas go, and what a bridge makes of an actor that Ray refuses; a program that tells in JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.server.messages import WorkerSettings
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


async def taken_name(cluster: Cluster, folder: Path) -> Any:
    read, written = os.pipe()
    bridge = Bridge(written)
    settings = WorkerSettings(
        base_model="m", folder=str(folder), database="", state=str(folder), role="train", place="train"
    )
    for life in (1, 2):
        bridge._begin(Order(life=life, do="begin", settings=msgspec.Raw(msgspec.json.encode(settings))), cluster)
    told = msgspec.json.decode(os.read(read, 2**16).splitlines()[0], type=Report)
    (said,) = told.messages
    return {"life": told.life, "ended": told.ended, "said": said.failed, "living": [*bridge._lives]}


if __name__ == "__main__":
    settings = ClusterSettings(address=sys.argv[1], seats=SEATS, device="cpu", kept_here="the database")
    cluster = Cluster(settings, "test")
    found = {"later": later_replica(cluster), "taken": asyncio.run(taken_name(cluster, Path(sys.argv[2])))}
    tell(json.dumps(found))
