"""Limits shared by the clients of an account, under a clock that the tests move."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tinsmith.client.limits import (
    MAX_SUBMISSIONS,
    MAX_THROTTLED_SUBMISSIONS,
    THROTTLE_SECONDS,
    ByteBudget,
    PendingSlots,
    SampleGate,
    SampleLane,
)
from tinsmith.errors import ClientClosedError

# Bytes


def test_a_byte_budget_lets_requests_through_in_order_and_one_may_overdraw_it() -> None:
    async def scenario() -> list[str]:
        budget, order = ByteBudget(10), []

        async def ask(name: str, amount: int) -> None:
            await budget.acquire(amount)
            order.append(name)

        await ask("large", 1000)
        waiting = [asyncio.create_task(ask(name, 1)) for name in ("first", "second")]
        await asyncio.sleep(0)
        assert order == ["large"]
        budget.release(1000)
        await asyncio.gather(*waiting)
        return order

    assert asyncio.run(scenario()) == ["large", "first", "second"]


def test_a_byte_budget_forgets_those_who_gave_up() -> None:
    async def scenario() -> None:
        budget = ByteBudget(0)
        await budget.acquire(5)
        impatient = asyncio.create_task(budget.acquire(5))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        budget.release(5)
        await asyncio.wait_for(budget.acquire(5), 5)
        await asyncio.wait_for(asyncio.gather(budget.acquire(1), _release(budget, 5)), 5)

    asyncio.run(scenario())


def test_bytes_granted_in_the_moment_of_giving_up_are_returned() -> None:
    async def scenario() -> None:
        budget = ByteBudget(0)
        await budget.acquire(5)
        impatient = asyncio.create_task(budget.acquire(7))
        await asyncio.sleep(0)
        budget.release(5)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        await asyncio.wait_for(budget.acquire(1), 5)

    asyncio.run(scenario())


def test_a_larger_budget_admits_those_who_wait() -> None:
    async def scenario() -> None:
        budget = ByteBudget(0)
        await budget.acquire(5)
        waiting = asyncio.create_task(budget.acquire(1))
        await asyncio.sleep(0)
        budget.resize(100)
        await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())


async def _release(budget: ByteBudget, amount: int) -> None:
    budget.release(amount)


# The gate


class ManualLoop:
    """Time that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, Callable[[], Any], asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], Any]) -> Any:
        timer = Timer()
        self._due.append((when, callback, timer))  # type: ignore[arg-type]
        return timer

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [entry for entry in self._due if entry[0] <= self.now]
        self._due = [entry for entry in self._due if entry[0] > self.now]
        for _, callback, timer in due:
            if not timer.cancelled():
                callback()


class Timer:
    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled


class Sample:
    def __init__(self, log: list[str], name: str, byte_cost: int = 1) -> None:
        self.byte_cost = byte_cost
        self.charge = 0
        self.abandoned = False
        self._log = log
        self._name = name

    def is_abandoned(self) -> bool:
        return self.abandoned

    def submit(self, charge: int) -> None:
        self.charge = charge
        self._log.append(self._name)


class Setting:
    """A gate with some lanes, and what was submitted in which order."""

    def __init__(self, max_bytes: int = 1 << 30, lanes: int = 1, max_unfinished: int | None = None) -> None:
        self.loop = ManualLoop()
        self.gate = SampleGate(self.loop, max_bytes)  # type: ignore[arg-type]
        self.lanes = [SampleLane(max_unfinished) for _ in range(lanes)]
        self.submitted: list[str] = []
        self.samples: list[Sample] = []

    def add(self, count: int, lane: int = 0, byte_cost: int = 1) -> None:
        for number in range(count):
            sample = Sample(self.submitted, f"{lane}:{number}", byte_cost)
            self.samples.append(sample)
            self.lanes[lane].add(sample)
        self.gate.ready(self.lanes[lane])


def test_at_most_so_many_samples_are_being_submitted_at_once() -> None:
    setting = Setting()
    setting.add(MAX_SUBMISSIONS + 5)
    assert len(setting.submitted) == MAX_SUBMISSIONS
    setting.gate.submitted(setting.samples[0].charge)
    assert len(setting.submitted) == MAX_SUBMISSIONS + 1


def test_the_clients_of_an_account_take_turns() -> None:
    setting = Setting(lanes=2)
    setting.gate.back_off(1)
    setting.add(3, lane=0)
    setting.add(3, lane=1)
    setting.loop.advance(1)
    assert setting.submitted == ["0:0", "1:0", "0:1", "1:1", "0:2", "1:2"]


def test_the_bytes_being_submitted_are_bounded_and_one_may_overdraw() -> None:
    setting = Setting(max_bytes=10)
    setting.add(3, byte_cost=100)
    assert setting.submitted == ["0:0"]
    setting.gate.submitted(100)
    assert setting.submitted == ["0:0", "0:1"]


def test_nothing_leaves_during_a_backoff_and_little_for_a_while_after_it() -> None:
    setting = Setting()
    setting.gate.back_off(4)
    setting.add(100)
    setting.loop.advance(3.9)
    assert setting.submitted == []
    setting.loop.advance(0.1)
    assert len(setting.submitted) == MAX_THROTTLED_SUBMISSIONS
    setting.loop.advance(THROTTLE_SECONDS - 0.1)
    assert len(setting.submitted) == MAX_THROTTLED_SUBMISSIONS
    setting.loop.advance(0.1)
    assert len(setting.submitted) == 100


def test_while_throttled_samples_weigh_more_and_what_they_weighed_is_given_back() -> None:
    setting = Setting(max_bytes=100)
    setting.gate.back_off(1)
    setting.add(5, byte_cost=10)
    setting.loop.advance(1)
    assert setting.submitted == ["0:0"]
    assert setting.samples[0].charge == 200
    setting.gate.submitted(setting.samples[0].charge)
    assert setting.submitted == ["0:0", "0:1"]


def test_a_shorter_backoff_does_not_cut_a_longer_one_short() -> None:
    setting = Setting()
    setting.gate.back_off(10)
    setting.gate.back_off(1)
    setting.add(1)
    setting.loop.advance(9)
    assert setting.submitted == []
    setting.loop.advance(1)
    assert setting.submitted == ["0:0"]


def test_a_client_has_only_so_many_unfinished_samples() -> None:
    setting = Setting(max_unfinished=2)
    setting.add(4)
    for sample in setting.samples[:2]:
        setting.gate.submitted(sample.charge)
    assert setting.submitted == ["0:0", "0:1"]
    setting.lanes[0].finished()
    setting.gate.ready(setting.lanes[0])
    assert setting.submitted == ["0:0", "0:1", "0:2"]


def test_a_full_client_does_not_hold_up_another() -> None:
    setting = Setting(lanes=2, max_unfinished=1)
    setting.add(3, lane=0)
    setting.add(1, lane=1)
    assert setting.submitted == ["0:0", "1:0"]


def test_a_sample_that_was_sent_back_goes_first() -> None:
    setting = Setting(max_unfinished=1)
    setting.add(2)
    setting.gate.submitted(1)
    returned = Sample(setting.submitted, "returned")
    setting.lanes[0].add_first(returned)
    setting.gate.ready(setting.lanes[0])
    assert setting.submitted == ["0:0", "returned"]


def test_abandoned_samples_are_passed_over() -> None:
    setting = Setting()
    setting.gate.back_off(1)
    setting.add(3)
    setting.samples[0].abandoned = setting.samples[1].abandoned = True
    setting.loop.advance(1)
    assert setting.submitted == ["0:2"]


def test_abandoned_samples_do_not_pile_up_behind_a_closed_gate() -> None:
    setting = Setting()
    setting.gate.back_off(3600)
    setting.add(100)
    for sample in setting.samples[10:]:
        sample.abandoned = True
        setting.lanes[0].abandoned()
    assert len(setting.lanes[0]._waiting) < 25
    setting.loop.advance(3600)
    setting.loop.advance(THROTTLE_SECONDS)
    assert setting.submitted == [f"0:{number}" for number in range(10)]


def test_emptying_a_lane_gives_those_that_somebody_still_waits_for() -> None:
    setting = Setting()
    setting.gate.back_off(1)
    setting.add(3)
    setting.samples[1].abandoned = True
    assert setting.lanes[0].empty() == [setting.samples[0], setting.samples[2]]
    setting.loop.advance(1)
    assert setting.submitted == []


# Pending samples


def test_slots_are_handed_out_up_to_the_limit() -> None:
    slots = PendingSlots()
    assert [slots.try_take(2) for _ in range(3)] == [True, True, False]
    slots.give_back()
    assert slots.try_take(2)


def test_a_thread_waits_for_a_slot() -> None:
    slots, got = PendingSlots(), threading.Event()
    assert slots.try_take(1)

    def take() -> None:
        slots.take(1, owner=None)
        got.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not got.wait(0.05)
    slots.give_back()
    assert got.wait(5)
    thread.join(5)


def test_a_coroutine_waits_for_a_slot_without_blocking_its_loop() -> None:
    async def scenario() -> None:
        slots = PendingSlots()
        assert slots.try_take(1)
        waiting = [asyncio.create_task(slots.take_async(1, owner=None)) for _ in range(100)]
        await asyncio.sleep(0)  # the loop still runs
        for task in waiting:
            slots.give_back()
            await asyncio.wait_for(task, 5)

    asyncio.run(scenario())


def test_a_slot_promised_to_someone_who_gave_up_goes_to_the_next() -> None:
    async def scenario() -> None:
        slots = PendingSlots()
        assert slots.try_take(1)
        impatient = asyncio.create_task(slots.take_async(1, owner=None))
        patient = asyncio.create_task(slots.take_async(1, owner=None))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        slots.give_back()
        await asyncio.wait_for(patient, 5)

    asyncio.run(scenario())


def test_a_slot_granted_in_the_moment_of_giving_up_is_not_lost() -> None:
    async def scenario() -> bool:
        slots = PendingSlots()
        assert slots.try_take(1)
        impatient = asyncio.create_task(slots.take_async(1, owner=None))
        await asyncio.sleep(0)
        slots.give_back()
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        return slots.try_take(1)

    assert asyncio.run(scenario())


def test_those_who_wait_for_a_closed_client_are_turned_away_and_the_others_stay() -> None:
    async def scenario() -> None:
        slots, closed, other = PendingSlots(), object(), object()
        assert slots.try_take(1)
        unlucky = asyncio.create_task(slots.take_async(1, owner=closed))
        lucky = asyncio.create_task(slots.take_async(1, owner=other))
        await asyncio.sleep(0)
        slots.turn_away(closed, ClientClosedError("closed"))
        with pytest.raises(ClientClosedError):
            await asyncio.wait_for(unlucky, 5)
        slots.give_back()
        await asyncio.wait_for(lucky, 5)
        assert not slots.try_take(1)

    asyncio.run(scenario())


def test_a_client_with_a_higher_limit_is_not_held_up_by_one_with_a_lower_limit() -> None:
    slots = PendingSlots()
    assert slots.try_take(1)
    thread = threading.Thread(target=slots.take, args=(1, None))
    thread.start()
    assert slots.try_take(5)
    slots.give_back()
    slots.give_back()
    thread.join(5)
    assert not thread.is_alive()
