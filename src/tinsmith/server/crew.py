"""The workers of one base model: one for everything; or, on a cluster, one that trains and replicas that sample.

Every sample is for one replica, chosen by what it has of the prompt and by how much it has to do (`routing.py`). What
is for one that is gone is dealt out among the others, who draw the same: a sample's seed is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from tinsmith.errors import ConfigError
from tinsmith.server.keeper import Keeper, nothing
from tinsmith.server.lives import Lives
from tinsmith.server.messages import Drawn, Figure, Replay, Role, WorkerSettings
from tinsmith.server.recovery import put_back
from tinsmith.server.routing import Router
from tinsmith.server.store import Store, StoreUnavailableError, ids
from tinsmith.server.store.records import Lane, NewJob
from tinsmith.server.worker_metrics import WorkerState, added_up
from tinsmith.types import SampleRequest

TRAINER = "train"
DEAL_SECONDS = 5.0
"""Between two looks at what waits for no replica that is there, in case that one could not be taken."""


def places(train_workers: int, sample_workers: int) -> dict[str, int]:
    """The workers of a base model, with how many processes each has."""
    if not sample_workers:
        return {"": train_workers}
    return {TRAINER: train_workers, **{f"sample-{number}": 1 for number in range(sample_workers)}}


class Crew:
    """The workers of one base model: one for both kinds of work, or a trainer with its replicas."""

    def __init__(
        self,
        settings: WorkerSettings,
        num_replicas: int,
        store: Store,
        lives: Lives,
        hear: Callable[[Sequence[str]], None],
        hear_drawn: Callable[[Sequence[Drawn]], None],
    ) -> None:
        self._base_model = settings.base_model
        self._store = store
        self._tell_done = hear
        self._hear_drawn = hear_drawn
        self._lives = lives
        self._router = Router()
        self._dealing: asyncio.Task[None] | None = None
        (first, processes), *others = places(settings.train_workers, num_replicas).items()
        self._trainer = self._keeper(settings, "train" if others else "both", first, processes)
        self._replicas = {place: self._keeper(settings, "sample", place, number) for place, number in others}
        self._keepers = {first: self._trainer, **self._replicas}

    def _keeper(self, settings: WorkerSettings, role: Role, place: str, processes: int) -> Keeper:
        return Keeper(
            self._base_model,
            msgspec.structs.replace(settings, role=role, place=place, train_workers=processes),
            self._hear,
            self._hear_drawn,
            partial(self._refuse, place),
            self._lives,
            partial(self._replica_changed, place) if role == "sample" else nothing,
        )

    # What the API asks

    def wake(self, replica: str | None) -> None:
        for keeper in self._keepers.values() if replica is None else [self._keepers.get(replica, self._trainer)]:
            keeper.wake()

    def choose_replica(self, job: NewJob, request: SampleRequest) -> str:
        if not self._replicas or job.seq_id is None:
            return ""
        request_id, prompt = ids.request_id(job.stream, job.seq_id), request.prompt.to_ints()
        return self._router.choose(request_id, job.owner, job.sampler_id, prompt, request.num_samples) or ""

    def are_over(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._router.done(request_id)

    def is_ready(self, lane: Lane | None) -> bool:
        trains, samples = self._trainer.is_ready, any(keeper.is_ready for keeper in self._sampling)
        return {"train": trains, "sample": samples, None: trains and samples}[lane]

    @property
    def _sampling(self) -> Sequence[Keeper]:
        return list(self._replicas.values()) or [self._trainer]

    @property
    def problem(self) -> str | None:
        """Why there will be nobody to train, or nobody to sample."""
        if self._trainer.problem is not None:
            return self._trainer.problem
        problems = [keeper.problem for keeper in self._sampling]
        return None if None in problems else problems[0]

    def held_up(self, stream: str, lane: Lane | None) -> str | None:
        """Why nothing is done of a kind of work, or for this stream; without a kind, of any worker."""
        keepers = {"train": [self._trainer], "sample": self._sampling, None: [*self._keepers.values()]}[lane]
        reasons = [keeper.held_up for keeper in keepers]
        if lane is not None and None in reasons:  # somebody works
            reasons = []
        return next(filter(None, [*reasons, *(keeper.no_room(stream) for keeper in keepers)]), None)

    @property
    def replay(self) -> Replay | None:
        return self._trainer.replay

    def figures(self) -> Iterable[Figure]:
        if not self._replicas:
            return self._trainer.told.figures()
        trainer = self._trainer.told.figures()
        return added_up(trainer, [keeper.told.figures() for keeper in self._replicas.values()])

    def states(self) -> Sequence[WorkerState]:
        loads = self._router.loads
        return [
            WorkerState(
                place or "worker",
                keeper.settings.role,
                keeper.where,
                keeper.process,
                keeper.is_ready,
                keeper.problem,
                loads.get(place),
            )
            for place, keeper in self._keepers.items()
        ]

    # Their lives

    async def start(self) -> None:
        if self._replicas:
            await self._put_back("", None)  # whatever a server before this one has left
            self._dealing = asyncio.create_task(self._deal_again(), name=f"strays of {self._base_model}")
        else:  # a server before this one may have had replicas
            await self._deal_to_nobody()
        for keeper in self._keepers.values():
            keeper.start()

    async def settled(self) -> None:
        await asyncio.gather(*(keeper.settled.wait() for keeper in self._keepers.values()))
        wrong = [keeper.problem for keeper in self._keepers.values() if keeper.problem is not None]
        if self._replicas and wrong:
            raise ConfigError(wrong[0])

    async def stop(self) -> None:
        if self._dealing is not None:
            self._dealing.cancel()
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))

    def _hear(self, done: Sequence[str]) -> None:
        self.are_over(done)
        self._tell_done(done)

    async def _refuse(self, place: str, reason: str) -> None:
        if self.problem is None:  # others can do it
            return
        failed = await asyncio.to_thread(self._store.jobs.fail_all, self._base_model, reason)
        self._keepers[place].told.add("tinsmith_jobs_given_up_total", len(failed))
        self._hear(failed)

    # Replicas that come and go

    async def _replica_changed(self, place: str, is_ready: bool) -> None:
        """One that is gone may be so for long, as its model has to be loaded again: others do its work."""
        if is_ready:
            self._router.came(place)
        else:
            self._router.gone(place)
            await self._put_back(place, self._replicas[place].last_status)
        await self._deal()

    async def _put_back(self, place: str, status: int | None) -> None:
        """If that fails now, its successor does so."""
        recovered = await asyncio.to_thread(put_back, self._store, self._base_model, status, place=place)
        self._keepers.get(place, self._trainer).told.add("tinsmith_jobs_given_up_total", recovered.num_given_up)
        self._hear(recovered.over)

    async def _deal(self) -> None:
        """What waits for no replica that is there gets one that is."""
        while replicas := list(self._router.loads):
            strays = await asyncio.to_thread(self._store.jobs.strays, self._base_model, replicas)
            if not strays:
                return
            chosen = {
                stray.request_id: self._router.choose(stray.request_id, stray.owner, stray.sampler_id, ())
                for stray in strays
            }
            dealt = await asyncio.to_thread(
                self._store.jobs.deal, {name: replica or "" for name, replica in chosen.items()}
            )
            self.are_over(chosen.keys() - dealt)  # cancelled meanwhile
            for replica in {*chosen.values()}:
                self.wake(replica)

    async def _deal_again(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailableError):  # its workers say so
                await self._deal()
            await asyncio.sleep(DEAL_SECONDS)

    async def _deal_to_nobody(self) -> None:
        while strays := await asyncio.to_thread(self._store.jobs.strays, self._base_model, [""]):
            await asyncio.to_thread(self._store.jobs.deal, {stray.request_id: "" for stray in strays})
