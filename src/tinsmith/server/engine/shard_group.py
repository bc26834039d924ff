"""Whether a training group shards its base model, and the group that FSDP2 gathers the shards in.

All processes of a group decide together, before any of them has loaded anything: each tells the others at their meeting
how much memory the whole model would take, and how much there is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import torch
import torch.distributed as dist

from tinsmith.server.engine.channels import Backend, gloo_options
from tinsmith.server.engine.engine import choose_device, choose_dtype
from tinsmith.server.engine.model import ModelShape
from tinsmith.server.engine.room import Footprint, available_memory
from tinsmith.server.engine.sharding import ShardedLayers
from tinsmith.server.engine.weights import read_config

ShardBase: TypeAlias = Literal["auto", "always", "never"]

DEVICES = ("cpu", "cuda")
"""Those on which layers can be gathered."""

_log = logging.getLogger(__name__)

_GLOO_AT_ONE_ADDRESS = "tinsmith_gloo"
_USABLE = 0.9
"""The share of the free memory that a model may take at its start; the rest is for adapters and for what is wasted."""
_GIB = 2**30


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A process of the group: how much it has to hold, and how much it can."""

    host: str
    device: str
    free: int
    needed: int


def too_small(places: Sequence[Place]) -> int | None:
    """The first rank that cannot hold the whole model; processes without a GPU share the memory of their machine."""
    neighbours = Counter(place.host for place in places if place.device == "cpu")
    for rank, place in enumerate(places):
        sharers = neighbours[place.host] if place.device == "cpu" else 1
        if place.needed > _USABLE * place.free / sharers:
            return rank
    return None


class Seat(NamedTuple):
    """Of a process in its group."""

    meeting: Any
    rank: int
    size: int
    host: str
    """The address at which the others find it."""
    backend: Backend


def shards_for(
    choice: ShardBase,
    seat: Seat,
    folder: str,
    device: str,
    dtype: str,
    *,
    train_tokens: int | None,
    kv_tokens: int | None,
    seconds: float,
) -> ShardedLayers | None:
    """Where the layers of the model in `folder` go, unless all processes have all of them.

    Returns when all are there. `seconds` is how long one may keep the others waiting for a layer.
    """
    if choice == "never":
        return None
    place = choose_device(device)
    footprint = Footprint(ModelShape.from_config(read_config(Path(folder))), choose_dtype(dtype, place), place.type)
    own = Place(seat.host, place.type, available_memory(place), footprint.at_least(train_tokens, kv_tokens))
    seat.meeting.set(f"place {seat.rank}", msgspec.msgpack.encode(own))
    places = [msgspec.msgpack.decode(seat.meeting.get(f"place {rank}"), type=Place) for rank in range(seat.size)]
    smallest = too_small(places)
    if choice == "auto" and (smallest is None or place.type not in DEVICES):
        return None
    if smallest is not None and seat.rank == 0:
        _log.info(
            "The base model takes %.1f GiB with its working memory, and rank %d of %d has %.1f GiB free: its layers "
            "are sharded over the group.",
            places[smallest].needed / _GIB,
            smallest,
            seat.size,
            places[smallest].free / _GIB,
        )
    return _opened(seat, place, seconds)


def _opened(seat: Seat, device: torch.device, seconds: float) -> ShardedLayers:
    """FSDP2 works with torch's default group, of which a process has one."""
    from torch.distributed.device_mesh import init_device_mesh

    if _GLOO_AT_ONE_ADDRESS not in dist.Backend.backend_list:
        dist.Backend.register_backend(_GLOO_AT_ONE_ADDRESS, _gloo, extended_api=True, devices=["cpu", "cuda"])
    is_gloo = seat.backend == "gloo"
    dist.init_process_group(
        f"{device.type}:{_GLOO_AT_ONE_ADDRESS if is_gloo else seat.backend}",
        store=dist.PrefixStore("shards", seat.meeting),
        rank=seat.rank,
        world_size=seat.size,
        timeout=timedelta(seconds=seconds),
        pg_options=gloo_options(seat.host, seconds) if is_gloo else None,
    )
    if is_gloo:  # of which torch would warn that it is not one of its own
        dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return ShardedLayers(init_device_mesh(device.type, (seat.size,)), partial(_wait_for_all, seat))


def _wait_for_all(seat: Seat) -> None:
    seat.meeting.set(f"loaded {seat.rank}", b"")
    seat.meeting.wait([f"loaded {rank}" for rank in range(seat.size)])


def _gloo(how: Any, options: Any) -> Any:
    return dist.ProcessGroupGloo(how.store, how.group_rank, how.group_size, options)
