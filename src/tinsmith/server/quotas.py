"""How much of the server one key may take up at a time, and all keys together.

What is over a limit is refused with 429 before it costs anything, and told when to come again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from tinsmith.errors import RateLimitError, ResponseSummary
from tinsmith.server.store.records import NewJob, Queued

ALL_KEYS = 4
"""All keys together may take up so many times what one may."""

_SOON_SECONDS = 1
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
        self._total = 0
        self._falls_per_second = 0.0

    def __getitem__(self, owner: str) -> int:
        return self._amounts[owner]

    def amounts(self) -> Mapping[str, int]:
        return dict(self._amounts)

    def excess(self, owner: str, more: int, *, limits: int = 1) -> int:
        """By how much the limit, or several times the limit, would be passed with so much more."""
        mine, total = self._amounts[owner] - limits * self.most, self._total - limits * ALL_KEYS * self.most
        return max(0, max(mine, total) + more)

    def add(self, owner: str, more: int) -> None:
        self._total += more
        self._amounts[owner] += more
        if not self._amounts[owner]:
            del self._amounts[owner]

    def set(self, amounts: Mapping[str, int], seconds: float) -> None:
        """A new count, so many seconds after the last."""
        total = sum(amounts.values())
        self._falls_per_second = max(0, self._total - total) / seconds if seconds else 0.0
        self._amounts, self._total = Counter(amounts), total

    def seconds_until_fallen(self, by: int) -> float:
        """At the speed between the last two counts."""
        if not by:
            return 0.0
        return by / self._falls_per_second if self._falls_per_second else math.inf


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
                f"Too much was refused, opened, cancelled or changed with this key lately: "
                f"{self._used[owner] / _MIB:,.1f} MiB of records, of which {self._used.most / _MIB:,.1f} MiB are kept "
                f"for a key and {ALL_KEYS} times as much for all. Every second there is room for "
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
                f"{self._open[owner]:,} requests of this key are open; at most {self._open.most:,} of a key are served "
                f"at once, and {ALL_KEYS} times as many in all. Send fewer at a time.",
            )
        self._open.add(owner, 1)
        try:
            yield
        finally:
            self._open.add(owner, -1)


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
                    f"{(self._held[owner] + size) / _MIB:,.1f} MiB are on their way with this key; at most "
                    f"{self._held.most / _MIB:,.1f} MiB of a key are taken at once, and {ALL_KEYS} times as much in "
                    "all. Send fewer requests at a time.",
                )
            self._held.add(owner, size)

    def let_go(self, owner: str, size: int) -> None:
        with self._lock:
            self._held.add(owner, -size)


class Backlog:
    """Work that was accepted and is not done yet.

    What is accepted is added to the last count; what was done shows in the next, which is made when a limit seems to
    be reached. So counting costs nothing as long as there is room.
    """

    def __init__(
        self,
        most_requests: int,
        most_bytes: int,
        count: CountQueued,
        is_awaited: IsAwaited,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = Tally(most_requests)
        self._bytes = Tally(most_bytes)
        self._count = count
        self._is_awaited = is_awaited
        self._now = now
        self._counted_at = -math.inf
        self._counting = asyncio.Lock()

    async def admit(self, job: NewJob) -> None:
        """Let a job in, or refuse it.

        A model waits for a number that is missing, and what waits takes up room: so a missing number is let in up to
        twice the limit, as without it there would never be room again.
        """
        if self._is_too_much(job) or self._counted_at == -math.inf:
            await self._count_again()
        if self._is_too_much(job) and not await self._fills_a_gap(job):
            raise self._refusal(job)
        self._requests.add(job.owner, 1)
        self._bytes.add(job.owner, len(job.payload))

    def _is_too_much(self, job: NewJob, *, limits: int = 1) -> bool:
        size = len(job.payload)
        return bool(
            self._requests.excess(job.owner, 1, limits=limits) or self._bytes.excess(job.owner, size, limits=limits)
        )

    async def _fills_a_gap(self, job: NewJob) -> bool:
        if job.model_id is None or job.seq_id is None or self._is_too_much(job, limits=2):
            return False
        return await self._is_awaited(job.stream, job.seq_id)

    async def _count_again(self) -> None:
        async with self._counting:
            seconds = self._now() - self._counted_at
            if seconds < _COUNT_AGAIN_SECONDS:
                return
            queued = await self._count()
            self._counted_at = self._now()
            self._requests.set({one.owner: one.requests for one in queued}, seconds)
            self._bytes.set({one.owner: one.size_bytes for one in queued}, seconds)

    def _refusal(self, job: NewJob) -> RateLimitError:
        owner, requests, sizes = job.owner, self._requests, self._bytes
        seconds = max(
            requests.seconds_until_fallen(requests.excess(owner, 1)),
            sizes.seconds_until_fallen(sizes.excess(owner, len(job.payload))),
        )
        return OverLimitError(
            "queued",
            f"{requests[owner]:,} requests of this key wait, with {sizes[owner] / _MIB:,.1f} MiB; at most "
            f"{requests.most:,} with {sizes.most / _MIB:,.1f} MiB of a key may, and {ALL_KEYS} times as many in all. "
            "Wait for results first.",
            math.ceil(min(max(seconds, _SOON_SECONDS), _LATEST_SECONDS)),
        )
