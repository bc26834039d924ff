"""Training groups of real processes for tests: the leader lives in the process of the test."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from tests.server.engine.faulty_member import live
from tinsmith.server.engine.channels import Channel, Group, open_meeting
from tinsmith.server.engine.group import GroupEngine
from tinsmith.server.engine.shard_group import Seat, ShardBase, shards_for
from tinsmith.server.messages import MemberSettings
from tinsmith.server.soundness import try_engine

HOST = "127.0.0.1"
# Two processes may share a GPU where gloo, which goes through the host, carries everything.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
START_SECONDS = 120

# Importing torch takes longer than everything that a test wants of a member: one process does it for all of them.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.server.engine.faulty_member", "torch.distributed.fsdp"])


class Started(NamedTuple):
    engine: GroupEngine
    members: list[BaseProcess]


@contextmanager
def group_of(
    size: int,
    folder: Path,
    *,
    budget: int = 64,
    seconds: float = 60,
    folder_of_members: Path | None = None,
    shard_base: ShardBase = "never",
) -> Iterator[Started]:
    """`seconds` is how long a member may be silent."""
    meeting = open_meeting(HOST, seconds=START_SECONDS)
    with ExitStack() as stack:
        own = _settings(0, size, meeting.port, folder, budget, shard_base, seconds)
        others = msgspec.structs.replace(own, folder=str(folder_of_members or folder))
        members = [_started(stack, msgspec.structs.replace(others, rank=rank)) for rank in range(1, size)]
        shards = shards_for(
            shard_base,
            Seat(meeting, 0, size, HOST, "gloo"),
            str(folder),
            DEVICE,
            "float32",
            train_tokens=budget,
            kv_tokens=None,
            seconds=seconds,
        )
        if shards is not None:
            stack.callback(shards.close)
        engine = GroupEngine.open(folder, DEVICE, "float32", train_token_budget=budget, shards=shards)
        if shards is not None:
            try_engine(engine)  # as the members do, who need our shards for it
        group = Group(meeting, 0, size, HOST, seconds=START_SECONDS)
        engine.lead([Channel(group, rank, seconds=seconds) for rank in range(1, size)])
        yield Started(engine, members)


def _settings(
    rank: int, size: int, port: int, folder: Path, budget: int, shard_base: ShardBase, seconds: float
) -> MemberSettings:
    return MemberSettings(
        base_model="tiny",
        folder=str(folder),
        device=DEVICE,
        dtype="float32",
        train_token_budget=budget,
        rank=rank,
        size=size,
        host=HOST,
        meeting_host=HOST,
        meeting_port=port,
        start_seconds=START_SECONDS,
        shard_base=shard_base,
        stall_seconds=seconds,
    )


def _started(stack: ExitStack, settings: MemberSettings) -> BaseProcess:
    process = _PROCESSES.Process(target=live, args=(settings,))
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    return process
