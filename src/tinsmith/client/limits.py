"""What all clients of one account share so that together they stay within bounds.

Everything but `PendingSlots` lives on the background loop and needs no lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Protocol

from tinsmith.errors import PendingLimitError

MAX_SUBMISSIONS = 400
MAX_THROTTLED_SUBMISSIONS = 10
THROTTLE_SECONDS = 10.0
THROTTLED_BYTE_FACTOR = 20


class ByteBudget:
    """Lets requests through in order while the balance is not negative, so one large request may overdraw it."""

    def __init__(self, size: int) -> None:
        self._balance = size
        self._size = size
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()

    def resize(self, size: int) -> None:
        self._balance += size - self._size
        self._size = size
        self._admit()

    async def acquire(self, amount: int) -> None:
        if self._balance >= 0 and not self._waiters:
            self._balance -= amount
            return
        admitted = asyncio.get_running_loop().create_future()
        self._waiters.append((admitted, amount))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.release(amount)
            raise

    def release(self, amount: int) -> None:
        self._balance += amount
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self._balance >= 0:
            admitted, amount = self._waiters.popleft()
            if not admitted.done():
                self._balance -= amount
                admitted.set_result(None)


class WaitingSample(Protocol):
    """A sample that has not been submitted yet, as the gate sees it."""

    byte_cost: int

    def is_abandoned(self) -> bool: ...
    def submit(self) -> None:
        """Starts the submission; calls `SampleGate.submitted(byte_cost)` when it is over."""


class SampleLane:
    """The samples of one sampling client: first in, first out, with at most `max_unfinished` under way."""

    def __init__(self, max_unfinished: int | None) -> None:
        self.max_unfinished = max_unfinished
        self._waiting: deque[WaitingSample] = deque()
        self._unfinished = 0

    def add(self, sample: WaitingSample) -> None:
        self._waiting.append(sample)

    def add_first(self, sample: WaitingSample) -> None:
        """For one that was sent back: it keeps its place."""
        self._waiting.appendleft(sample)
        self._unfinished -= 1

    def finished(self) -> None:
        self._unfinished -= 1

    def empty(self) -> list[WaitingSample]:
        """Takes out all that wait."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def take(self) -> WaitingSample | None:
        if self.max_unfinished is not None and self._unfinished >= self.max_unfinished:
            return None
        while self._waiting:
            sample = self._waiting.popleft()
            if not sample.is_abandoned():
                self._unfinished += 1
                return sample
        return None


class SampleGate:
    """Decides when the next sample of an account is submitted, taking its clients in turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_bytes: int) -> None:
        self._loop = loop
        self._lanes: deque[SampleLane] = deque()
        self._submitting = 0
        self._max_bytes = max_bytes
        self._bytes_submitting = 0
        self._closed_until = 0.0
        self._throttled_until = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def resize(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def ready(self, lane: SampleLane) -> None:
        """The lane may have a sample to submit."""
        if lane not in self._lanes:
            self._lanes.append(lane)
        self._admit()

    def submitted(self, byte_cost: int) -> None:
        self._submitting -= 1
        self._bytes_submitting -= byte_cost
        self._admit()

    def back_off(self, seconds: float) -> None:
        """Nothing is submitted for this long, and little for a while after."""
        self._closed_until = max(self._closed_until, self._loop.time() + seconds)
        self._throttled_until = self._closed_until + THROTTLE_SECONDS

    def _admit(self) -> None:
        now = self._loop.time()
        throttled = now < self._throttled_until
        limit = MAX_THROTTLED_SUBMISSIONS if throttled else MAX_SUBMISSIONS
        if now < self._closed_until:
            limit = 0
        while self._lanes and self._submitting < limit and self._bytes_submitting <= self._max_bytes:
            lane = self._lanes.popleft()
            sample = lane.take()
            if sample is None:
                continue  # it comes back through ready()
            self._lanes.append(lane)
            if throttled:
                sample.byte_cost *= THROTTLED_BYTE_FACTOR
            self._submitting += 1
            self._bytes_submitting += sample.byte_cost
            sample.submit()
        if self._lanes and throttled:
            self._look_again_at(self._closed_until if now < self._closed_until else self._throttled_until)

    def _look_again_at(self, when: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(when, self._admit)


class PendingSlots:
    """Bounds the unfinished samples of an account. Taken on the caller's thread, given back on the loop's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = 0

    def try_take(self, limit: int) -> bool:
        with self._changed:
            if self._taken >= limit:
                return False
            self._taken += 1
            return True

    def take(self, limit: int) -> None:
        """Waits until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken < limit)
            self._taken += 1

    def give_back(self) -> None:
        with self._changed:
            self._taken -= 1
            self._changed.notify()


def refuse_pending(limit: int) -> PendingLimitError:
    return PendingLimitError(
        f"{limit} samples of this account are unfinished, which is the limit. Wait for some of them, or raise "
        "max_pending, or set when_full='block' in the Config."
    )
