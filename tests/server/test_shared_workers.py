"""A server among several on one database, with a stand-in for its workers: what becomes of it when it cannot lead."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import psycopg
import pytest

from tests.server.postgres import Postgres
from tests.server.store.making import sample
from tinsmith.errors import ConfigError
from tinsmith.server import led_workers, shared_workers
from tinsmith.server.bulletin import ModelNews
from tinsmith.server.led_workers import NO_LEADER
from tinsmith.server.shared_workers import SharedWorkers
from tinsmith.server.store import Store
from tinsmith.server.store.bulletin import Posted
from tinsmith.server.store.records import Cancelled
from tinsmith.server.supervise import WorkerProcesses
from tinsmith.server.worker_metrics import WorkerState
from tinsmith.types import ModelInput, SampleRequest, SamplingParams

BASE = "tiny"
NO_ROOM = "The Ray cluster has no room. Add nodes."


class Crew:
    """What can be asked of workers; they are ready at once, or there is no room for them."""

    def __init__(self, has_room: bool) -> None:
        self._has_room = has_room
        self.elsewhere: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        """All else that is asked has no answer."""
        return lambda *args, **settings: None

    def is_ready(self, base_model: str, lane: str | None = None) -> bool:
        return self._has_room

    def no_room(self, base_model: str, lane: str | None) -> dict[str, str]:
        return {}

    def figures(self, base_model: str) -> tuple[()]:
        return ()

    states = figures

    def note_elsewhere(self, server: str, samples: dict[str, int]) -> None:
        self.elsewhere.update(samples)

    async def start(self) -> None:
        pass

    async def ready(self) -> None:
        if not self._has_room:
            raise ConfigError(NO_ROOM)

    async def stop(self) -> None:
        pass


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as running:
        yield running


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_workers, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(shared_workers, "CANNOT_LEAD_SECONDS", 1.0)
    monkeypatch.setattr(shared_workers, "RECOUNT_SECONDS", 0.2)


@asynccontextmanager
async def server(
    url: str, name: str, begin: Callable[[], Crew], prepare: Callable[[], None] = lambda: None
) -> AsyncIterator[SharedWorkers]:
    store = Store(url)
    made = SharedWorkers(
        store, "s3://files", [BASE], lambda: name, prepare, lambda lead: cast(WorkerProcesses, begin())
    )
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
        store.close()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def test_a_server_that_cannot_lead_at_its_start_is_refused(url: str) -> None:
    async def scenario() -> None:
        async with server(url, "one", lambda: Crew(has_room=False)) as only:
            with pytest.raises(ConfigError, match="no room"):
                await only.ready()

    run(scenario)


def test_a_server_that_cannot_lead_later_says_why_and_tries_again(url: str) -> None:
    """Whoever led before has taken its nodes along; as soon as there are others, work goes on."""
    has_room = True

    async def scenario() -> None:
        nonlocal has_room
        async with server(url, "two", lambda: Crew(has_room)) as second:
            await second.ready()
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("UPDATE identity SET used_by = 'somebody else'")
            has_room = False  # and it finds that it lost the lead, which nobody holds
            await until(lambda: "no server can start the workers: The Ray cluster has no room" in str(reason(second)))
            assert not second.is_ready(BASE, "train")
            assert NO_LEADER not in str(reason(second))
            has_room = True
            await until(lambda: second.leads and second.is_ready(BASE, "train"))
            assert reason(second) is None

    def reason(workers: SharedWorkers) -> str | None:
        return workers.held_up(BASE, "s:train:0", "train")

    run(scenario)


def test_a_server_that_stands_by_takes_the_place_of_one_that_does_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is stopped, say: the database does not notice, as its connections are there."""
    monkeypatch.setattr(led_workers, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(shared_workers, "SILENT_SECONDS", 2.0)
    go_on = asyncio.Event()

    async def scenario() -> None:
        async with server(url, "one", lambda: Crew(has_room=True)) as first:
            await first.ready()
            async with server(url, "two", lambda: Crew(has_room=True)) as second:
                await second.ready()
                assert first.leads
                with monkeypatch.context() as stopped:
                    stopped.setattr(first, "_check_lead", go_on.wait)
                    await until(lambda: second.leads)
                go_on.set()
                await until(lambda: not first.leads)
                assert second.leads

    run(scenario)


def test_a_leader_that_prepares_its_files_for_long_keeps_the_lead(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(led_workers, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(shared_workers, "SILENT_SECONDS", 2.0)
    begun, go_on = threading.Event(), threading.Event()

    def prepare() -> None:
        begun.set()
        go_on.wait(30)

    async def scenario() -> None:
        async with server(url, "one", lambda: Crew(has_room=True), prepare) as first:
            await asyncio.to_thread(begun.wait)
            async with server(url, "two", lambda: Crew(has_room=True)) as second:
                await asyncio.sleep(4)
                assert not second.leads
                go_on.set()
                await until(lambda: first.leads)

    run(scenario)


def test_a_server_that_stands_by_tells_what_it_has_sent_and_finds_out_what_is_over(url: str) -> None:
    crew = Crew(has_room=True)

    async def scenario() -> None:
        store = Store(url)
        async with server(url, "one", lambda: crew) as leader:
            await leader.ready()
            async with server(url, "two", lambda: Crew(has_room=False)) as other:
                await other.ready()
                replica = WorkerState("sample-0", "sample", "there", 7, True, None, 0)
                crew.states = lambda base_model: (replica,)  # type: ignore[assignment,method-assign,return-value]
                params = SamplingParams(max_tokens=1)
                request = SampleRequest(prompt=ModelInput.from_ints([1]), sampling_params=params, num_samples=40)
                job = msgspec.structs.replace(sample(0), base_model=BASE)
                await until(lambda: other.choose_replica(job, request) == "sample-0")
                request_id = store.jobs.enqueue(msgspec.structs.replace(job, replica="sample-0")).request_id
                await until(lambda: crew.elsewhere == {BASE: 40})
                store.jobs.claim(BASE, "sample-0/w", sample=1, replica="sample-0")
                store.jobs.complete("sample-0/w", {request_id: Cancelled()})  # and nobody is told
                await until(lambda: crew.elsewhere == {BASE: 0})
        store.close()

    run(scenario)


def test_what_a_leader_has_posted_can_be_taken_back(url: str) -> None:
    store = Store(url)
    assert store.lead.take("one")
    store.bulletin.post(Posted("one", 1, msgspec.json.encode({BASE: ModelNews()})))
    assert store.bulletin.newest() is not None
    store.bulletin.withdraw("one")
    assert store.bulletin.newest() is None
    store.close()
