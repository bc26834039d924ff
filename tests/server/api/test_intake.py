"""Submissions that arrive together are written together, and one that cannot be written harms no other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tinsmith.errors import InvalidInputError
from tinsmith.server.routes._intake import Intake
from tinsmith.server.store.records import Enqueued, NewJob, Submission


def submission(name: str) -> Submission:
    job = NewJob(kind="sample", owner="o", payload=b"", session_id="s", base_model="m", sampler_id=name, seq_id=0)
    return Submission(job=job)


class Disk:
    """Writes slowly, remembers its batches, and cannot write the name `bad`."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    async def write(self, submissions: Sequence[Submission]) -> list[Enqueued]:
        names = [str(one.job.sampler_id) for one in submissions]
        self.batches.append(names)
        await asyncio.sleep(0)
        if "bad" in names:
            raise InvalidInputError("cannot be stored")
        if "broken" in names:
            raise OSError("disk full")
        return [Enqueued(request_id=name, is_new=True) for name in names]


def added(*names: str) -> tuple[Disk, list[Enqueued | BaseException]]:
    disk = Disk()

    async def main() -> list[Enqueued | BaseException]:
        intake = Intake(disk.write)
        return await asyncio.gather(*(intake.add(submission(name)) for name in names), return_exceptions=True)

    return disk, asyncio.run(main())


def test_what_arrives_together_is_written_together() -> None:
    disk, answers = added("a", "b", "c")
    assert disk.batches == [["a", "b", "c"]]
    assert [one.request_id for one in answers if isinstance(one, Enqueued)] == ["a", "b", "c"]


def test_one_that_cannot_be_written_harms_no_other() -> None:
    _, (first, bad, last) = added("a", "bad", "c")
    assert isinstance(first, Enqueued)
    assert isinstance(bad, InvalidInputError)
    assert isinstance(last, Enqueued)


def test_one_that_cannot_be_written_is_found_in_a_few_writes() -> None:
    """Who sends such things all the time costs the others some writes, and not one for each of them."""
    names = [*map(str, range(200)), "bad", *map(str, range(200, 255))]
    disk, answers = added(*names)
    assert [name for name, one in zip(names, answers, strict=True) if isinstance(one, Enqueued)] == [
        name for name in names if name != "bad"
    ]
    assert [name for batch in disk.batches if "bad" not in batch for name in batch] == [*map(str, range(255))]
    assert len(disk.batches) <= 1 + 2 * 8


def test_a_failing_disk_fails_everybody_and_is_tried_again_by_the_next() -> None:
    disk = Disk()

    async def main() -> None:
        intake = Intake(disk.write)
        with pytest.raises(OSError, match="disk full"):
            await intake.add(submission("broken"))
        assert (await intake.add(submission("a"))).is_new

    asyncio.run(main())


def test_it_rests_when_all_is_written_and_is_not_waited_for_longer_than_asked() -> None:
    async def main() -> None:
        is_written = asyncio.Event()

        async def write(submissions: Sequence[Submission]) -> list[Enqueued]:
            await is_written.wait()
            return [Enqueued(request_id="r", is_new=True) for _ in submissions]

        intake = Intake(write)
        await asyncio.wait_for(intake.rest(60), 10)  # at once
        adding = asyncio.create_task(intake.add(submission("a")))
        await intake.rest(0.001)
        assert not adding.done()
        resting = asyncio.create_task(intake.rest(60))
        is_written.set()
        await asyncio.wait_for(resting, 10)
        assert adding.done()

    asyncio.run(main())
