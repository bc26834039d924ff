"""Several workers of one base model, with stand-ins for their processes: who gets what, and what a death does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from tinsmith.errors import ConfigError
from tinsmith.server import crew, keeper
from tinsmith.server.crew import Crew
from tinsmith.server.lives import CannotBeginError, Life, Lives
from tinsmith.server.messages import Figure, Message, Replay, WorkerSettings
from tinsmith.server.scaling import Bounds
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.records import Done, NewJob
from tinsmith.types import ModelInput, SampleRequest, SamplingParams

BASE = "tiny"
PLACES = ["train", "sample-0", "sample-1"]
TWO = Bounds(2, 2)


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

    @property
    def is_over(self) -> bool:
        return self._end.done()

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
        self.num_begun = self.num_refused = 0
        self.is_away = False

    async def prepare(self) -> None:
        pass

    async def begin(self, settings: WorkerSettings) -> Life:
        if self.is_away:
            self.num_refused += 1
            raise CannotBeginError("there is no cluster")
        self.num_begun += 1
        life = self.living[settings.place] = ToldLife(settings)
        return life

    async def close(self) -> None:
        pass


class World:
    def __init__(self, state: Path, bounds: Bounds = TWO, patience_seconds: float = 0.0) -> None:
        self.store = Store(f"sqlite:///{state / 'tinsmith.db'}")
        self.lives = ToldLives()
        self.done: list[str] = []
        settings = WorkerSettings(base_model=BASE, folder="", database="", state=str(state), train_workers=3)
        self.crew = Crew(
            settings, bounds, self.store, self.lives, self.done.extend, lambda drawn: None, patience_seconds
        )

    def submit(self, seq_id: int, prompt: list[int], samples: int = 1) -> tuple[str, str]:
        """The request, and the replica that it is for."""
        job = NewJob(
            kind="sample",
            owner="ann",
            payload=b"{}",
            session_id="s",
            base_model=BASE,
            sampler_id="s:sample:0",
            seq_id=seq_id,
            samples=samples,
        )
        request = SampleRequest(
            prompt=ModelInput.from_ints(prompt), sampling_params=SamplingParams(), num_samples=samples
        )
        replica = self.crew.choose_replica(job, request)
        return self.store.jobs.enqueue(msgspec.structs.replace(job, replica=replica)).request_id, replica

    def places(self) -> list[str]:
        return [state.name for state in self.crew.states()]

    def finish(self, place: str, request_ids: list[str]) -> None:
        outcomes = dict.fromkeys(request_ids, Done(result=b"", content_type="x"))
        self.lives.living[place].say(done=tuple(self.store.jobs.complete(f"{place}/w", outcomes)))

    def claim(self, place: str) -> list[str]:
        return [job.request_id for job in self.store.jobs.claim(BASE, f"{place}/w", sample=99, replica=place)]

    async def ready(self, *places: str) -> None:
        for place in places:
            self.lives.living[place].say(where="here")
            self.lives.living[place].say(ready=True)
        await until(lambda: {state.name for state in self.crew.states() if state.is_ready} >= {*places})

    async def replaced(self, place: str, before: ToldLife) -> None:
        await until(lambda: self.lives.living.get(place) is not before)


@asynccontextmanager
async def world(state: Path, bounds: Bounds = TWO, patience_seconds: float = 0.0) -> AsyncIterator[World]:
    made = World(state, bounds, patience_seconds)
    await made.crew.start()
    await until(lambda: made.lives.num_begun == 1 + bounds.least)
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
    monkeypatch.setattr(crew, "SCALE_SECONDS", 0.01)
    monkeypatch.setattr(crew, "RECOUNT_SECONDS", 0.1)


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
            here.lives.living["train"].say(replay=Replay(model_id="m", replayed=1, total=9))
            await until(lambda: here.crew.replay("train") is not None)
            assert here.crew.replay(None) is not None
            assert here.crew.replay("sample") is None, "they draw on meanwhile"
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


def test_a_cluster_that_goes_away_before_a_model_is_loaded_is_no_reason_to_give_up_the_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            request, _ = here.submit(0, [1])
            here.lives.is_away = True
            for place in PLACES:
                here.lives.living[place].end(76)
            await until(lambda: here.lives.num_refused > 2 * len(PLACES) * keeper.MAX_FAILED_STARTS)
            assert here.crew.problem is None
            assert _unfinished(here, [request]) == [request]
            here.lives.is_away = False
            await until(lambda: here.lives.num_begun == 6)
            await here.ready(*PLACES)

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


def test_a_start_that_is_refused_leaves_what_waits_as_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            waiting, _ = here.submit(0, [1])
            for place in PLACES:
                here.lives.living[place].say(failed="/models/m has no config.json", is_final=True)
                here.lives.living[place].end(1)
            with pytest.raises(ConfigError, match="has no config"):
                await here.crew.settled()
            assert here.done == []
            assert here.store.results.statuses([waiting])[waiting].outcome is None

    run(scenario)


def test_a_worker_that_comes_back_where_there_are_no_files_is_said_and_costs_only_time(tmp_path: Path) -> None:
    """Its machine is gone, and it was placed on one without the model, or with another version of us."""

    async def scenario() -> None:
        async with world(tmp_path) as here:
            await here.ready(*PLACES)
            here.crew.goes_on()
            waiting, _ = here.submit(0, [1])
            first = here.lives.living["train"]
            first.end(76)
            await here.replaced("train", first)
            second = here.lives.living["train"]
            second.say(failed="/models/m has no config.json", is_final=True)
            second.end(1)
            await here.replaced("train", second)
            why = here.crew.held_up("s:train:0", "train") or ""
            assert "/models/m has no config.json; it is tried again and again" in why
            assert here.crew.problem is None
            await here.ready("train")
            assert here.crew.held_up("s:train:0", "train") is None
            assert here.store.results.statuses([waiting])[waiting].outcome is None

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


# As many replicas as there is work for


async def grown(here: World, samples: int = 194) -> list[str]:
    """One replica, then so many samples, and three more replicas; the requests."""
    await here.ready("train", "sample-0")
    requests = [here.submit(number, [number])[0] for number in range(samples)]
    await until(lambda: here.lives.num_begun == 5)
    return requests


def test_more_samples_than_one_replica_should_have_start_others_up_to_the_most(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 4)) as here:
            assert here.places() == ["train", "sample-0"]
            await grown(here, 1000)
            assert here.places() == ["train", "sample-0", "sample-1", "sample-2", "sample-3"]
            assert here.crew.is_ready("sample"), "the first one works"
            assert here.lives.living["sample-3"].settings.role == "sample"

    run(scenario)


def test_a_replica_that_comes_gets_its_part_of_what_nobody_has_begun(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 4)) as here:
            requests = await grown(here)
            begun = [job.request_id for job in here.store.jobs.claim(BASE, "sample-0/w", sample=20, replica="sample-0")]
            await here.ready("sample-1")
            await until(lambda: {state.name: state.samples for state in here.crew.states()}["sample-1"] == 97)
            mine = here.claim("sample-1")
            assert len(mine) == 97
            assert {*mine, *begun, *here.claim("sample-0")} == {*requests}

    run(scenario)


def test_replicas_that_find_no_room_are_said_and_hold_nobody_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 4)) as here:
            await grown(here)
            here.lives.living["sample-2"].say(held_up="no room on the cluster")
            await until(lambda: "no room" in str({state.name: state.held_up for state in here.crew.states()}))
            assert here.crew.held_up("", None) is None
            assert here.crew.held_up("s:sample:0", "sample") is None
            assert here.crew.is_ready(None)

    run(scenario)


def test_a_replica_that_is_let_go_finishes_what_it_has_begun_and_others_draw_the_rest(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 4)) as here:
            requests = await grown(here)
            await here.ready("sample-1", "sample-2", "sample-3")
            await until(lambda: all((state.samples or 0) > 9 for state in here.crew.states() if state.name != "train"))
            last = here.lives.living["sample-3"]
            last.say(figures=(Figure("tinsmith_sampled_tokens_total", {}, 5.0),))
            mine = here.store.jobs.claim(BASE, "sample-3/w", sample=2, replica="sample-3")
            begun = [job.request_id for job in mine]
            for place in ("sample-0", "sample-1", "sample-2"):
                here.finish(place, here.claim(place))
            # Only those of the last are left: too few for four, and it is the first to go.
            await until(lambda: "ends after" in ({s.name: s.held_up for s in here.crew.states()}["sample-3"] or ""))
            await asyncio.sleep(0.1)
            assert here.lives.living["sample-3"] is last, "it draws"
            drawn = set[str]()
            while len(drawn) < len(requests) - len(begun):
                drawn |= {*requests} - {*begun} - {*_unfinished(here, requests)}
                for place in ("sample-0", "sample-1", "sample-2"):
                    here.finish(place, here.claim(place))
                await asyncio.sleep(0.01)
            assert [*_unfinished(here, requests)] == begun
            here.finish("sample-3", begun)
            await until(lambda: here.places() == ["train", "sample-0"])
            assert not _unfinished(here, requests)
            assert {figure.name: figure.value for figure in here.crew.figures()}["tinsmith_sampled_tokens_total"] == 5

    run(scenario)


def test_replicas_that_never_found_room_are_withdrawn_when_fewer_are_enough_and_those_that_work_stay(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 9), patience_seconds=1e6) as here:
            await here.ready("train", "sample-0")
            here.crew.note_elsewhere("another", 9 * 64)
            await until(lambda: here.lives.num_begun == 10)
            await here.ready("sample-1", "sample-5")
            here.crew.note_elsewhere("another", 0)
            await until(lambda: here.places() == ["train", "sample-0", "sample-1", "sample-5"])
            await asyncio.sleep(0.1)
            assert here.places() == ["train", "sample-0", "sample-1", "sample-5"]
            waited = [place for place in here.lives.living if place not in here.places()]
            assert len(waited) == 6
            assert all(here.lives.living[place].is_over for place in waited)

    run(scenario)


def test_a_replica_that_is_withdrawn_before_it_was_ready_is_not_said_to_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, crew.__name__)
    monkeypatch.setattr(ToldLife, "kill", lambda life: None)  # its end takes a while

    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 2), patience_seconds=1e6) as here:
            await here.ready("train", "sample-0")
            here.crew.note_elsewhere("another", 65)
            await until(lambda: "sample-1" in here.lives.living)
            here.crew.note_elsewhere("another", 0)
            await until(lambda: any(state.is_leaving for state in here.crew.states()))
            said = {state.name: state.held_up for state in here.crew.states() if state.is_leaving}
            assert said == {"sample-1": "it ends without having drawn any samples, as fewer replicas are enough"}
            here.lives.living["sample-1"].end(-9)
            await until(lambda: here.places() == ["train", "sample-0"])

    run(scenario)
    assert [record.getMessage() for record in caplog.records if "replicas" in record.getMessage()] == [
        f"Samples of {BASE} that are not drawn yet: 65; replicas from now on: 2.",
        f"Samples of {BASE} that are not drawn yet: 0; replicas from now on: 1.",
    ]


def test_one_of_the_first_replicas_is_withdrawn_too_if_another_works_in_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 2), patience_seconds=1e6) as here:
            await here.ready("train")
            starting = asyncio.create_task(here.crew.settled())
            here.crew.note_elsewhere("another", 65)
            await until(lambda: "sample-1" in here.lives.living)
            await here.ready("sample-1")
            here.crew.note_elsewhere("another", 0)
            await until(lambda: here.places() == ["train", "sample-1"])
            await starting
            assert here.crew.is_ready("sample")
            here.lives.living["sample-1"].say(held_up="no disk")
            await until(lambda: here.crew.held_up("", None) == "no disk")

    run(scenario)


def test_a_replica_that_has_worked_and_died_is_not_withdrawn_as_one_that_never_did(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 2), patience_seconds=1e6) as here:
            await here.ready("train", "sample-0")
            here.crew.note_elsewhere("another", 65)
            await until(lambda: "sample-1" in here.lives.living)
            await here.ready("sample-1")
            here.crew.note_elsewhere("another", 0)
            before = here.lives.living["sample-1"]
            before.end(-9)
            await here.replaced("sample-1", before)
            await asyncio.sleep(0.1)
            assert here.places() == ["train", "sample-0", "sample-1"]

    run(scenario)


def test_samples_that_came_to_other_servers_count_as_long_as_they_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "ELSEWHERE_SECONDS", 0.3)

    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 4)) as here:
            await here.ready("train", "sample-0")
            here.crew.note_elsewhere("another", 60)
            here.crew.note_elsewhere("a third", 5)
            await until(lambda: here.places() == ["train", "sample-0", "sample-1"])
            await until(lambda: here.places() == ["train", "sample-0"])

    run(scenario)


def test_what_a_server_before_has_left_counts_as_to_be_drawn(tmp_path: Path) -> None:
    """Also what was for a replica of the same name."""

    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 4)) as before:
            await before.ready("train", "sample-0")
            before.crew._bounds = Bounds(1, 1)
            assert {before.submit(number, [number], samples=5)[1] for number in range(13)} == {"sample-0"}
        async with world(tmp_path, Bounds(1, 4)) as here:
            await here.ready("train", "sample-0")
            await until(lambda: here.places() == ["train", "sample-0", "sample-1"])

    run(scenario)


def test_a_replica_that_is_let_go_finishes_what_came_to_another_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 2)) as here:
            await here.ready("train", "sample-0")
            here.crew.note_elsewhere("another", 65)
            await until(lambda: "sample-1" in here.lives.living)
            await here.ready("sample-1")
            job = NewJob(
                kind="sample",
                owner="ann",
                payload=b"{}",
                session_id="s",
                base_model=BASE,
                sampler_id="s:sample:0",
                seq_id=0,
                replica="sample-1",
            )
            request_id = here.store.jobs.enqueue(job).request_id
            assert here.claim("sample-1") == [request_id]
            last = here.lives.living["sample-1"]
            here.crew.note_elsewhere("another", 0)
            await until(lambda: any(state.is_leaving for state in here.crew.states()))
            await asyncio.sleep(0.1)
            assert not last.is_over, "it draws"
            here.finish("sample-1", [request_id])
            await until(lambda: here.places() == ["train", "sample-0"])
            assert last.is_over

    run(scenario)


def test_a_replica_ends_also_if_the_database_is_away_when_it_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "LAST_SAMPLES_SECONDS", 0.1)
    num_failed = 0

    def away(*args: Any, **settings: Any) -> Any:
        nonlocal num_failed
        num_failed += 1
        raise StoreUnavailableError("SELECT 1", {}, Exception("the connection is closed"))

    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 2)) as here:
            await here.ready("train", "sample-0")
            here.crew.note_elsewhere("another", 65)
            await until(lambda: "sample-1" in here.lives.living)
            await here.ready("sample-1")
            with pytest.MonkeyPatch.context() as outage:
                for what in ("strays", "is_busy", "requeue"):
                    outage.setattr(here.store.jobs, what, away)
                here.crew.note_elsewhere("another", 0)
                last = here.lives.living["sample-1"]
                await until(lambda: last.is_over and num_failed > 5)
            await until(lambda: here.places() == ["train", "sample-0"])

    run(scenario)


def test_what_a_replica_that_was_let_go_did_not_finish_is_drawn_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "LAST_SAMPLES_SECONDS", 0.0)

    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 4)) as here:
            requests = await grown(here)
            await here.ready("sample-1", "sample-2", "sample-3")
            await until(lambda: all((state.samples or 0) > 9 for state in here.crew.states() if state.name != "train"))
            held = [job.request_id for job in here.store.jobs.claim(BASE, "sample-3/w", sample=2, replica="sample-3")]
            while _unfinished(here, requests):
                for place in ("sample-0", "sample-1", "sample-2"):
                    here.finish(place, here.claim(place))
                await asyncio.sleep(0.01)
            assert len(held) == 2
            await until(lambda: here.places() == ["train", "sample-0"])

    run(scenario)


def _unfinished(here: World, requests: list[str]) -> list[str]:
    known = here.store.results.statuses(requests)
    return [request_id for request_id in requests if known[request_id].outcome is None]


def test_what_is_over_without_a_word_is_not_counted_for_ever(tmp_path: Path) -> None:
    """Another server cancels a sample that waits, and its notice, which may be lost, is."""

    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 2)) as here:
            await here.ready("train", "sample-0")
            for number in range(100):
                here.submit(number, [number])
            await until(lambda: "sample-1" in here.places())
            for number in range(100):
                assert here.store.jobs.cancel(f"s:sample:0:{number}", "ann") == "cancelled"
            await until(lambda: "sample-1" not in here.places())

    run(scenario)


def test_what_a_dead_replica_had_is_for_others_also_if_the_database_was_away_when_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as here:
            await here.ready(*PLACES)
            request, mine = here.submit(0, [1])
            other = "sample-1" if mine == "sample-0" else "sample-0"
            assert here.claim(mine) == [request]
            real, was_away = here.store.jobs.requeue, False

            def away_once(*arguments: Any, **options: Any) -> list[str]:
                nonlocal was_away
                if not was_away:
                    was_away = True
                    raise StoreUnavailableError("", {}, sa.exc.InterfaceError("", {}, Exception("away")))
                return real(*arguments, **options)

            monkeypatch.setattr(here.store.jobs, "requeue", away_once)
            here.lives.living[mine].end(-9)  # and its successor waits for room, for as long as it takes
            await until(lambda: here.claim(other) == [request])

    run(scenario)


def test_one_look_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Bounds(1, 2)) as here:
            await here.ready("train", "sample-0")
            real, has_failed = here.store.jobs.still_open, False

            def fail_once(request_ids: Iterable[str]) -> Any:
                nonlocal has_failed
                if not has_failed:
                    has_failed = True
                    raise RuntimeError("a fault of ours")
                return real(request_ids)

            monkeypatch.setattr(here.store.jobs, "still_open", fail_once)
            request, _ = here.submit(0, [1])
            await until(lambda: has_failed)
            assert here.store.jobs.cancel(request, "ann") == "cancelled"
            await until(lambda: here.crew.states()[1].samples == 0)

    run(scenario)
