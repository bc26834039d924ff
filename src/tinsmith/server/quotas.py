"""How much of the server one owner may take up at a time, and all together, with whichever keys.

What is over a limit is refused with 429 before it costs anything, and told when to come again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

from tinsmith.errors import RateLimitError, ResponseSummary
from tinsmith.server.store.records import NewJob, Queued
from tinsmith.server.worker_metrics import Worked

ALL_OWNERS = 4
"""All owners together may take up so many times what one may."""

_SOON_SECONDS = 1
_UNKNOWN_SECONDS = 2
"""As long as nothing was done whose time could be measured."""
_LATEST_SECONDS = 60
"""Clients do not wait for longer before they ask again."""

_COUNT_AGAIN_SECONDS = 1.0
_MIB = 2**20
_ROW_BYTES = 1024
"""A generous guess at what a row takes beside its content, indexes included."""

CountQueued: TypeAlias = Callable[[], Awaitable[Sequence[Queued]]]
IsAwaited: TypeAlias = Callable[[str, int], Awaitable[bool]]
"""Whether later operations of a stream have arrived and wait for this number."""


class OverLimitError(RateLimitError):
    def __init__(self, limit: str, detail: str, seconds: int = _SOON_SECONDS) -> None:
        super().__init__(detail, ResponseSummary(429, {}), retry_after=seconds)
        self.limit = limit


class Tally:
    """Amounts by owner, against a limit for each and one for all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._amounts: Counter[str] = Counter()
        self.total = 0

    def __getitem__(self, owner: str) -> int:
        return self._amounts[owner]

    def amounts(self) -> Mapping[str, int]:
        return dict(self._amounts)

    def excess(self, owner: str, more: int, *, limits: int = 1) -> int:
        """By how much the limit, or several times the limit, would be passed with so much more."""
        mine, total = self._amounts[owner] - limits * self.most, self.total - limits * ALL_OWNERS * self.most
        return max(0, max(mine, total) + more)

    def add(self, owner: str, more: int) -> None:
        self.total += more
        self._amounts[owner] += more
        if not self._amounts[owner]:
            del self._amounts[owner]

    def set(self, amounts: Mapping[str, int]) -> None:
        """A new count."""
        self._amounts, self.total = Counter(amounts), sum(amounts.values())


class Paperwork:
    """What is written down although no work is done: refusals, sessions, samplers, custom losses, cancellations.

    All of it is removed with age, and until then it takes up room in the database. So there is an allowance, which
    grows back as time passes. A restarted server knows nothing of what was used up before.
    """

    def __init__(self, most_bytes: int, bytes_per_second: float, now: Callable[[], float] = time.monotonic) -> None:
        self._used = Tally(most_bytes)
        self._rate = bytes_per_second
        self._now = now
        self._counted_at = now()

    def charge(self, owner: str, size: int) -> None:
        """Take a row with so many bytes of content from the allowance, or refuse."""
        more = size + _ROW_BYTES
        if self._used.excess(owner, more):
            self._grow_back()
        if excess := self._used.excess(owner, more):
            raise OverLimitError(
                "records",
                f"Too much was refused, opened, cancelled, logged or changed by this owner lately: "
                f"{self._used[owner] / _MIB:,.1f} MiB of records, of which {self._used.most / _MIB:,.1f} MiB are kept "
                f"for an owner and {ALL_OWNERS} times as much for all. Every second there is room for "
                f"{self._rate / 1024:,.1f} KiB more.",
                math.ceil(excess / self._rate),
            )
        self._used.add(owner, more)

    def _grow_back(self) -> None:
        grown = int((self._now() - self._counted_at) * self._rate)
        self._counted_at += grown / self._rate
        for owner, amount in self._used.amounts().items():
            self._used.add(owner, -min(amount, grown))


class OpenRequests:
    """Requests that are being answered, long polls among them."""

    def __init__(self, most: int) -> None:
        self._open = Tally(most)

    @contextmanager
    def one_more(self, owner: str) -> Iterator[None]:
        if self._open.excess(owner, 1):
            raise OverLimitError(
                "open_requests",
                f"{self._open[owner]:,} requests of this owner are open; at most {self._open.most:,} of an owner are "
                f"served at once, and {ALL_OWNERS} times as many in all. Send fewer at a time.",
            )
        self._open.add(owner, 1)
        try:
            yield
        finally:
            self._open.add(owner, -1)


class Conversions:
    """Exports and imports that are being made. Each reads a whole model or writes a checkpoint, so one is enough."""

    def __init__(self) -> None:
        self._owners = Tally(1)

    @contextmanager
    def one_more(self, owner: str) -> Iterator[None]:
        if self._owners.excess(owner, 1):
            raise OverLimitError(
                "conversions",
                f"An export or import of this owner is under way, or {ALL_OWNERS} of all owners; no more are made at "
                "once. Wait until it has ended.",
            )
        self._owners.add(owner, 1)
        try:
            yield
        finally:
            self._owners.add(owner, -1)


class Incoming:
    """The memory of bodies that arrive, unpacked ones included, until their requests are answered."""

    def __init__(self, most: int) -> None:
        self._held = Tally(most)
        self._lock = threading.Lock()  # bodies are unpacked in threads

    def hold(self, owner: str, size: int) -> None:
        with self._lock:
            if self._held.excess(owner, size):
                raise OverLimitError(
                    "incoming_bytes",
                    f"{(self._held[owner] + size) / _MIB:,.1f} MiB of this owner are on their way; at most "
                    f"{self._held.most / _MIB:,.1f} MiB of an owner are taken at once, and {ALL_OWNERS} times as much "
                    "in all. Send fewer requests at a time.",
                )
            self._held.add(owner, size)

    def let_go(self, owner: str, size: int) -> None:
        with self._lock:
            self._held.add(owner, -size)


class Pace:
    """How long an operation takes, as measured where it is done: time in which there was nothing to do is no part."""

    def __init__(self, worked: Callable[[], Worked]) -> None:
        self._worked = worked
        self._before = Worked(0.0, 0)
        self._seconds_per_job: float | None = None

    def look(self) -> None:
        now = self._worked()
        seconds, jobs = now.seconds - self._before.seconds, now.jobs - self._before.jobs
        if jobs:
            self._seconds_per_job, self._before = seconds / jobs, now
        elif seconds:  # the one that is under way takes so much at least
            self._seconds_per_job = max(seconds, self._seconds_per_job or 0.0)

    def seconds_for(self, jobs: float) -> float:
        return _UNKNOWN_SECONDS if self._seconds_per_job is None else jobs * self._seconds_per_job


class _Waiting(Tally):
    """A tally that is counted anew while more is let in: a count has all that was written before it began.

    What is written while it is made may be in it or not, and is added: for a moment there may seem to be too much.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._let_in: Counter[str] = Counter()  # since the server was started, and so is the next
        self._written: Counter[str] = Counter()

    def let_in(self, owner: str, more: int) -> None:
        self._let_in[owner] += more
        self.add(owner, more)

    def has_written(self, owner: str, more: int) -> None:
        self._written[owner] += more

    def written(self) -> Counter[str]:
        return self._written.copy()

    def set_count(self, amounts: Mapping[str, int], written_before: Counter[str]) -> None:
        self.set(self._let_in - written_before + Counter(amounts))


class Backlog:
    """Work that was accepted and is not done yet.

    What is accepted is added to the last count; what was done shows in the next, which is made when a limit seems to
    be reached. So counting costs nothing as long as there is room. Where other servers let work in, too, a count is
    good for `count_seconds`.
    """

    def __init__(
        self,
        most_requests: int,
        most_bytes: int,
        count: CountQueued,
        is_awaited: IsAwaited,
        worked: Callable[[], Worked],
        now: Callable[[], float] = time.monotonic,
        count_seconds: float = math.inf,
    ) -> None:
        self._count_seconds = count_seconds
        self._requests = _Waiting(most_requests)
        self._bytes = _Waiting(most_bytes)
        self._count = count
        self._is_awaited = is_awaited
        self._pace = Pace(worked)
        self._now = now
        self._counted_at = -math.inf
        self._counting = asyncio.Lock()

    @asynccontextmanager
    async def admitted(self, job: NewJob) -> AsyncIterator[None]:
        """Let a job in, to be written within, or refuse it.

        A model waits for a number that is missing, and what waits takes up room: so a missing number is let in up to
        twice the limit, as without it there would never be room again.
        """
        is_old = self._counted_at == -math.inf or self._now() - self._counted_at > self._count_seconds
        if is_old or self._is_too_much(job):
            await self._count_again()
        if self._is_too_much(job) and not await self._fills_a_gap(job):
            raise self._refusal(job)
        self._requests.let_in(job.owner, 1)
        self._bytes.let_in(job.owner, len(job.payload))
        try:
            yield
        finally:
            self._requests.has_written(job.owner, 1)
            self._bytes.has_written(job.owner, len(job.payload))

    def _is_too_much(self, job: NewJob, *, limits: int = 1) -> bool:
        size = len(job.payload)
        return bool(
            self._requests.excess(job.owner, 1, limits=limits) or self._bytes.excess(job.owner, size, limits=limits)
        )

    async def _fills_a_gap(self, job: NewJob) -> bool:
        if job.model_id is None or job.seq_id is None or not await self._is_awaited(job.stream, job.seq_id):
            return False
        return not self._is_too_much(job, limits=2)  # asked last: others may have been let in meanwhile

    async def _count_again(self) -> None:
        async with self._counting:
            if self._now() - self._counted_at < _COUNT_AGAIN_SECONDS:
                return
            requests, sizes = self._requests.written(), self._bytes.written()
            queued = await self._count()
            self._counted_at = self._now()
            self._requests.set_count({one.owner: one.requests for one in queued}, requests)
            self._bytes.set_count({one.owner: one.size_bytes for one in queued}, sizes)
            self._pace.look()

    def _refusal(self, job: NewJob) -> RateLimitError:
        owner, requests, sizes = job.owner, self._requests, self._bytes
        bytes_per_job = max(1.0, sizes.total / max(1, requests.total))
        over = max(requests.excess(owner, 1), sizes.excess(owner, len(job.payload)) / bytes_per_job)
        return OverLimitError(
            "queued",
            f"{requests[owner]:,} requests of this owner wait, with {sizes[owner] / _MIB:,.1f} MiB; at most "
            f"{requests.most:,} with {sizes.most / _MIB:,.1f} MiB of an owner may, and {ALL_OWNERS} times as many in "
            "all. Wait for results first.",
            math.ceil(min(max(self._pace.seconds_for(over), _SOON_SECONDS), _LATEST_SECONDS)),
        )
