"""The workers of every base model, and the messages between them and the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tinsmith.errors import ConfigError
from tinsmith.server.config import ServerConfig
from tinsmith.server.crew import Crew
from tinsmith.server.keeper import LivesHere
from tinsmith.server.lives import Lives
from tinsmith.server.messages import Drawn, Figure, Replay, WorkerSettings
from tinsmith.server.store import Store
from tinsmith.server.store.records import Lane, NewJob
from tinsmith.server.worker_metrics import WorkerState
from tinsmith.types import SampleRequest


class WorkerProcesses:
    """`missing` says of base models that are not served why their files are of no use. Workers live in processes of
    this machine, unless `lives` says otherwise; `lead` is the name in which they work (`store/leading.py`).
    """

    leads = True

    def __init__(
        self,
        config: ServerConfig,
        folders: Mapping[str, Path],
        store: Store,
        missing: Mapping[str, str] | None = None,
        lives: Lives | None = None,
        lead: str = "",
    ) -> None:
        self._missing = missing or {}
        self._lives = lives or LivesHere()
        self._starting: asyncio.Task[None] | None = None
        self._is_starting = asyncio.Event()
        self._notices: list[Callable[[Sequence[str]], None]] = []
        self._drawn_notices: list[Callable[[Sequence[Drawn]], None]] = []
        self._crews = {
            name: Crew(
                _settings(config, name, folder, lead),
                config.sampler_bounds,
                store,
                self._lives,
                self._hear,
                self._hear_drawn,
                config.idle_sample_worker_seconds,
            )
            for name, folder in folders.items()
        }

    def wake(self, base_model: str, replica: str | None = None) -> None:
        """Tells a worker that there is work. Never blocks, never fails."""
        crew = self._crews.get(base_model)
        if crew is not None:
            crew.wake(replica)

    def choose_replica(self, job: NewJob, request: SampleRequest) -> str:
        return self._crews[job.base_model].choose_replica(job, request) if job.base_model in self._crews else ""

    def note_elsewhere(self, server: str, samples: Mapping[str, int]) -> None:
        """Another server says how many samples came to it, by base model, that are not drawn yet."""
        for base_model, number in samples.items():
            if base_model in self._crews:
                self._crews[base_model].note_elsewhere(server, number)

    def are_over(self, request_ids: Sequence[str]) -> None:
        for crew in self._crews.values():
            crew.are_over(request_ids)

    def is_ready(self, base_model: str, lane: Lane | None = None) -> bool:
        return base_model in self._crews and self._crews[base_model].is_ready(lane)

    def problem(self, base_model: str) -> str | None:
        return self._crews[base_model].problem if base_model in self._crews else self._missing.get(base_model)

    def held_up(self, base_model: str, stream: str = "", lane: Lane | None = None) -> str | None:
        return self._crews[base_model].held_up(stream, lane) if base_model in self._crews else None

    def no_room(self, base_model: str, lane: Lane | None) -> Mapping[str, str]:
        return self._crews[base_model].no_room(lane) if base_model in self._crews else {}

    def replay(self, base_model: str, lane: Lane | None = None) -> Replay | None:
        return self._crews[base_model].replay(lane) if base_model in self._crews else None

    def figures(self, base_model: str) -> Iterable[Figure]:
        return self._crews[base_model].figures() if base_model in self._crews else ()

    def states(self, base_model: str) -> Sequence[WorkerState]:
        return self._crews[base_model].states() if base_model in self._crews else ()

    def on_done(self, notice: Callable[[Sequence[str]], None]) -> None:
        self._notices.append(notice)

    def on_drawn(self, notice: Callable[[Sequence[Drawn]], None]) -> None:
        self._drawn_notices.append(notice)

    async def start(self) -> None:
        """Returns at once; `ready` waits for it, and has its errors."""
        self._starting = asyncio.create_task(self._start())
        self._is_starting.set()

    async def _start(self) -> None:
        await self._lives.prepare()
        for crew in self._crews.values():
            await crew.start()

    async def ready(self) -> None:
        """Waits until every worker has loaded its model or was given up; an error if there is none left to serve."""
        await self._is_starting.wait()
        assert self._starting is not None
        await self._starting
        crews = self._crews.values()
        await asyncio.gather(*(crew.settled() for crew in crews))
        problems = [crew.problem for crew in crews if crew.problem is not None]
        if len(problems) == len(crews):
            raise ConfigError(" ".join(problems))
        for crew in crews:
            crew.goes_on()

    async def stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.gather(*(crew.stop() for crew in self._crews.values()))
        await self._lives.close()

    def _hear(self, done: Sequence[str]) -> None:
        for notice in self._notices:
            notice(done)

    def _hear_drawn(self, drawn: Sequence[Drawn]) -> None:
        for notice in self._drawn_notices:
            notice(drawn)


def _settings(config: ServerConfig, name: str, folder: Path, lead: str) -> WorkerSettings:
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
        lead=lead,
    )
