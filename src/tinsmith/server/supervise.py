"""The worker processes, one per base model, and the messages between them and the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tinsmith.errors import ConfigError
from tinsmith.server.config import ServerConfig
from tinsmith.server.keeper import Keeper
from tinsmith.server.messages import Drawn, Figure, Replay, WorkerSettings
from tinsmith.server.store import Store


class WorkerProcesses:
    """`missing` says of base models that are not served why their files are of no use."""

    def __init__(
        self,
        config: ServerConfig,
        folders: Mapping[str, Path],
        store: Store,
        missing: Mapping[str, str] | None = None,
    ) -> None:
        self._store = store
        self._missing = missing or {}
        self._keepers = {
            name: Keeper(name, _settings(config, name, folder), self._hear, self._hear_drawn, self._refuse)
            for name, folder in folders.items()
        }
        self._notices: list[Callable[[Sequence[str]], None]] = []
        self._drawn_notices: list[Callable[[Sequence[Drawn]], None]] = []

    def wake(self, base_model: str) -> None:
        """Tells a worker that there is work. Never blocks, never fails."""
        keeper = self._keepers.get(base_model)
        if keeper is not None:
            keeper.wake()

    def is_ready(self, base_model: str) -> bool:
        return base_model in self._keepers and self._keepers[base_model].is_ready

    def problem(self, base_model: str) -> str | None:
        return self._keepers[base_model].problem if base_model in self._keepers else self._missing.get(base_model)

    def held_up(self, base_model: str, model_id: str) -> str | None:
        return self._keepers[base_model].held_up(model_id) if base_model in self._keepers else None

    def replay(self, base_model: str) -> Replay | None:
        return self._keepers[base_model].replay if base_model in self._keepers else None

    def figures(self, base_model: str) -> Iterable[Figure]:
        return self._keepers[base_model].told.figures() if base_model in self._keepers else ()

    def on_done(self, notice: Callable[[Sequence[str]], None]) -> None:
        self._notices.append(notice)

    def on_drawn(self, notice: Callable[[Sequence[Drawn]], None]) -> None:
        self._drawn_notices.append(notice)

    async def start(self) -> None:
        for keeper in self._keepers.values():
            keeper.start()

    async def ready(self) -> None:
        """Waits until every worker has loaded its model or was given up; an error if there is none left to serve."""
        keepers = self._keepers.values()
        await asyncio.gather(*(keeper.settled.wait() for keeper in keepers))
        problems = [keeper.problem for keeper in keepers if keeper.problem is not None]
        if len(problems) == len(keepers):
            raise ConfigError(" ".join(problems))

    async def stop(self) -> None:
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))

    def _hear(self, done: Sequence[str]) -> None:
        for notice in self._notices:
            notice(done)

    def _hear_drawn(self, drawn: Sequence[Drawn]) -> None:
        for notice in self._drawn_notices:
            notice(drawn)

    async def _refuse(self, base_model: str, reason: str) -> None:
        failed = await asyncio.to_thread(self._store.jobs.fail_all, base_model, reason)
        self._keepers[base_model].told.add("tinsmith_jobs_given_up_total", len(failed))
        self._hear(failed)


def _settings(config: ServerConfig, name: str, folder: Path) -> WorkerSettings:
    return WorkerSettings(
        base_model=name,
        folder=str(folder),
        database=config.database_url,
        state=str(config.state),
        storage=config.storage,
        cache_bytes=config.cache_bytes,
        device=config.device,
        dtype=config.dtype,
        deterministic=config.deterministic,
        kv_tokens=config.kv_tokens,
        train_token_budget=config.train_token_budget,
        train_workers=config.train_workers,
        shard_base=config.shard_base,
        stall_seconds=config.stall_seconds,
        replay_bound_seconds=config.replay_bound_seconds,
        log_format=config.log_format,
        log_level=config.log_level,
        max_checkpoint_bytes=config.max_checkpoint_bytes,
    )
