"""The workers of a database that several servers share: one of them leads and runs them, the others stand by.

Whoever can takes the lead (`store/leading.py`): at the start, or when the server that had it is gone. It waits until no
worker of that one is left, and starts its own. It tells the others what they need to know of its workers, every second
through the database (`bulletin.py`) and at once through the relay. A leader that finds that another one leads ends its
workers and stands by.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress

from tinsmith.errors import ConfigError
from tinsmith.server.bulletin import news_of
from tinsmith.server.full_disk import WaitError
from tinsmith.server.led_workers import LedWorkers
from tinsmith.server.messages import Drawn, Figure, Replay
from tinsmith.server.outage import Outage
from tinsmith.server.relay import Relay, Told
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.bulletin import Posted
from tinsmith.server.store.leading import Leader
from tinsmith.server.store.records import Lane, NewJob
from tinsmith.server.supervise import WorkerProcesses
from tinsmith.server.worker_metrics import WorkerState
from tinsmith.types import SampleRequest

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LEADER_FIRST_SECONDS = 5.0
"""After an outage of the database the leader has so much time to take its lock again before others try."""
OTHER_STORAGE_SECONDS = 10.0
"""So long is waited for a server with other files to go, which may have been killed just now."""
SAY_AGAIN_SECONDS = 60.0
CANNOT_LEAD_SECONDS = 30.0
"""Before a server tries again that could not start the workers; meanwhile others may."""
SILENT_SECONDS = 60.0
"""After so long without a sign of life, who leads or works for a leader is taken to be gone."""
RECOUNT_SECONDS = 30.0
"""Between two looks at which samples are still to be drawn."""


class SharedWorkers:
    """`name` makes a name for a lead that nobody had before; `prepare` is called before workers are started, and
    `begin` makes those that work in a name.
    """

    def __init__(
        self,
        store: Store,
        storage: str,
        base_models: Sequence[str],
        name: Callable[[], str],
        prepare: Callable[[], None],
        begin: Callable[[str], WorkerProcesses],
    ) -> None:
        self._store = store
        self._storage = storage
        self._base_models = base_models
        self._make_name = name
        self._prepare = prepare
        self._begin = begin
        self._relay = Relay(store, self._hear)
        self._led = LedWorkers(self._relay.wake)
        self._crew: WorkerProcesses | None = None
        self._running: asyncio.Task[None] | None = None
        self._settled: asyncio.Future[None] | None = None
        self._is_starting = asyncio.Event()
        self._take_at = 0.0
        self._was_away = False
        self._cannot_lead: str | None = None
        self._recount_at = 0.0
        self._other_since: float | None = None
        self._notices: list[Callable[[Sequence[str]], None]] = []
        self._drawn_notices: list[Callable[[Sequence[Drawn]], None]] = []

    # Its life

    async def start(self) -> None:
        self._settled = asyncio.get_running_loop().create_future()
        self._is_starting.set()
        await self._relay.start()
        self._running = asyncio.create_task(self._run(), name="leading or standing by")

    async def ready(self) -> None:
        """Waits until the workers are loaded, or another server says how its own are; an error if there is no hope."""
        await self._is_starting.wait()
        assert self._settled is not None
        await asyncio.shield(self._settled)

    async def stop(self) -> None:
        """Ends the workers, if they are ours, and lets another server lead."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            await asyncio.to_thread(self._store.lead.give_up)  # which may have been taken just now, in a thread
        await self._relay.stop()

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except StoreUnavailableError:  # others say so
                self._was_away = True
            except ConfigError as error:
                self._fail(error)
            except Exception:
                log.exception("could not look who leads")
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        leader = await asyncio.to_thread(self._store.lead.leader)
        if self._was_away:
            self._was_away, self._take_at = False, time.monotonic() + LEADER_FIRST_SECONDS
        if time.monotonic() >= self._take_at:
            name = self._make_name()
            if await asyncio.to_thread(self._store.lead.take, name, self._storage):
                await self._lead(name)
                return
        self._led.read(await asyncio.to_thread(self._store.bulletin.newest))
        if not self._led.hears:
            await self._end_silent()
        if self._finds_files_of(leader) and self._led.hears:
            if not self._has_settled:
                log.info("Another server leads: %s. This one stands by.", leader.name)
            self._settle()
        await self._recount()
        if self._led.samples:
            self._relay.samples(self._led.samples)

    async def _end_silent(self) -> None:
        if number := await asyncio.to_thread(self._store.lead.end_silent, SILENT_SECONDS):
            log.warning(
                "Of the server that leads and its workers, %d did nothing for %.0f s and lost their locks; another "
                "server can lead.",
                number,
                SILENT_SECONDS,
            )

    async def _recount(self) -> None:
        """What was done is told once, and may not be heard: it would count as work of a replica for ever."""
        if time.monotonic() < self._recount_at:
            return
        self._recount_at = time.monotonic() + RECOUNT_SECONDS
        long_underway = self._led.long_underway()
        self._led.are_over([*long_underway - await asyncio.to_thread(self._store.jobs.still_open, long_underway)])

    def _finds_files_of(self, leader: Leader) -> bool:
        """Not if they lie elsewhere; an error if that stays so."""
        if leader.storage == self._storage:
            self._other_since = None
            return True
        self._other_since = self._other_since or time.monotonic()
        if time.monotonic() - self._other_since > OTHER_STORAGE_SECONDS:
            where = f"in {leader.storage}" if leader.storage else "in a folder of its own"
            raise ConfigError(
                f"Another server uses this database, with its files {where}: {leader.name}. To share the database, "
                "start all servers with the same --storage; or give this one a database of its own, with --database."
            )
        return False

    @property
    def _has_settled(self) -> bool:
        return self._settled is not None and self._settled.done()

    def _settle(self) -> None:
        self._cannot_lead = None
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def _fail(self, error: ConfigError) -> None:
        """At the start, whoever waits for us is told; later there is nobody but the log."""
        if self._settled is not None and not self._settled.done():
            self._settled.set_exception(error)
        else:
            log.critical("%s This server stops.", error)
            os.kill(os.getpid(), signal.SIGTERM)

    # Leading

    async def _lead(self, name: str) -> None:
        self._led.forget()
        log.info("This server leads: it runs the workers.")
        crew: WorkerProcesses | None = None
        try:
            await self._wait_for_workers()
            await self._prepare_files()
            await asyncio.to_thread(self._store.bulletin.begin, name)
            crew = self._begin(name)
            crew.on_done(self._tell_done)
            crew.on_drawn(self._tell_drawn)
            await crew.start()
            self._crew = crew
            await self._keep(name, crew)
        except ConfigError as error:
            if not self._has_settled:
                raise
            self._cannot_lead, self._take_at = str(error), time.monotonic() + CANNOT_LEAD_SECONDS
            log.error("This server cannot lead now, and tries again in %.0f s: %s", CANNOT_LEAD_SECONDS, error)
            await asyncio.to_thread(self._store.bulletin.withdraw, name)
        except _LostError as lost:
            log.critical("Another server leads now, so this one ends its workers and stands by: %s.", lost)
        finally:
            self._crew = None
            if crew is not None:
                await self._holding_on(crew.stop())
            await asyncio.to_thread(self._store.lead.give_up)

    async def _wait_for_workers(self) -> None:
        """Those of the leader before, which end after the step that they are in; one that hangs, by its watchdog."""
        said_at = 0.0
        while not await asyncio.to_thread(self._store.lead.workers_are_gone):
            if time.monotonic() - said_at > SAY_AGAIN_SECONDS:
                log.info("A worker of the server that led before is still busy; waiting for its end.")
                said_at = time.monotonic()
            await self._end_silent()
            await self._check_lead()
            await asyncio.sleep(LOOK_SECONDS / 10)

    async def _prepare_files(self) -> None:
        outage = Outage(log)
        while True:
            try:
                await self._holding_on(asyncio.to_thread(self._prepare))
            except WaitError as error:
                outage.met("No worker is started yet", error)
            else:
                outage.is_over()
                return
            await self._check_lead()
            await asyncio.sleep(LOOK_SECONDS)

    async def _holding_on(self, work: Coroutine[None, None, None]) -> None:
        """Others do not take a leader to be gone that does something long."""
        doing = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({doing}, timeout=LOOK_SECONDS))[0]:
                with suppress(StoreUnavailableError):
                    await asyncio.to_thread(self._store.lead.is_ours)
        finally:
            doing.cancel()
        doing.result()

    async def _keep(self, name: str, crew: WorkerProcesses) -> None:
        """Until another server leads."""
        loading, number = asyncio.create_task(crew.ready()), 0
        try:
            while True:
                number += 1
                content = news_of(crew, self._base_models)
                try:
                    await self._check_lead()
                    await asyncio.to_thread(self._store.bulletin.post, Posted(name, number, content))
                except StoreUnavailableError:
                    pass  # the workers say so, and can do nothing without it
                await asyncio.wait({loading}, timeout=LOOK_SECONDS)
                if loading.done():
                    loading.result()
                    self._settle()
                    await asyncio.sleep(LOOK_SECONDS)
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def _check_lead(self) -> None:
        if not await asyncio.to_thread(self._store.lead.is_ours):
            raise _LostError((await asyncio.to_thread(self._store.lead.leader)).name)

    # What is told at once

    def _tell_done(self, request_ids: Sequence[str]) -> None:
        self._relay.done(request_ids)
        self._pass_on(request_ids)

    def _tell_drawn(self, drawn: Sequence[Drawn]) -> None:
        self._relay.drawn(drawn)
        self._pass_on_drawn(drawn)

    def _hear(self, told: Told) -> None:
        if self._crew is not None:
            for base_model in told.wake:
                self._crew.wake(base_model)
            self._crew.note_elsewhere(told.by, told.samples)
        if told.drawn:
            self._pass_on_drawn(told.drawn)
        if told.done:
            self._now.are_over(told.done)
            self._pass_on(told.done)

    def _pass_on(self, request_ids: Sequence[str]) -> None:
        for notice in self._notices:
            notice(request_ids)

    def _pass_on_drawn(self, drawn: Sequence[Drawn]) -> None:
        for notice in self._drawn_notices:
            notice(drawn)

    # What the API asks

    @property
    def leads(self) -> bool:
        return self._crew is not None

    @property
    def _now(self) -> WorkerProcesses | LedWorkers:
        return self._crew or self._led

    def wake(self, base_model: str, replica: str | None = None) -> None:
        self._now.wake(base_model, replica)

    def choose_replica(self, job: NewJob, request: SampleRequest) -> str:
        return self._now.choose_replica(job, request)

    def are_over(self, request_ids: Sequence[str]) -> None:
        self._now.are_over(request_ids)
        self._relay.done(request_ids)  # others may wait for them, or count them

    def is_ready(self, base_model: str, lane: Lane | None = None) -> bool:
        return self._now.is_ready(base_model, lane)

    def problem(self, base_model: str) -> str | None:
        return self._now.problem(base_model)

    def held_up(self, base_model: str, stream: str = "", lane: Lane | None = None) -> str | None:
        if self._cannot_lead is not None and not self._led.hears and self._crew is None:
            return f"no server can start the workers: {self._cannot_lead.rstrip('.')}; it is tried again and again"
        return self._now.held_up(base_model, stream, lane)

    def replay(self, base_model: str, lane: Lane | None = None) -> Replay | None:
        return self._now.replay(base_model, lane)

    def figures(self, base_model: str) -> Iterable[Figure]:
        return self._now.figures(base_model)

    def states(self, base_model: str) -> Sequence[WorkerState]:
        return self._now.states(base_model)

    def on_done(self, notice: Callable[[Sequence[str]], None]) -> None:
        self._notices.append(notice)

    def on_drawn(self, notice: Callable[[Sequence[Drawn]], None]) -> None:
        self._drawn_notices.append(notice)


class _LostError(Exception):
    """Another server leads."""
