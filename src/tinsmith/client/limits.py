"""What all clients of one account share so that together they stay within bounds.

Everything but `PendingSlots` lives on the background loop and needs no lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
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
    def submit(self, charge: int) -> None:
        """Starts the submission; calls `SampleGate.submitted(charge)` when it is over."""


class SampleLane:
    """The samples of one sampling client: first in, first out, with at most `max_unfinished` under way."""

    def __init__(self, max_unfinished: int | None) -> None:
        self.max_unfinished = max_unfinished
        self._waiting: deque[WaitingSample] = deque()
        self._abandoned = 0
        self._unfinished = 0

    def add(self, sample: WaitingSample) -> None:
        self._waiting.append(sample)

    def add_first(self, sample: WaitingSample) -> None:
        """For one that was sent back: it keeps its place."""
        self._waiting.appendleft(sample)
        self._unfinished -= 1

    def finished(self) -> None:
        self._unfinished -= 1

    def abandoned(self) -> None:
        """One that waits was given up. They are swept out when they are many, so that each costs little."""
        self._abandoned += 1
        if 2 * self._abandoned > len(self._waiting):
            self._waiting = deque(self.empty())

    def empty(self) -> list[WaitingSample]:
        """Takes out all that somebody still waits for."""
        waiting = [sample for sample in self._waiting if not sample.is_abandoned()]
        self._waiting.clear()
        self._abandoned = 0
        return waiting

    def take(self) -> WaitingSample | None:
        if self.max_unfinished is not None and self._unfinished >= self.max_unfinished:
            return None
        while self._waiting:
            sample = self._waiting.popleft()
            if not sample.is_abandoned():
                self._unfinished += 1
                return sample
            self._abandoned -= 1
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
        self._admit()

    def ready(self, lane: SampleLane) -> None:
        """The lane may have a sample to submit."""
        if lane not in self._lanes:
            self._lanes.append(lane)
        self._admit()

    def submitted(self, charge: int) -> None:
        self._submitting -= 1
        self._bytes_submitting -= charge
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
            charge = sample.byte_cost * (THROTTLED_BYTE_FACTOR if throttled else 1)
            self._submitting += 1
            self._bytes_submitting += charge
            sample.submit(charge)
        if self._lanes and throttled:
            self._look_again_at(self._closed_until if now < self._closed_until else self._throttled_until)

    def _look_again_at(self, when: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(when, self._admit)


class PendingSlots:
    """Bounds the unfinished samples of an account; whoever finds it full waits in line.

    Taken on any thread, given back on the loop's. A slot that was promised to someone who gave up goes to the next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0
        self._line: deque[_InLine] = deque()

    def try_take(self, limit: int) -> bool:
        with self._lock:
            if self._taken >= limit:
                return False
            self._taken += 1
            return True

    def take(self, limit: int, owner: object) -> None:
        """Waits until there is room."""
        place = self._line_up(limit, owner)
        try:
            place.result()
        except BaseException:
            self._leave(place)
            raise

    async def take_async(self, limit: int, owner: object) -> None:
        """The same for coroutines: no thread waits."""
        place = self._line_up(limit, owner)
        try:
            await asyncio.wrap_future(place)
        except BaseException:
            self._leave(place)
            raise

    def give_back(self) -> None:
        with self._lock:
            self._taken -= 1
            self._admit()

    def turn_away(self, owner: object, error: Exception) -> None:
        """Ends the wait of everyone in line for this owner."""
        with self._lock:
            turned_away = [place for place in self._line if place.owner is owner]
            self._line = deque(place for place in self._line if place.owner is not owner)
        for place in turned_away:
            if place.set_running_or_notify_cancel():
                place.set_exception(error)

    def _line_up(self, limit: int, owner: object) -> _InLine:
        place = _InLine(limit, owner)
        with self._lock:
            self._line.append(place)
            self._admit()
        return place

    def _admit(self) -> None:
        while self._line and self._taken < self._line[0].limit:
            place = self._line.popleft()
            if place.set_running_or_notify_cancel():
                self._taken += 1
                place.set_result(None)

    def _leave(self, place: _InLine) -> None:
        """Gives back what was promised meanwhile; a place in line that is cancelled is passed over."""
        if not place.cancel() and place.exception() is None:
            self.give_back()


class _InLine(Future[None]):
    def __init__(self, limit: int, owner: object) -> None:
        super().__init__()
        self.limit = limit
        self.owner = owner


def refuse_pending(limit: int) -> PendingLimitError:
    return PendingLimitError(
        f"{limit} samples of this account are unfinished, which is the limit. Wait for some of them, or raise "
        "max_pending, or set when_full='block' in the Config."
    )
