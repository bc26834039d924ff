"""Keeps one worker alive: starts it, hears it, starts it again when it dies, and knows when to give up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from tinsmith.server.lives import CannotBeginError, Life, Lives
from tinsmith.server.messages import Drawn, Member, Message, Replay, WorkerSettings
from tinsmith.server.process_life import ProcessLife
from tinsmith.server.suspects import ending
from tinsmith.server.worker_metrics import Told

log = logging.getLogger(__name__)

WORKER_MODULE = "tinsmith.server.worker_process"
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
MAX_FAILED_STARTS = 5
"""Deaths in a row of a model that was never loaded. One that was can be loaded again, when there is memory for it, or
when it is on a machine that has its files: whoever waits for it is told, and loses nothing."""
STOP_SECONDS = 45.0
"""For its step, and for writing down its models."""
HELD_UP_SECONDS = 10.0
"""For so long a worker is believed that could not work."""
SILENT_SECONDS = 20
"""After so long without a word something is wrong with a worker, for it speaks every second."""


class LivesHere(Lives):
    """In processes of this machine."""

    async def prepare(self) -> None:
        pass

    async def begin(self, settings: WorkerSettings) -> Life:
        return await ProcessLife.begin(WORKER_MODULE, settings)

    async def close(self) -> None:
        pass


async def nothing(is_ready: bool) -> None:
    """What is done about a worker that comes or goes, where it is the only one."""


class Keeper:
    """`hear` gets the ids of finished jobs, and `hear_drawn` tokens as they are drawn.

    `refuse` settles the jobs of a worker that was given up, with the reason. `on_change` hears when the worker is
    ready, and when it is gone; it is waited for before the next one is started.
    """

    def __init__(
        self,
        name: str,
        settings: WorkerSettings,
        hear: Callable[[Sequence[str]], None],
        hear_drawn: Callable[[Sequence[Drawn]], None],
        refuse: Callable[[str], Awaitable[None]],
        lives: Lives,
        on_change: Callable[[bool], Awaitable[None]] = nothing,
    ) -> None:
        self.is_ready = False
        self.problem: str | None = None
        """Why there will be no worker any more."""
        self.settled = asyncio.Event()
        """Set when the worker is ready, or was given up."""
        self.last_status: int | None = None
        """How the last worker ended that was ready; `None` if there was none."""
        self.where, self.process = "", 0
        """The machine that it is on, and its process there, if it says so."""
        self.members: dict[int, Member] = {}
        """By rank: those who share its training."""
        self.told = Told()
        self.replay: Replay | None = None
        """How far a model is that is being built again."""

        self._name = name
        self._who = f"{name} ({settings.place})" if settings.place else name
        self._whose = {"base_model": name}
        self.settings = settings
        self._hear = hear
        self._hear_drawn = hear_drawn
        self._refuse = refuse
        self._lives = lives
        self._on_change = on_change
        self._life: Life | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_words = Message()
        self._was_useful = False
        self._wanted = asyncio.Event()
        self._woken = False
        self._stopping = False
        self._held_up: tuple[str, float] | None = None
        self._silent_seconds = 0
        self._no_room: dict[str, str] = {}
        self._was_ever_ready = False
        self._cannot_begin: str | None = None
        self._cannot_load: str | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"worker of {self._who}")

    @property
    def has_begun(self) -> bool:
        """Whether there was ever room for it."""
        return bool(self.where)

    @property
    def held_up(self) -> str | None:
        """What the worker waits for, with all its work, which it says again and again."""
        if self._cannot_begin is not None:
            return f"{self._cannot_begin}; it is tried again and again"
        if self._silent_seconds >= SILENT_SECONDS:
            return f"its worker has not been heard of for {self._silent_seconds} s; if that lasts, another is started"
        if self._held_up is not None and time.monotonic() - self._held_up[1] <= HELD_UP_SECONDS:
            return self._held_up[0]
        if self._cannot_load is not None:
            return f"its worker could not be started again: {self._cannot_load}; it is tried again and again"
        if self._was_ever_ready and not self.is_ready:
            return "its worker is gone, and is being started again"
        return None

    @property
    def no_room(self) -> Mapping[str, str]:
        """The models and samplers that wait, while others go on, and what for."""
        return self._no_room

    def wake(self) -> None:
        self._wanted.set()
        if self._life is None or self._woken:
            return
        self._life.wake()
        # Of many that wake it in one turn of the loop, the first is enough.
        self._woken = True
        asyncio.get_running_loop().call_soon(self._not_woken)

    def _not_woken(self) -> None:
        self._woken = False

    # Its lives

    async def _keep(self) -> None:
        failed_starts, pause = 0, FIRST_PAUSE_SECONDS
        while True:
            status, was_ready = await self._live()
            if self._stopping:
                return
            self._was_ever_ready = self._was_ever_ready or was_ready
            if self._cannot_begin is None:  # else there was no place for it, which says nothing about the model
                failed_starts += 1
            is_hopeless = self._last_words.is_final or failed_starts == MAX_FAILED_STARTS
            if is_hopeless and not self._was_ever_ready:
                break
            if self._was_ever_ready and not was_ready:
                self._cannot_load = self._why(status).rstrip(".")
            if self._was_useful:
                pause = FIRST_PAUSE_SECONDS
            log.error(
                "The worker of %s is gone: %s; starting it again in %.1f s.",
                self._who,
                self._why(status),
                pause,
                extra=self._whose,
            )
            self.told.add("tinsmith_worker_restarts_total")
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
        await self._give_up(self._why(status))

    def _why(self, status: int | None) -> str:
        return self._last_words.failed or f"its process ended {ending(status)}"

    async def _live(self) -> tuple[int | None, bool]:
        """One process from its start to its end: the exit status, and whether it ever loaded the model.

        It is told how the last one ended that had jobs to run.
        """
        self._last_words, self._was_useful, self.replay = Message(), False, None
        self._held_up, self._no_room, self._silent_seconds = None, {}, 0
        self.members = {}
        self.told.begin_anew()
        status = None
        try:
            status = await self._run()
        except CannotBeginError as error:
            why = str(error).rstrip(".")
            self._last_words, self._cannot_begin = Message(failed=why), why
        was_ready, self.is_ready = self.is_ready, False
        if was_ready:
            self.last_status = status
        self.settled.clear()
        await self._changed(is_ready=False)
        return status, was_ready

    async def _run(self) -> int:
        life = self._life = await self._lives.begin(
            msgspec.structs.replace(self.settings, last_status=self.last_status)
        )
        self._cannot_begin = None
        listening = asyncio.create_task(self._listen(life))
        try:
            async for line in life.heard():
                await self._heard(line)
            return await life.ended()
        finally:
            listening.cancel()
            self._life = None

    async def _changed(self, is_ready: bool) -> None:
        try:
            await self._on_change(is_ready)
        except Exception:
            log.exception("could not note that the worker of %s came or went", self._who, extra=self._whose)

    async def _listen(self, life: Life) -> None:
        """Ends a worker that can neither work nor end itself: its whole process is stopped, or hangs in the system.

        Silence is counted second by second, so that a pause of this process does not count as one of the worker.
        """
        most = self.settings.stall_seconds + SILENT_SECONDS  # the worker's own watchdog, which tells more, comes first
        while self._silent_seconds < most:
            await asyncio.sleep(1)
            self._silent_seconds += self.is_ready
            if self._silent_seconds == SILENT_SECONDS:
                log.warning(
                    "The worker of %s has not been heard of for %d s; after %.0f s another one is started.",
                    self._who,
                    SILENT_SECONDS,
                    most,
                    extra=self._whose,
                )
        self._last_words = Message(failed=f"it was not heard of for {self._silent_seconds} s and was killed")
        life.kill()

    async def _heard(self, line: bytes) -> None:
        self._silent_seconds = 0
        try:
            message = msgspec.json.decode(line, type=Message)
        except msgspec.DecodeError:
            log.warning("The worker of %s printed %r.", self._who, line[:200], extra=self._whose)
            return
        if message.where:
            self.where, self.process = message.where, message.process
        elif message.member is not None:
            self.members[message.member.rank] = message.member
        elif message.ready:
            self.is_ready, self._cannot_load = True, None
            if self._was_ever_ready:
                log.info("The worker of %s is back.", self._who, extra=self._whose)
            await self._changed(is_ready=True)
            self.settled.set()
        elif message.failed:
            self._last_words = message
        elif message.replay is not None:
            self.replay = message.replay if message.replay.replayed < message.replay.total else None
        elif message.held_up:
            self._held_up = message.held_up, time.monotonic()
        elif message.no_room is not None:
            self._no_room = message.no_room
        elif message.drawn:
            self._hear_drawn(message.drawn)
        elif message.figures:
            self.told.hear(message.figures)
        elif message.done:
            self._was_useful, self._held_up = True, None
            self._hear(message.done)

    async def _give_up(self, why: str) -> None:
        where = f" on {self.where}" if self.where else ""
        self.problem = f"The base model {self._name!r} cannot be loaded{where}: {why.rstrip('.')}."
        log.error("%s It is not tried again until the server is restarted.", self.problem, extra=self._whose)
        self.settled.set()
        while True:
            self._wanted.clear()
            try:
                await self._refuse(self.problem)
                await self._wanted.wait()
            except Exception:
                log.exception("could not refuse the jobs of %s", self._name, extra=self._whose)
                await asyncio.sleep(MAX_PAUSE_SECONDS)

    # Its end

    async def stop(self) -> None:
        """Ends the worker: when its input ends it finishes its step; one that is still loading has none to finish."""
        if self._task is None:
            return
        self._stopping = True
        life = self._life
        if life is not None:
            life.dismiss()
            if not self.is_ready or not await _ends_within(life, STOP_SECONDS):
                life.kill()
                await life.ended()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def _ends_within(life: Life, seconds: float) -> bool:
    try:
        await asyncio.wait_for(life.ended(), seconds)
    except TimeoutError:
        return False
    return True
