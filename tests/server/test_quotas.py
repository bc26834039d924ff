"""When there is room again: by the speed at which work was done, and never a guess beyond what clients wait for."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.errors import RateLimitError
from tinsmith.server.quotas import ALL_OWNERS, Backlog, Paperwork, Tally
from tinsmith.server.store.records import NewJob, Queued
from tinsmith.server.worker_metrics import Worked


def job(owner: str = "ann", payload: bytes = b"12345678") -> NewJob:
    return NewJob(kind="sample", owner=owner, payload=payload, session_id="s", base_model="m", sampler_id="x")


class Worker:
    """Does some of the work of `ann` each second."""

    def __init__(self, waiting: int, per_second: int) -> None:
        self.waiting = waiting
        self.time = 0.0
        self._per_second = per_second
        self.counts = 0
        self.worked = Worked(0.0, 0)
        self.in_the_middle: asyncio.Event | None = None

    def pass_seconds(self, seconds: int) -> None:
        self.time += seconds
        done = seconds * self._per_second
        self.waiting -= done
        self.worked = Worked(self.worked.seconds + seconds, self.worked.jobs + done)

    async def count(self) -> list[Queued]:
        self.counts += 1
        seen = self.waiting
        if self.in_the_middle is not None:
            await self.in_the_middle.wait()
        return [Queued(owner="ann", requests=seen, size_bytes=8 * seen)]

    def backlog(self, most: int) -> Backlog:
        async def nobody_waits(stream: str, seq_id: int) -> bool:
            return False

        return Backlog(most, 10**9, self.count, nobody_waits, lambda: self.worked, lambda: self.time)


async def write(backlog: Backlog, payload: bytes = b"12345678") -> None:
    async with backlog.admitted(job(payload=payload)):
        pass


def refused(backlog: Backlog) -> float | None:
    with pytest.raises(RateLimitError) as error:
        asyncio.run(write(backlog))
    return error.value.retry_after


def test_the_time_to_wait_follows_from_the_speed_of_the_work() -> None:
    worker = Worker(waiting=140, per_second=5)
    backlog = worker.backlog(most=100)
    assert refused(backlog) == 2, "nothing is known of the speed yet"
    worker.pass_seconds(2)
    assert refused(backlog) == 7, "31 too many, 5 are done each second"
    worker.pass_seconds(7)
    asyncio.run(write(backlog))


def test_time_without_work_does_not_count() -> None:
    worker = Worker(waiting=3, per_second=1)
    backlog = worker.backlog(most=3)
    worker.pass_seconds(3)
    for _ in range(3):
        asyncio.run(write(backlog))
    worker.time += 3600
    worker.waiting = 3
    assert refused(backlog) == 1


def test_an_operation_under_way_takes_at_least_as_long_as_it_has_taken() -> None:
    worker = Worker(waiting=3, per_second=0)
    backlog = worker.backlog(most=3)
    worker.pass_seconds(12)
    assert refused(backlog) == 12
    worker.pass_seconds(3000)
    assert refused(backlog) == 60, "clients do not wait for longer before they ask again"


def test_bytes_that_are_too_many_go_with_their_operations() -> None:
    worker = Worker(waiting=10, per_second=2)

    async def nobody_waits(stream: str, seq_id: int) -> bool:
        return False

    worker.pass_seconds(0)
    backlog = Backlog(1000, 100, worker.count, nobody_waits, lambda: Worked(5.0, 1), lambda: worker.time)
    with pytest.raises(RateLimitError) as error:
        asyncio.run(write(backlog, payload=b"x" * 36))
    assert error.value.retry_after == 10, "16 bytes too many are two operations, of 5 s each"


def test_nothing_is_counted_while_there_is_room() -> None:
    worker = Worker(waiting=0, per_second=0)
    backlog = worker.backlog(most=50)

    async def admit() -> None:
        for _ in range(50):
            await write(backlog)

    asyncio.run(admit())
    assert worker.counts == 1, "once, at the start"


def test_what_is_let_in_and_not_yet_seen_by_a_count_still_takes_up_room() -> None:
    """Two wait to be written: the first is while a count is made that does not see it, the second is later."""

    async def main() -> None:
        worker = Worker(waiting=0, per_second=0)
        backlog = worker.backlog(most=2)
        async with backlog.admitted(job()):
            async with backlog.admitted(job()):
                worker.time += 1
                worker.in_the_middle = asyncio.Event()
                refusal = asyncio.create_task(write(backlog))
                await asyncio.sleep(0)
                assert worker.counts == 2, "one is under way"
            worker.in_the_middle.set()
            with pytest.raises(RateLimitError, match="2 requests"):
                await refusal
            worker.waiting, worker.time = 1, worker.time + 1
            with pytest.raises(RateLimitError, match="2 requests"):
                await write(backlog)
        worker.waiting, worker.time = 2, worker.time + 1
        with pytest.raises(RateLimitError, match="2 requests"):
            await write(backlog)
        worker.waiting, worker.time = 1, worker.time + 1
        await write(backlog)

    asyncio.run(main())


def test_a_number_that_is_awaited_passes_the_limit_once_and_not_with_all_who_come_together() -> None:
    async def everybody_waits(stream: str, seq_id: int) -> bool:
        await asyncio.sleep(0)
        return True

    async def main() -> int:
        backlog = Backlog(5, 10**9, Worker(0, 0).count, everybody_waits, lambda: Worked(0.0, 0), lambda: 0.0)
        step = NewJob(
            kind="optim_step", owner="ann", payload=b"", session_id="s", base_model="m", model_id="x", seq_id=1
        )

        async def submit() -> None:
            async with backlog.admitted(step):
                pass

        tries = await asyncio.gather(*(submit() for _ in range(50)), return_exceptions=True)
        return tries.count(None)

    assert asyncio.run(main()) == 10, "twice the limit"


def test_a_tally_bounds_each_and_all() -> None:
    tally = Tally(10)
    tally.add("ann", 10)
    assert (tally.excess("ann", 1), tally.excess("ben", 1)) == (1, 0)
    for owner in ("ben", "cat", "dan"):
        tally.add(owner, 10)
    assert ALL_OWNERS == 4
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
    assert ALL_OWNERS == 4
    assert charge_all("eve") == 0, "all keys together have a limit too"


def test_a_row_costs_what_is_in_it() -> None:
    paperwork = Paperwork(10 * 1024, 512, lambda: 0.0)
    paperwork.charge("ann", 9 * 1024)
    with pytest.raises(RateLimitError, match=r"10\.0 KiB|0\.0 MiB") as error:
        paperwork.charge("ann", 3 * 1024)
    assert error.value.retry_after == 8
