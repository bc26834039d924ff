"""Several workers of one base model, with stand-ins for their processes: who gets what, and what a death does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tinsmith.errors import ConfigError
from tinsmith.server import keeper
from tinsmith.server.crew import Crew
from tinsmith.server.lives import CannotBeginError, Life, Lives
from tinsmith.server.messages import Figure, Message, WorkerSettings
from tinsmith.server.store import Store
from tinsmith.server.store.records import Done, NewJob
from tinsmith.types import ModelInput, SampleRequest, SamplingParams

BASE = "tiny"
PLACES = ["train", "sample-0", "sample-1"]


class ToldLife(Life):
    """A worker that says what a test makes it say."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.woken = 0
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def say(self, **fields: Any) -> None:
        self._said.put_nowait(msgspec.json.encode(Message(**fields)))

    def end(self, status: int) -> None:
        self._said.put_nowait(None)
        if not self._end.done():
            self._end.set_result(status)

    def wake(self) -> None:
        self.woken += 1

    async def heard(self) -> AsyncIterator[bytes]:
        while (line := await self._said.get()) is not None:
            yield line

    async def ended(self) -> int:
        return await asyncio.shield(self._end)

    def dismiss(self) -> None:
        self.end(0)

    def kill(self) -> None:
        self.end(-9)


class ToldLives(Lives):
    def __init__(self) -> None:
        self.living: dict[str, ToldLife] = {}
        self.num_begun = 0
        self.is_away = False

    async def prepare(self) -> None:
        pass

    async def begin(self, settings: WorkerSettings) -> Life:
        if self.is_away:
            raise CannotBeginError("there is no cluster")
        self.num_begun += 1
        life = self.living[settings.place] = ToldLife(settings)
        return life

    async def close(self) -> None:
        pass


class World:
    def __init__(self, state: Path) -> None:
        self.store = Store(f"sqlite:///{state / 'tinsmith.db'}")
        self.lives = ToldLives()
        self.done: list[str] = []
        settings = WorkerSettings(base_model=BASE, folder="", database="", state=str(state), train_workers=3)
        self.crew = Crew(settings, 2, self.store, self.lives, self.done.extend, lambda drawn: None)

    def submit(self, seq_id: int, prompt: list[int]) -> tuple[str, str]:
        """The request, and the replica that it is for."""
        job = NewJob(
            kind="sample",
            owner="ann",
            payload=b"{}",
            session_id="s",
            base_model=BASE,
            sampler_id="s:sample:0",
            seq_id=seq_id,
        )
        request = SampleRequest(prompt=ModelInput.from_ints(prompt), sampling_params=SamplingParams())
        replica = self.crew.choose_replica(job, request)
        return self.store.jobs.enqueue(msgspec.structs.replace(job, replica=replica)).request_id, replica

    def claim(self, place: str) -> list[str]:
        return [job.request_id for job in self.store.jobs.claim(BASE, f"{place}/w", sample=99, replica=place)]

    async def ready(self, *places: str) -> None:
        for place in places:
            self.lives.living[place].say(ready=True)
        await until(lambda: {state.name for state in self.crew.states() if state.is_ready} >= {*places})

    async def replaced(self, place: str, before: ToldLife) -> None:
        await until(lambda: self.lives.living.get(place) is not before)


@asynccontextmanager
async def world(state: Path) -> AsyncIterator[World]:
    made = World(state)
    await made.crew.start()
    await until(lambda: made.lives.num_begun == 3)
    try:
        yield made
    finally:
        await made.crew.stop()
        made.store.close()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.005)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(keeper, "MAX_PAUSE_SECONDS", 0.02)


def test_each_has_its_role_and_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            settings = [here.lives.living[place].settings for place in PLACES]
            assert [(each.role, each.place, each.train_workers) for each in settings] == [
                ("train", "train", 3),
                ("sample", "sample-0", 1),
                ("sample", "sample-1", 1),
            ]

    run(scenario)


def test_samples_are_spread_and_like_ones_are_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            await here.ready(*PLACES)
            long = list(range(200))
            first, again = here.submit(0, long), here.submit(1, [*long, 7])
            assert first[1] == again[1]
            for number in range(2, 50):
                here.submit(number, [number])
            samples = {state.name: state.samples for state in here.crew.states()}
            assert samples["train"] is None
            assert sum(filter(None, samples.values())) == 50
            assert min(samples["sample-0"] or 0, samples["sample-1"] or 0) > 0
            here.lives.living[first[1]].say(done=(first[0],))
            await until(lambda: here.done == [first[0]])
            assert sum(state.samples or 0 for state in here.crew.states()) == 49

    run(scenario)


def test_what_a_dead_replica_had_is_for_another_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            await here.ready(*PLACES)
            (claimed, mine), (waiting, same) = here.submit(0, [1]), here.submit(1, [1])
            assert mine == same
            other = "sample-1" if mine == "sample-0" else "sample-0"
            assert here.claim(mine) == [claimed, waiting]
            before, woken = here.lives.living[mine], here.lives.living[other].woken
            before.end(-9)
            await here.replaced(mine, before)
            assert here.lives.living[mine].settings.last_status == -9
            assert here.claim(other) == [claimed, waiting]
            assert here.lives.living[other].woken > woken
            assert here.store.jobs.complete(f"{mine}/w", {claimed: Done(result=b"", content_type="x")}) == []

    run(scenario)


def test_what_came_while_no_replica_was_there_is_for_the_first_that_comes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            request, replica = here.submit(0, [1])
            assert replica == ""
            await here.ready("sample-1")
            await until(lambda: here.claim("sample-1") == [request])

    run(scenario)


def test_training_and_sampling_are_ready_and_held_up_each_for_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            await here.ready("train")
            assert here.crew.is_ready("train")
            assert not here.crew.is_ready("sample")
            await here.ready("sample-0")
            assert here.crew.is_ready("sample")
            here.lives.living["sample-0"].say(held_up="no disk")
            here.lives.living["sample-1"].say(no_room={"s:sample:3": "no weights"})
            await until(lambda: here.crew.held_up("s:sample:3", "sample") == "no weights")
            assert here.crew.held_up("", None) == "no disk"
            assert here.crew.held_up("s:sample:4", "sample") is None, "the other one works"
            assert here.crew.held_up("s:train:0", "train") is None
            here.lives.living["sample-1"].say(held_up="no disk either")
            await until(lambda: here.crew.held_up("s:sample:4", "sample") is not None)

    run(scenario)


def test_a_cluster_that_is_away_is_said_and_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            await here.ready(*PLACES)
            here.lives.is_away = True
            for place in PLACES:
                here.lives.living[place].end(76)
            await until(lambda: "there is no cluster" in (here.crew.held_up("s:train:0", "train") or ""))
            await until(lambda: "there is no cluster" in (here.crew.held_up("s:sample:0", "sample") or ""))
            assert here.crew.problem is None
            here.lives.is_away = False
            await until(lambda: here.lives.num_begun == 6)
            await here.ready(*PLACES)
            assert here.crew.held_up("s:train:0", "train") is None

    run(scenario)


def test_a_worker_that_cannot_load_its_model_is_refused_at_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            await here.ready("train", "sample-0")
            broken = here.lives.living["sample-1"]
            broken.say(where="node-7 (10.0.0.7)", process=3)
            broken.say(failed="/models/m has no config.json", is_final=True)
            broken.end(1)
            with pytest.raises(ConfigError, match=r"cannot be loaded on node-7 \(10.0.0.7\): /models/m has no config"):
                await here.crew.settled()
            assert here.crew.problem is None, "others can work"

    run(scenario)


def test_figures_are_those_of_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            for place, value in zip(PLACES, (1.0, 2.0, 4.0), strict=True):
                figures = [("tinsmith_sampled_tokens_total", value), ("tinsmith_training_batch_tokens", 100 * value)]
                here.lives.living[place].say(figures=tuple(Figure(name, {}, number) for name, number in figures))
            await until(
                lambda: (
                    {figure.name: figure.value for figure in here.crew.figures()}.get("tinsmith_sampled_tokens_total")
                    == 7
                )
            )
            assert {figure.name: figure.value for figure in here.crew.figures()}[
                "tinsmith_training_batch_tokens"
            ] == 100

    run(scenario)
