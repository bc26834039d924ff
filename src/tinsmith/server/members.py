"""The members of a worker's training group, as their leader has them: started, met, watched and let go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from tinsmith.server.engine.channels import Channel, Group, LostPeerError, choose_backend, open_meeting
from tinsmith.server.engine.group import GroupEngine
from tinsmith.server.engine.shard_group import Seat, shards_for
from tinsmith.server.engine.sharding import ShardedLayers
from tinsmith.server.member_lives import Begun, Ending, MemberLife, MemberLives
from tinsmith.server.messages import MemberSettings, WorkerSettings

START_SECONDS = 1800
"""For the slowest to load its model, when all read the same disk."""
STOP_SECONDS = 10
LOSS_SECONDS = 30
"""Between the closing of a member's connection and the news of how it ended."""
LEADER = 0


class _Watched(NamedTuple):
    life: MemberLife
    watch: threading.Thread


class Members:
    """Begins to start them at once, so that they load their models while the leader loads its own.

    `on_begun` and `on_lost` are called in threads of their own: when a member has a place, and when one has ended that
    was not let go. The latter is expected to end this process.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        lives: MemberLives,
        on_begun: Callable[[int, Begun], None],
        on_lost: Callable[[int, Ending], None],
    ) -> None:
        self._settings = settings
        self._host = lives.host
        self._on_begun = on_begun
        self._on_lost = on_lost
        self._size = settings.train_workers
        self._sharers = self._size if lives.are_here else 1
        self._backend = choose_backend(settings.device, self._sharers)
        self._meeting = open_meeting(self._host, seconds=START_SECONDS)
        self._are_wanted = True
        self._one_is_lost = threading.Event()
        self._all = [self._started(lives, rank) for rank in range(1, self._size)]

    def shards(self, kv_tokens: int | None) -> ShardedLayers | None:
        """Before the leader loads its model: where its layers are to go, unless all processes hold all of them.

        `kv_tokens` is what it keeps room for, to sample.
        """
        settings = self._settings
        return shards_for(
            settings.shard_base,
            Seat(self._meeting, LEADER, self._size, self._host, self._backend),
            settings.folder,
            settings.device,
            settings.dtype,
            train_tokens=settings.train_token_budget,
            kv_tokens=kv_tokens,
            seconds=settings.stall_seconds,
        )

    def meet(self, engine: GroupEngine) -> None:
        """When the leader has loaded its model; returns when all others have, too."""
        group = Group(self._meeting, LEADER, self._size, self._host, self._backend, seconds=START_SECONDS)
        engine.lead([Channel(group, rank, seconds=self._settings.stall_seconds) for rank in range(1, self._size)])

    def await_loss(self) -> None:
        """To be called after an error that may be that of a lost member: then `on_lost` has the last word.

        The leader mostly sees a connection close before it can be known how the process behind it ended.
        """
        if self._one_is_lost.wait(LOSS_SECONDS):
            threading.Event().wait()

    def dismiss(self, engine: GroupEngine) -> None:
        self._are_wanted = False
        with suppress(LostPeerError):
            engine.dismiss()
        for life, watch in self._all:
            watch.join(STOP_SECONDS)
            life.kill()

    def _started(self, lives: MemberLives, rank: int) -> _Watched:
        life = lives.begin(self._settings_of(rank))
        watch = threading.Thread(target=self._watch, args=(rank, life), name=f"rank {rank}", daemon=True)
        watch.start()
        return _Watched(life, watch)

    def _watch(self, rank: int, life: MemberLife) -> None:
        begun = life.begun()
        if begun is not None:
            self._on_begun(rank, begun)
        ending = life.ended()
        if self._are_wanted:
            self._one_is_lost.set()
            self._on_lost(rank, ending)

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
            sharers=self._sharers,
            host=self._host,
            meeting_host=self._host,
            meeting_port=self._meeting.port,
            backend=self._backend,
            start_seconds=START_SECONDS,
            shard_base=settings.shard_base,
            stall_seconds=settings.stall_seconds,
            log_format=settings.log_format,
            log_level=settings.log_level,
        )
