"""One query answers everybody who waits, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest

from tinsmith.errors import InvalidInputError
from tinsmith.server import waiting as waiting_module
from tinsmith.server.store.records import Done, Status
from tinsmith.server.waiting import Breathe, Waiting


def status(request_id: str, *, is_done: bool) -> Status:
    return Status(
        request_id=request_id,
        kind="sample",
        owner="o",
        base_model="m",
        state="done" if is_done else "queued",
        outcome=Done(result=b"", content_type="x") if is_done else None,
        is_held_up=False,
    )


class Jobs:
    """A store of jobs that are done or not, and the queries made to it."""

    def __init__(self, *names: str) -> None:
        self.done = dict.fromkeys(names, False)
        self.newest: dict[str, int] = {}
        self.queries: list[list[str]] = []
        self.is_broken = False

    async def statuses(self, names: Sequence[str]) -> Mapping[str, Status]:
        self.queries.append(sorted(names))
        if self.is_broken:
            raise OSError("no database")
        if any("\0" in name for name in names):
            raise InvalidInputError("The database cannot store a value")
        return {name: status(name, is_done=self.done[name]) for name in names if name in self.done}

    async def cursors(self, names: Sequence[str]) -> Mapping[str, int]:
        return {name: self.newest[name] for name in names if name in self.newest}


async def nobody_goes_first(seconds: float) -> None:
    await asyncio.sleep(0)


def run(jobs: Jobs, script: Callable[[Waiting], Awaitable[None]], breathe: Breathe = nobody_goes_first) -> None:
    async def main() -> None:
        waiting = Waiting(jobs.statuses, jobs.cursors, breathe)
        answering = asyncio.create_task(waiting.run())
        try:
            await asyncio.wait_for(script(waiting), 10)
        finally:
            answering.cancel()
        assert len(waiting) == 0

    asyncio.run(main())


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_results_that_come_together_are_given_out_a_few_at_a_time_while_others_go_first() -> None:
    names = [f"s:{number:03}" for number in range(10)]
    jobs, turns = Jobs(*names), asyncio.Semaphore(0)

    async def wait_for_a_turn(seconds: float) -> None:
        await turns.acquire()

    async def script(waiting: Waiting) -> None:
        polls = [asyncio.create_task(waiting.until_done(name, "o", 60)) for name in names]
        await settled()  # nothing is done yet, and all are looked at in vain
        jobs.done = dict.fromkeys(names, True)
        waiting.notice(names)
        for answered in (4, 8, 10):
            turns.release()
            await settled()
            assert sum(poll.done() for poll in polls) == answered

    run(jobs, script, wait_for_a_turn)


def test_those_who_wait_on_do_not_hold_up_who_has_a_result() -> None:
    """Every second all are looked at. If others went first for those who get nothing, too, the result of one would wait
    for seconds behind thousands of others while submissions are being written.
    """
    names = [f"s:{number:04}" for number in range(1000)]
    jobs, breaths = Jobs(*names), 0

    async def breathe(seconds: float) -> None:
        nonlocal breaths
        breaths += 1
        await asyncio.sleep(0)

    async def script(waiting: Waiting) -> None:
        polls = [asyncio.create_task(waiting.until_done(name, "o", 60)) for name in names]
        await settled()
        assert breaths == 0
        jobs.done[names[-1]] = True
        waiting.notice(names)
        assert await polls[-1] is not None
        assert breaths == 1
        for poll in polls:
            poll.cancel()

    run(jobs, script, breathe)


def test_a_hundred_who_wait_cost_one_query_when_they_come_and_one_when_it_is_done() -> None:
    names = [f"s:{number:03}" for number in range(100)]
    jobs = Jobs(*names)

    async def script(waiting: Waiting) -> None:
        polls = [asyncio.create_task(waiting.until_done(name, "o", 60)) for name in names]
        await settled()
        jobs.done = dict.fromkeys(names, True)
        waiting.notice(names)
        assert [found.request_id for found in await asyncio.gather(*polls) if found] == names
        assert jobs.queries == [names, names]

    run(jobs, script)


def test_only_those_who_are_concerned_are_looked_up() -> None:
    jobs = Jobs("s:1", "s:2")

    async def script(waiting: Waiting) -> None:
        polls = [asyncio.create_task(waiting.until_done(name, "o", 60)) for name in ("s:1", "s:2")]
        await settled()
        jobs.done["s:1"] = True
        waiting.notice(["s:1", "other:7"])
        await polls[0]
        assert jobs.queries[-1] == ["s:1"]
        waiting.drain()
        assert await polls[1] is None

    run(jobs, script)


def test_a_job_that_has_only_just_come_is_not_looked_up_before_its_worker_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting_module, "_LOOK_AGAIN_SECONDS", 3600.0)
    jobs = Jobs("s:1")

    async def script(waiting: Waiting) -> None:
        await waiting.status("s:1")
        jobs.queries.clear()
        waiting.expect("s:1", "o")
        poll = asyncio.create_task(waiting.until_done("s:1", "o", 60))
        await settled()
        assert jobs.queries == []
        assert (await waiting.until_done("s:1", "somebody else", 60)) is not None, "to others it is answered at once"
        jobs.done["s:1"] = True
        waiting.notice(["s:1"])
        assert await poll is not None

    run(jobs, script)


def test_it_is_looked_up_all_the_same_if_its_worker_is_never_heard() -> None:
    jobs = Jobs("s:1")

    async def script(waiting: Waiting) -> None:
        waiting.expect("s:1", "o")
        poll = asyncio.create_task(waiting.until_done("s:1", "o", 60))
        await settled()
        jobs.done["s:1"] = True
        assert await poll is not None

    run(jobs, script)


def test_a_job_that_was_there_before_is_looked_up_at_once() -> None:
    jobs = Jobs("s:1")
    jobs.done["s:1"] = True

    async def script(waiting: Waiting) -> None:
        waiting.expect("s:1", "o")
        waiting.expect_no_longer("s:1")
        assert await waiting.until_done("s:1", "o", 60) is not None
        assert jobs.queries == [["s:1"]]

    run(jobs, script)


def test_a_lost_message_is_made_up_for_also_when_others_ask_all_the_time() -> None:
    jobs = Jobs("s:1", "s:2")

    async def script(waiting: Waiting) -> None:
        poll = asyncio.create_task(waiting.until_done("s:1", "o", 60))
        await settled()
        jobs.done["s:1"] = True  # and nobody says so
        while not poll.done():
            await waiting.status("s:2")
        assert poll.result() is not None

    run(jobs, script)


def test_one_who_gives_up_does_not_strand_the_others() -> None:
    jobs = Jobs("s:1")

    async def script(waiting: Waiting) -> None:
        impatient, patient = (asyncio.create_task(waiting.until_done("s:1", "o", 60)) for _ in range(2))
        await settled()
        impatient.cancel()
        jobs.done["s:1"] = True
        waiting.notice(["s:1"])
        assert await patient is not None

    run(jobs, script)


def test_a_broken_database_delays_and_does_not_end_the_waiting() -> None:
    jobs = Jobs("s:1")
    jobs.is_broken = True

    async def script(waiting: Waiting) -> None:
        poll = asyncio.create_task(waiting.until_done("s:1", "o", 60))
        await settled()
        jobs.is_broken = False
        jobs.done["s:1"] = True
        assert await poll is not None

    run(jobs, script)


def test_a_name_that_no_database_can_hold_is_unknown_and_spoils_nobody_elses_answer() -> None:
    names = [f"s:{number}" for number in range(5)]
    jobs = Jobs(*names)
    jobs.done = dict.fromkeys(names, True)

    async def script(waiting: Waiting) -> None:
        asked = [waiting.until_done(name, "o", 60) for name in ("\0", *names, "s:\0")]
        found = await asyncio.gather(*asked)
        assert [one and one.request_id for one in found] == [None, *names, None]

    run(jobs, script)


def test_what_is_not_there_or_anothers_is_not_waited_for() -> None:
    jobs = Jobs("s:1")

    async def script(waiting: Waiting) -> None:
        assert await waiting.until_done("s:2", "o", 60) is None
        anothers = await waiting.until_done("s:1", "somebody", 60)
        assert anothers is not None
        assert anothers.owner == "o"

    run(jobs, script)


def test_draining_ends_the_long_waits_and_answers_the_short_questions() -> None:
    jobs = Jobs("s:1")

    async def script(waiting: Waiting) -> None:
        poll = asyncio.create_task(waiting.until_done("s:1", "o", 60))
        await settled()
        look = asyncio.create_task(waiting.status("s:1"))
        waiting.drain()
        assert await poll is None
        assert await look is not None
        assert await waiting.until_done("s:1", "o", 60) is None

    run(jobs, script)


def test_what_does_not_come_in_time_is_none() -> None:
    jobs = Jobs("s:1")

    async def script(waiting: Waiting) -> None:
        assert await waiting.until_done("s:1", "o", 0.01) is None
        assert await waiting.until_news("s", 0, 0.01) is None

    run(jobs, script)


def test_news_of_a_sampling_session_wake_its_poller() -> None:
    jobs = Jobs()

    async def script(waiting: Waiting) -> None:
        poll = asyncio.create_task(waiting.until_news("s", 3, 60))
        await settled()
        jobs.newest["s"] = 3
        waiting.notice(["s:17"])
        await settled()
        assert not poll.done()
        jobs.newest["s"] = 4
        waiting.notice(["s:18"])
        assert await poll == 4

    run(jobs, script)
