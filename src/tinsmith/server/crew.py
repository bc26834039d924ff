"""The workers of one base model: one for everything; or, on a cluster, one that trains and replicas that sample.

Every sample is for one replica, chosen by what it has of the prompt and by how much it has to do (`routing.py`). What
is for one that is gone is dealt out among the others, who draw the same: a sample's seed is its own. How many replicas
there are may follow from what there is to draw (`scaling.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import ChainMap
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from tinsmith.errors import ConfigError
from tinsmith.server.keeper import Keeper, nothing
from tinsmith.server.lives import Lives
from tinsmith.server.messages import Drawn, Figure, Replay, Role, WorkerSettings
from tinsmith.server.recovery import put_back
from tinsmith.server.routing import Router
from tinsmith.server.scaling import Bounds, Seen, is_ample, wanted
from tinsmith.server.store import Store, StoreUnavailableError, ids
from tinsmith.server.store.records import Lane, NewJob
from tinsmith.server.worker_metrics import WorkerState, added_up
from tinsmith.types import SampleRequest

log = logging.getLogger(__name__)

TRAINER = "train"
DEAL_SECONDS = 5.0
"""Between two looks at what waits for no replica that is there, in case that one could not be taken."""
RECOUNT_SECONDS = 30.0
"""Between two looks at which samples are still to be drawn."""
SCALE_SECONDS = 1.0
"""Between two looks at how many replicas there should be."""
ELSEWHERE_SECONDS = 10.0
"""For so long another server is believed that said how many samples came to it, which it does every second."""
LAST_SAMPLES_SECONDS = 60.0
"""So long a replica that shall end goes on with what it has begun; others draw the rest."""


def places(train_workers: int, sample_workers: int) -> dict[str, int]:
    """The workers of a base model, with how many processes each has."""
    if not sample_workers:
        return {"": train_workers}
    return {TRAINER: train_workers, **{_replica(number): 1 for number in range(sample_workers)}}


def _replica(number: int) -> str:
    return f"sample-{number}"


def replica_for(job: NewJob, request: SampleRequest, router: Router) -> str:
    """Empty if there is none. A job that is submitted once more stays where it is."""
    if job.seq_id is None:
        return ""
    request_id = ids.request_id(job.stream, job.seq_id)
    known = router.where(request_id)
    if known is not None:
        return known
    return router.choose(request_id, job.owner, job.sampler_id, request.prompt.to_ints(), request.num_samples) or ""


def _why_it_ends(keeper: Keeper) -> str:
    if keeper.has_begun:
        return "it ends after its last samples"
    return "it ends without having drawn any samples, as fewer replicas are enough"


class Crew:
    """The workers of one base model: one for both kinds of work, or a trainer with its replicas."""

    def __init__(
        self,
        settings: WorkerSettings,
        bounds: Bounds,
        store: Store,
        lives: Lives,
        hear: Callable[[Sequence[str]], None],
        hear_drawn: Callable[[Sequence[Drawn]], None],
        patience_seconds: float = 0.0,
    ) -> None:
        self._settings = settings
        self._bounds = bounds
        self._patience_seconds = patience_seconds
        self._base_model = settings.base_model
        self._store = store
        self._tell_done = hear
        self._hear_drawn = hear_drawn
        self._lives = lives
        self._router = Router()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sharing = asyncio.Lock()
        self._serves = asyncio.Event()
        (first, processes), *others = places(settings.train_workers, bounds.least).items()
        self._trainer = self._keeper("train" if others else "both", first, processes)
        self._replicas = {place: self._keeper("sample", place, number) for place, number in others}
        self._keepers = {first: self._trainer, **self._replicas}
        self._leaving: dict[str, set[str]] = {}
        """Replicas that shall end, with what they still draw."""
        self._before: list[Figure] = []
        """What those that have ended had counted."""
        self._elsewhere: dict[str, tuple[int, float]] = {}
        """By other server: samples that came to it and are not drawn yet, and when it said so."""
        self._ample_since: float | None = None
        """Since when one replica less would be enough."""

    def _keeper(self, role: Role, place: str, processes: int) -> Keeper:
        return Keeper(
            self._base_model,
            msgspec.structs.replace(self._settings, role=role, place=place, train_workers=processes),
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
        return replica_for(job, request, self._router) if self._replicas else ""

    def note_elsewhere(self, server: str, samples: int) -> None:
        """Samples that came to another server and are not drawn yet."""
        self._elsewhere[server] = samples, time.monotonic()

    def are_over(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._router.done(request_id)
            for drawn in self._leaving.values():
                drawn.discard(request_id)

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
        reasons = [keeper.held_up for keeper in self._of(lane)]
        if lane is not None and None in reasons:  # somebody works
            reasons = []
        reasons += [keeper.no_room.get(stream) for keeper in self._of(lane)]
        return next(filter(None, reasons), None)

    def no_room(self, lane: Lane | None) -> Mapping[str, str]:
        """What some models and samplers wait for while others go on."""
        return dict(ChainMap(*(dict(keeper.no_room) for keeper in self._of(lane))))

    def _of(self, lane: Lane | None) -> Sequence[Keeper]:
        return {"train": [self._trainer], "sample": self._sampling, None: self._needed}[lane]

    @property
    def _needed(self) -> Sequence[Keeper]:
        """All but replicas that came or are to come because there is much to draw: the others go on without them."""
        return [self._trainer, *(self._replicas[place] for place in self._staying[: self._bounds.least])]

    def replay(self, lane: Lane | None) -> Replay | None:
        """Nobody who draws samples waits for it, if those do that have nothing else to do."""
        return self._trainer.replay if self._trainer in self._of(lane) else None

    def figures(self) -> Iterable[Figure]:
        if not self._replicas:
            return self._trainer.told.figures()
        trainer = self._trainer.told.figures()
        return added_up(trainer, [self._before, *(keeper.told.figures() for keeper in self._replicas.values())])

    def states(self) -> Sequence[WorkerState]:
        loads = self._router.loads
        states = []
        for place, keeper in self._keepers.items():
            name, role, is_ready = place or "worker", keeper.settings.role, keeper.is_ready
            is_leaving = place in self._leaving
            samples = len(self._leaving[place]) if is_leaving else loads.get(place)
            waits_for = _why_it_ends(keeper) if is_leaving else keeper.held_up
            states.append(
                WorkerState(
                    name,
                    role,
                    keeper.where,
                    keeper.process,
                    is_ready,
                    keeper.problem,
                    samples,
                    waits_for,
                    is_leaving=is_leaving,
                )
            )
            for rank, member in sorted(keeper.members.items()):
                states.append(
                    WorkerState(f"{name}-rank-{rank}", "train", member.where, member.process, is_ready, None, None)
                )
        return states

    # Their lives

    async def start(self) -> None:
        if self._replicas:
            await self._put_back("", None)  # whatever a server before this one has left
            await self._deal_to_nobody()  # so that it is counted when it is dealt out
            self._begin(self._again(self._deal, DEAL_SECONDS), "strays")
            self._begin(self._again(self._recount, RECOUNT_SECONDS), "recount")
            if self._bounds.most > self._bounds.least:
                self._begin(self._again(self._scale, SCALE_SECONDS), "number of replicas")
        else:  # who was here before may have had replicas
            await self._deal_to_nobody()
        for keeper in self._keepers.values():
            keeper.start()

    async def settled(self) -> None:
        await asyncio.gather(*(keeper.settled.wait() for keeper in self._keepers.values()))
        wrong = [keeper.problem for keeper in self._keepers.values() if keeper.problem is not None]
        if self._replicas and wrong:
            raise ConfigError(wrong[0])

    def goes_on(self) -> None:
        """The server serves, whatever has become of these workers; a start that is refused leaves their jobs alone."""
        self._serves.set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))

    def _begin(self, work: Coroutine[None, None, None], what: str) -> None:
        task = asyncio.create_task(work, name=f"{what} of {self._base_model}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Whatever goes wrong once: nobody else would do it."""
        while True:
            try:
                await work()
            except StoreUnavailableError:  # its workers say so
                pass
            except Exception:
                log.exception("could not look after the replicas of %s", self._base_model)
            await asyncio.sleep(seconds)

    def _hear(self, done: Sequence[str]) -> None:
        self.are_over(done)
        self._tell_done(done)

    async def _refuse(self, place: str, reason: str) -> None:
        await self._serves.wait()
        if self.problem is None:  # others can do it
            return
        failed = await asyncio.to_thread(self._store.jobs.fail_all, self._base_model, reason)
        self._keepers[place].told.add("tinsmith_jobs_given_up_total", len(failed))
        self._hear(failed)

    # Replicas that come and go

    async def _replica_changed(self, place: str, is_ready: bool) -> None:
        """One that is gone may be so for long, as its model has to be loaded again: others do its work."""
        if is_ready and place not in self._leaving:
            self._router.came(place)
            await self._share(place)
        elif not is_ready:
            self._router.gone(place)
            if place in self._leaving:
                self._leaving[place].clear()
            # Its successor may have to wait for room for ever, and is not started before.
            while not await self._could_put_back(place, self._replicas[place].last_status):  # noqa: ASYNC110
                await asyncio.sleep(SCALE_SECONDS)
        await self._deal()

    async def _put_back(self, place: str, status: int | None) -> None:
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
                stray.request_id: self._router.choose(
                    stray.request_id, stray.owner, stray.sampler_id, (), stray.samples
                )
                for stray in strays
            }
            dealt = await asyncio.to_thread(
                self._store.jobs.deal, {name: replica or "" for name, replica in chosen.items()}
            )
            for request_id in chosen.keys() - dealt:  # cancelled or taken meanwhile
                self._router.done(request_id)
            for drawn in self._leaving.values():
                drawn -= chosen.keys()  # what one of them has begun meanwhile, the database knows
            for replica in {*chosen.values()}:
                self.wake(replica)

    async def _share(self, place: str) -> None:
        """One that has come gets its part of what others have not begun, the oldest of it."""
        async with self._sharing:  # several may come at once
            while busier := self._router.busier(place):
                others = [replica for replica in self._router.loads if replica not in busier]
                waiting = await asyncio.to_thread(self._store.jobs.strays, self._base_model, others)
                part = self._router.part_of(place, [stray.request_id for stray in waiting])
                dealt = await asyncio.to_thread(self._store.jobs.deal, dict.fromkeys(part, place))
                for request_id in dealt:
                    self._router.move(request_id, place)
                self.wake(place)
                if not dealt:
                    return

    async def _recount(self) -> None:
        """What another server has settled is told once, and may not be heard: it would count for ever."""
        long_underway = self._router.long_underway()
        self.are_over(long_underway - await asyncio.to_thread(self._store.jobs.still_open, long_underway))

    async def _deal_to_nobody(self) -> None:
        while strays := await asyncio.to_thread(self._store.jobs.strays, self._base_model, [""]):
            await asyncio.to_thread(self._store.jobs.deal, {stray.request_id: "" for stray in strays})

    # How many replicas there are

    @property
    def _staying(self) -> Sequence[str]:
        """Where the replicas are that shall not end, in the order in which they came."""
        return [place for place in self._replicas if place not in self._leaving]

    async def _scale(self) -> None:
        now = time.monotonic()
        staying, samples = self._staying, self._to_draw(now)
        replicas, never_begun = len(staying), sum(not self._replicas[place].has_begun for place in staying)
        self._ample_since = (self._ample_since or now) if is_ample(self._bounds, replicas, samples) else None
        ample_seconds = 0.0 if self._ample_since is None else now - self._ample_since
        number = wanted(self._bounds, Seen(replicas, samples, ample_seconds, never_begun), self._patience_seconds)
        if number != replicas:
            log.info(
                "Samples of %s that are not drawn yet: %d; replicas from now on: %d.", self._base_model, samples, number
            )
            self._ample_since = None
        for _ in range(replicas, number):
            self._add_replica()
        for _ in range(number, replicas):
            self._let_go()

    def _to_draw(self, now: float) -> int:
        """Samples that are not drawn yet, wherever they were submitted."""
        self._elsewhere = {
            server: (samples, at) for server, (samples, at) in self._elsewhere.items() if now - at < ELSEWHERE_SECONDS
        }
        return sum(self._router.loads.values()) + sum(samples for samples, _ in self._elsewhere.values())

    def _add_replica(self) -> None:
        free = (_replica(number) for number in range(self._bounds.most) if _replica(number) not in self._replicas)
        if (place := next(free, None)) is not None:  # else one that shall end still has its place
            self._replicas[place] = self._keepers[place] = self._keeper("sample", place, 1)
            self._replicas[place].start()

    def _let_go(self) -> None:
        """The last that came; before any that works, one for which there was no room."""
        *_, place = sorted(self._staying, key=lambda place: not self._replicas[place].has_begun)
        self._leaving[place] = {*self._router.gone(place)}
        self._begin(self._left(place), f"the end of {place}")

    async def _left(self, place: str) -> None:
        with contextlib.suppress(StoreUnavailableError):  # what it has not begun; else that is done a little later
            await self._deal()
        end = time.monotonic() + LAST_SAMPLES_SECONDS
        while time.monotonic() < end and (self._leaving[place] or await self._is_busy(place)):  # noqa: ASYNC110
            await asyncio.sleep(SCALE_SECONDS)
        keeper = self._replicas[place]
        await keeper.stop()
        keeper.settled.set()  # whoever waits for all of them waits no longer for this one
        while not await self._could_put_back(place, keeper.last_status):  # noqa: ASYNC110 - nobody waits for it
            await asyncio.sleep(SCALE_SECONDS)
        del self._replicas[place], self._keepers[place], self._leaving[place]
        keeper.told.begin_anew()
        self._before = added_up(self._before, [keeper.told.figures()])
        with contextlib.suppress(StoreUnavailableError):
            await self._deal()

    async def _is_busy(self, place: str) -> bool:
        """Also with what came to another server."""
        try:
            return await asyncio.to_thread(self._store.jobs.is_busy, self._base_model, place)
        except StoreUnavailableError:
            return True

    async def _could_put_back(self, place: str, status: int | None) -> bool:
        try:
            await self._put_back(place, status)
        except StoreUnavailableError:  # its workers say so
            return False
        return True
