"""When there is room again: by the speed at which work was done, and never a guess beyond what clients wait for."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.errors import RateLimitError
from tinsmith.server.quotas import ALL_KEYS, Backlog, Paperwork, Tally
from tinsmith.server.store.records import NewJob, Queued


def job(owner: str = "ann", payload: bytes = b"12345678") -> NewJob:
    return NewJob(kind="sample", owner=owner, payload=payload, session_id="s", base_model="m", sampler_id="x")


class Worker:
    """Does some of the work of `ann` each second."""

    def __init__(self, waiting: int, per_second: int) -> None:
        self.waiting = waiting
        self.time = 0.0
        self._per_second = per_second
        self.counts = 0

    def pass_seconds(self, seconds: int) -> None:
        self.time += seconds
        self.waiting -= seconds * self._per_second

    async def count(self) -> list[Queued]:
        self.counts += 1
        return [Queued(owner="ann", requests=self.waiting, size_bytes=8 * self.waiting)]

    def backlog(self, most: int) -> Backlog:
        async def nobody_waits(stream: str, seq_id: int) -> bool:
            return False

        return Backlog(most, 10**9, self.count, nobody_waits, lambda: self.time)


def refused(backlog: Backlog) -> float | None:
    with pytest.raises(RateLimitError) as error:
        asyncio.run(backlog.admit(job()))
    return error.value.retry_after


def test_the_time_to_wait_follows_from_the_speed_of_the_work() -> None:
    worker = Worker(waiting=140, per_second=5)
    backlog = worker.backlog(most=100)
    assert refused(backlog) == 60, "nothing is known of the speed yet"
    worker.pass_seconds(2)
    assert refused(backlog) == 7, "31 too many, 5 are done each second"
    worker.pass_seconds(7)
    asyncio.run(backlog.admit(job()))


def test_nothing_is_counted_while_there_is_room() -> None:
    worker = Worker(waiting=0, per_second=0)
    backlog = worker.backlog(most=50)

    async def admit() -> None:
        for _ in range(50):
            await backlog.admit(job())

    asyncio.run(admit())
    assert worker.counts == 1, "once, at the start"


def test_a_tally_bounds_each_and_all() -> None:
    tally = Tally(10)
    tally.add("ann", 10)
    assert (tally.excess("ann", 1), tally.excess("ben", 1)) == (1, 0)
    for owner in ("ben", "cat", "dan"):
        tally.add(owner, 10)
    assert ALL_KEYS == 4
    assert tally.excess("eve", 3) == 3
    tally.add("ann", -10)
    assert tally.excess("eve", 3) == 0


def test_what_is_written_down_without_work_is_bounded_and_grows_back_with_time() -> None:
    now = [0.0]
    paperwork = Paperwork(10 * 1024, 512, lambda: now[0])

    def charge_all(owner: str, wait: int = 2) -> int:
        count = 0

        def charge_on() -> None:
            nonlocal count
            while True:
                paperwork.charge(owner, 0)
                count += 1

        with pytest.raises(RateLimitError) as error:
            charge_on()
        assert error.value.retry_after == wait, "a row takes a KiB, half of which comes each second"
        return count

    assert charge_all("ann") == 10
    assert charge_all("ben") == 10, "none of ann's business"
    now[0] = 1.5
    assert charge_all("ann", wait=1) == 0
    now[0] = 2.0
    assert charge_all("ann") == 1
    now[0] = 10_000.0
    assert charge_all("ann") == 10, "an allowance is not saved up beyond the limit"
    for owner in ("ben", "cat", "dan"):
        assert charge_all(owner) == 10
    assert ALL_KEYS == 4
    assert charge_all("eve") == 0, "all keys together have a limit too"


def test_a_row_costs_what_is_in_it() -> None:
    paperwork = Paperwork(10 * 1024, 512, lambda: 0.0)
    paperwork.charge("ann", 9 * 1024)
    with pytest.raises(RateLimitError, match=r"10\.0 KiB|0\.0 MiB") as error:
        paperwork.charge("ann", 3 * 1024)
    assert error.value.retry_after == 8
