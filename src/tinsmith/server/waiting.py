"""Long polls: one query answers everybody who waits.

Whoever wants to know about a job, or about news of a sampling session, leaves a question here. A single task asks the
store about all of them together: at once for new questions, as soon as a worker says that jobs are done, and every
second in case a message was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from tinsmith.errors import InvalidInputError
from tinsmith.server.messages import Drawn, Figure, Replay
from tinsmith.server.outage import Outage
from tinsmith.server.store import StoreUnavailableError
from tinsmith.server.store.records import Abandoned, Lane, NewJob, Status
from tinsmith.server.worker_metrics import WorkerState
from tinsmith.types import SampleRequest

log = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_MAX_TOGETHER = 5000
"""Names in one query; databases have a limit."""
_ANSWERED_AT_ONCE = 4
"""Jobs of a batch are done together. If all who wait for them were answered at once, all would come with their next
submissions at once, and wait for each other."""
_BREATH_SECONDS = 0.003
"""How long the next few wait at most while submissions are being written."""
_MAX_PENDING = 100_000

T = TypeVar("T")
Query: TypeAlias = Callable[[Sequence[str]], Awaitable[Mapping[str, T]]]
"""What the store knows about these names; those it does not know are left out."""
Breathe: TypeAlias = Callable[[float], Awaitable[None]]
"""Lets others go first, for so many seconds at most."""


class Workers(Protocol):
    """The processes that run jobs, as far as the API needs them."""

    @property
    def leads(self) -> bool:
        """Whether what must be done once is done here: with several servers on one database, one of them leads."""

    def wake(self, base_model: str, replica: str | None = None) -> None:
        """Tell the workers of this model, or the one that such jobs are for, that there is work.

        Never blocks, never fails.
        """

    def choose_replica(self, job: NewJob, request: SampleRequest) -> str:
        """Who draws this sample, which counts as its work until it is done or `are_over` is called.

        Empty if that is not settled, or if there is only one worker.
        """

    def are_over(self, request_ids: Sequence[str]) -> None:
        """These were not submitted after all, or are settled without their workers."""

    def is_ready(self, base_model: str, lane: Lane | None = None) -> bool:
        """Whether its workers have loaded their model: those for this kind of work, or all kinds."""

    def problem(self, base_model: str) -> str | None:
        """Why this model will not be loaded at all, if so."""

    def held_up(self, base_model: str, stream: str = "", lane: Lane | None = None) -> str | None:
        """What those wait for who do this kind of work, if they can do nothing at the moment, or nothing for this model
        or sampler. Without a kind: what any of its workers waits for.
        """

    def replay(self, base_model: str, lane: Lane | None = None) -> Replay | None:
        """Which model is being built again, if one is, by those who do this kind of work, and how far it is."""

    def figures(self, base_model: str) -> Iterable[Figure]:
        """What its workers have counted, for the page of metrics."""

    def states(self, base_model: str) -> Sequence[WorkerState]:
        """Its workers one by one."""

    def on_done(self, notice: Callable[[Sequence[str]], None]) -> None:
        """Call `notice` on the API's event loop with the ids of jobs that have just finished."""

    def on_drawn(self, notice: Callable[[Sequence[Drawn]], None]) -> None:
        """Call `notice` there with tokens as they are drawn, of the samples for which that was asked."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def note_abandoned(abandoned: Abandoned, waiting: Waiting, workers: Workers) -> None:
    """Tell everybody about samples that were cancelled, or are to be."""
    waiting.notice(abandoned.cancelled)
    workers.are_over(abandoned.cancelled)
    for base_model in abandoned.asked:
        workers.wake(base_model)


class _Question(NamedTuple, Generic[T]):
    is_answer: Callable[[T | None], bool]
    future: asyncio.Future[T | None]

    def settle(self, value: T | None) -> None:
        if not self.future.done():
            self.future.set_result(value)


class Board(Generic[T]):
    """Questions about names, answered by one query for all that are due."""

    def __init__(self, query: Query[T], news: asyncio.Event, breathe: Breathe) -> None:
        self._query = query
        self._breathe = breathe
        self._news = news
        self._questions: defaultdict[str, set[_Question[T]]] = defaultdict(set)
        self._due: set[str] = set()

    def __len__(self) -> int:
        return sum(map(len, self._questions.values()))

    async def ask(self, name: str, is_answer: Callable[[T | None], bool], *, look: bool = True) -> T | None:
        """The first value under this name that counts as an answer; `None` counts, if the name is unknown.

        Without `look` the answer is known not to be there yet.
        """
        question = _Question(is_answer, asyncio.get_running_loop().create_future())
        self._questions[name].add(question)
        if look:
            self._set_due(name)
        try:
            return await question.future
        finally:
            self._questions[name].discard(question)
            if not self._questions[name]:
                del self._questions[name]

    def notice(self, name: str) -> None:
        """There is something new under this name."""
        if name in self._questions:
            self._set_due(name)

    def all_due(self) -> None:
        self._due.update(self._questions)

    async def answer(self) -> bool:
        """Ask the store about what is due; False if nobody wants to know anything."""
        due = set(islice(self._due, _MAX_TOGETHER))
        self._due -= due
        if self._due:
            self._news.set()
        # Taken before the query: a question asked meanwhile wants to know what is true after it was asked.
        asked = {name: list(self._questions.get(name, ())) for name in due}
        if not any(asked.values()):
            return False
        known = await self._known(list(asked))
        answers = (
            (question, known.get(name))
            for name, questions in asked.items()
            for question in questions
            if question.is_answer(known.get(name))
        )
        # Those who wait on cost no time: of thousands that were looked at in vain, the next result would come too late.
        for number, (question, value) in enumerate(answers):
            if number % _ANSWERED_AT_ONCE == 0:
                await self._breathe(_BREATH_SECONDS)
            question.settle(value)
        return True

    async def _known(self, names: Sequence[str]) -> Mapping[str, T]:
        """A name that no database can hold (with a NUL, say) is unknown, and spoils nobody else's answer."""
        try:
            return await self._query(names)
        except InvalidInputError:
            if len(names) == 1:
                return {}
        middle = len(names) // 2
        return {**await self._known(names[:middle]), **await self._known(names[middle:])}

    def _set_due(self, name: str) -> None:
        self._due.add(name)
        self._news.set()


class Waiting:
    """`statuses` tells where jobs stand, `newest` the highest cursor of sampling sessions.

    `breathe` is called between answers.
    """

    def __init__(self, statuses: Query[Status], newest: Query[int], breathe: Breathe) -> None:
        self._news = asyncio.Event()
        self._jobs = Board(statuses, self._news, breathe)
        self._streams = Board(newest, self._news, breathe)
        self._limits: set[asyncio.Timeout] = set()
        self._is_draining = False
        self._pending: dict[str, str] = {}
        self._outage = Outage(log)

    @property
    def is_blind(self) -> bool:
        """Whether the store did not answer when it was asked last."""
        return self._outage.is_on

    def __len__(self) -> int:
        """How many questions are open."""
        return len(self._jobs) + len(self._streams)

    def expect(self, request_id: str, owner: str) -> None:
        """A job of this owner that is only now being submitted: there is no need to look before its worker is heard."""
        if len(self._pending) >= _MAX_PENDING:
            self._pending.clear()
        self._pending[request_id] = owner

    def expect_no_longer(self, request_id: str) -> None:
        self._pending.pop(request_id, None)

    async def status(self, request_id: str) -> Status | None:
        """Where a job stands now; `None` if there is no such job."""
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await self._jobs.ask(request_id, lambda status: True)

    async def until_done(
        self, request_id: str, owner: str, seconds: float, halts: Callable[[Status], bool] | None = None
    ) -> Status | None:
        """The job once it has an outcome, or `halts`, which is asked at every look, says that it has come to a halt.

        `None` if that takes longer. What is not this owner's is not waited for.
        """

        def is_over(status: Status | None) -> bool:
            if status is None or status.owner != owner or status.outcome is not None:
                return True
            return halts is not None and halts(status)

        look = self._pending.get(request_id) != owner
        return await self._within(seconds, self._jobs.ask(request_id, is_over, look=look))

    async def until_news(self, sampler_id: str, cursor: int, seconds: float) -> int | None:
        """The highest cursor of a sampling session once it is above this one; `None` if that takes longer."""
        return await self._within(
            seconds, self._streams.ask(sampler_id, lambda newest: newest is not None and newest > cursor)
        )

    def notice(self, request_ids: Iterable[str]) -> None:
        """These jobs have finished."""
        for request_id in request_ids:
            self.expect_no_longer(request_id)
            self._jobs.notice(request_id)
            self._streams.notice(request_id.rpartition(":")[0])

    def drain(self) -> None:
        """Let every long poll end now, as if its time were over."""
        self._is_draining = True
        for limit in self._limits:
            limit.reschedule(0)

    async def run(self) -> None:
        """Answer until cancelled."""
        clock = asyncio.get_running_loop()
        look_again = clock.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(look_again):
                    await self._news.wait()
            self._news.clear()
            if clock.time() >= look_again:
                look_again = clock.time() + _LOOK_AGAIN_SECONDS
                self._jobs.all_due()
                self._streams.all_due()
            # Questions that were not answered stay, and are due again when all are looked at.
            try:
                if await self._jobs.answer() | await self._streams.answer():
                    self._outage.is_over()
            except StoreUnavailableError as error:
                self._outage.met("The database is out of reach, so those who wait for results wait on", error)
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            except Exception:
                log.exception("could not look up jobs")
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def _within(self, seconds: float, asking: Awaitable[T | None]) -> T | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self._is_draining else seconds) as limit:
                self._limits.add(limit)
                try:
                    return await asking
                finally:
                    self._limits.discard(limit)
        return None
