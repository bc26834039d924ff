"""Work that many ask for at the same time is done once."""

import asyncio

import pytest

from tinsmith.client.once import Once
from tinsmith.errors import APIConnectionError, ClientClosedError


class Work:
    """Succeeds, fails, or takes as long as the test wants; counts how often it was begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> str:
        self.begun += 1
        self.started.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return "done"


def test_all_who_ask_at_the_same_time_share_the_result() -> None:
    async def scenario() -> None:
        once, work = Once[str](), Work()
        askers = [asyncio.create_task(once.do(work)) for _ in range(5)]
        await asyncio.sleep(0)
        work.go.set()
        assert await asyncio.gather(*askers) == ["done"] * 5
        assert work.begun == 1
        assert await once.do(work) == "done"
        assert work.begun == 2

    asyncio.run(scenario())


def test_all_who_ask_at_the_same_time_share_the_failure() -> None:
    async def scenario() -> None:
        once, work = Once[str](), Work()
        work.error = APIConnectionError(message="dead")
        askers = [asyncio.create_task(once.do(work)) for _ in range(5)]
        await asyncio.sleep(0)
        work.go.set()
        outcomes = await asyncio.gather(*askers, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["dead"] * 5
        assert work.begun == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("closed", [False, True])
def test_when_the_one_who_does_it_leaves_the_next_takes_over(closed: bool) -> None:
    async def scenario() -> None:
        once, first, second = Once[str](), Work(), Work()
        leader = asyncio.create_task(once.do(first))
        await asyncio.sleep(0)
        others = [asyncio.create_task(once.do(second)) for _ in range(3)]
        await asyncio.sleep(0)
        if closed:
            first.error = ClientClosedError("closed")
            first.go.set()
        else:
            leader.cancel()
        await second.started.wait()
        second.go.set()
        assert await asyncio.wait_for(asyncio.gather(*others), 5) == ["done"] * 3
        assert second.begun == 1
        with pytest.raises((ClientClosedError, asyncio.CancelledError)):
            await leader

    asyncio.run(scenario())


def test_a_waiting_caller_can_be_cancelled_alone() -> None:
    async def scenario() -> None:
        once, work = Once[str](), Work()
        leader, follower = asyncio.create_task(once.do(work)), asyncio.create_task(once.do(work))
        await asyncio.sleep(0)
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        work.go.set()
        assert await leader == "done"

    asyncio.run(scenario())
