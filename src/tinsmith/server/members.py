"""The members of a worker's training group, as processes on the same machine: started, met, watched and let go."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from tinsmith.server.engine.channels import Channel, Group, LostPeerError, choose_backend, open_meeting
from tinsmith.server.engine.group import GroupEngine
from tinsmith.server.engine.shard_group import Seat, shards_for
from tinsmith.server.engine.sharding import ShardedLayers
from tinsmith.server.messages import MemberSettings, WorkerSettings

MEMBER_MODULE = "tinsmith.server.member_process"
START_SECONDS = 1800
"""For the slowest to load its model, when all read the same disk."""
STOP_SECONDS = 10
LEADER = 0
_HOST = "127.0.0.1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Members:
    """Begins to start them at once, so that they load their models while the leader loads its own.

    `on_lost` hears the rank and the exit status of one that ended and was not let go, in a thread of its own.
    """

    def __init__(self, settings: WorkerSettings, on_lost: Callable[[int, int], None]) -> None:
        self._settings = settings
        self._on_lost = on_lost
        self._size = settings.train_workers
        self._backend = choose_backend(settings.device, self._size)
        self._meeting = open_meeting(_HOST, seconds=START_SECONDS)
        self._are_wanted = True
        self._processes = [self._start(rank) for rank in range(1, self._size)]

    def shards(self) -> ShardedLayers | None:
        """Before the leader loads its model: where its layers are to go, unless all processes hold all of them."""
        settings = self._settings
        return shards_for(
            settings.shard_base,
            Seat(self._meeting, LEADER, self._size, _HOST, self._backend),
            settings.folder,
            settings.device,
            settings.dtype,
            train_tokens=settings.train_token_budget,
            kv_tokens=settings.kv_tokens,
            seconds=settings.stall_seconds,
        )

    def meet(self, engine: GroupEngine) -> None:
        """When the leader has loaded its model; returns when all others have, too."""
        group = Group(self._meeting, LEADER, self._size, _HOST, self._backend, seconds=START_SECONDS)
        engine.lead([Channel(group, rank, seconds=self._settings.stall_seconds) for rank in range(1, self._size)])

    def dismiss(self, engine: GroupEngine) -> None:
        self._are_wanted = False
        with suppress(LostPeerError):
            engine.dismiss()
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        # Standard output is the worker's own, on which it talks to the server.
        process = subprocess.Popen(
            [sys.executable, "-m", MEMBER_MODULE],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env={**os.environ, **self._environment(rank)},
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._settings_of(rank)) + b"\n")
        process.stdin.close()
        threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()
        return process

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._are_wanted:
            self._on_lost(rank, status)

    def _settings_of(self, rank: int) -> MemberSettings:
        settings = self._settings
        return MemberSettings(
            base_model=settings.base_model,
            folder=settings.folder,
            device=settings.device,
            dtype=settings.dtype,
            deterministic=settings.deterministic,
            train_token_budget=settings.train_token_budget,
            rank=rank,
            size=self._size,
            host=_HOST,
            meeting_host=_HOST,
            meeting_port=self._meeting.port,
            backend=self._backend,
            start_seconds=START_SECONDS,
            shard_base=settings.shard_base,
            stall_seconds=settings.stall_seconds,
            log_format=settings.log_format,
            log_level=settings.log_level,
        )

    def _environment(self, rank: int) -> Mapping[str, str]:
        """A GPU of its own; the leader takes the first."""
        if self._backend == "gloo":
            return {}
        visible = os.environ.get(_VISIBLE)
        return {_VISIBLE: visible.split(",")[rank] if visible else str(rank)}
