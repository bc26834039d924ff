"""What servers on one database tell each other, and what a server knows of the workers of another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import psycopg
import pytest

from tests.server.postgres import Postgres
from tinsmith.server import relay
from tinsmith.server.bulletin import ByLane, ModelNews
from tinsmith.server.led_workers import NO_LEADER, SILENT_SECONDS, LedWorkers
from tinsmith.server.messages import Drawn, Replay
from tinsmith.server.relay import Relay, Told, pieces
from tinsmith.server.store import Store
from tinsmith.server.store.bulletin import Posted
from tinsmith.server.store.records import NewJob
from tinsmith.server.store.relay import MAX_BYTES
from tinsmith.server.worker_metrics import WorkerState
from tinsmith.types import ModelInput, SampleRequest, SamplingParams

BASE = "tiny"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Postgres() as postgres:
        yield postgres.new_database()


def joined(messages: list[Told]) -> tuple[list[str], list[str], list[Drawn]]:
    return (
        [name for told in messages for name in told.wake],
        [request_id for told in messages for request_id in told.done],
        [drawn for told in messages for drawn in told.drawn],
    )


def test_servers_hear_each_other_and_not_themselves_also_after_a_connection_was_lost(url: str) -> None:
    asyncio.run(asyncio.wait_for(_hear_each_other(url), 60))


async def _hear_each_other(url: str) -> None:
    heard: list[list[Told]] = [[], []]
    stores = [Store(url) for _ in heard]
    relays = [Relay(store, messages.append) for store, messages in zip(stores, heard, strict=True)]
    for each in relays:
        await each.start()

    async def until_heard(name: str) -> None:
        while name not in joined(heard[1])[0]:
            relays[0].wake(name)
            await asyncio.sleep(0.05)

    await until_heard("first")
    relays[0].done([f"job-{number:05}" for number in range(2000)])
    drawn = [Drawn("job", 0, number, [number], [-0.5]) for number in range(500)]
    relays[0].drawn(drawn)
    await until_heard("then")
    assert joined(heard[1])[1] == [f"job-{number:05}" for number in range(2000)]
    assert joined(heard[1])[2] == drawn
    with psycopg.connect(url, autocommit=True) as connection:
        listening = "query LIKE 'LISTEN%' AND datname = current_database()"
        connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {listening}")
    await until_heard("again")
    assert heard[0] == []
    for each, store in zip(relays, stores, strict=True):
        await each.stop()
        store.close()


def test_whatever_there_is_to_tell_goes_in_pieces_that_are_short_enough() -> None:
    long = Drawn("job", 1, 7, list(range(3000)), [-0.123456789] * 3000, [[(5, -1.5)]] * 3000)
    told = Told(by="me", wake=(BASE,), done=tuple(f"job-{number}" for number in range(3000)), drawn=(long, long))
    texts = list(pieces(told))
    assert all(len(text.encode()) <= MAX_BYTES for text in texts)
    found = [msgspec.json.decode(text, type=Told) for text in texts]
    assert {each.by for each in found} == {"me"}
    woken, done, drawn = joined(found)
    assert (woken, done) == ([BASE], list(told.done))
    for copy in (drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]):
        assert [token for part in copy for token in part.tokens] == long.tokens
        assert [part.start for part in copy] == [7 + part.tokens[0] for part in copy]
        assert [entry for part in copy for entry in part.topk] == long.topk


def test_a_token_of_which_there_is_too_much_to_tell_is_left_to_the_result() -> None:
    wide = Drawn("job", 0, 0, [1], [-1.0], [[(token, -2.5) for token in range(2000)]])
    assert list(pieces(Told(by="me", drawn=(wide,)))) == []


# What is known of workers elsewhere


def news(*replicas: str) -> ModelNews:
    states = tuple(WorkerState(name, "sample", "there", 7, True, None, 0) for name in replicas)
    trains = ByLane(False, "it is away", replay=Replay(model_id="m", replayed=1, total=2))
    waits = ByLane(True, None, {"s:sample:0": "the disk is full"})
    return ModelNews(lanes=(trains, waits, ByLane()), states=states)


def posted(number: int, *replicas: str) -> Posted:
    return Posted("leader", number, msgspec.json.encode({BASE: news(*replicas)}))


def test_what_the_leader_posts_is_known_as_long_as_it_is_heard() -> None:
    now = [0.0]
    workers = LedWorkers(lambda base_model: None, lambda: now[0])
    assert workers.held_up(BASE) == NO_LEADER
    workers.read(posted(1))
    assert not workers.is_ready(BASE, "train")
    assert workers.is_ready(BASE, "sample")
    assert workers.held_up(BASE, lane="train") == "it is away"
    assert workers.held_up(BASE, "s:sample:0", "sample") == "the disk is full"
    assert workers.held_up(BASE, "s:sample:1", "sample") is None
    assert workers.replay(BASE, "train") == Replay(model_id="m", replayed=1, total=2)
    assert workers.replay(BASE, "sample") is None
    assert workers.states("another") == ()
    now[0] += SILENT_SECONDS - 1
    workers.read(posted(2))
    now[0] += SILENT_SECONDS - 1
    workers.read(posted(2))  # the same once more is no sign of life
    assert workers.hears
    now[0] += 1
    assert not workers.hears
    assert not workers.is_ready(BASE, "sample")
    assert workers.held_up(BASE, lane="sample") == NO_LEADER


def choose(workers: LedWorkers, number: int) -> str:
    params = SamplingParams(max_tokens=1)
    request = SampleRequest(prompt=ModelInput.from_ints([number]), sampling_params=params, num_samples=40)
    job = NewJob(
        kind="sample",
        owner="ann",
        payload=b"",
        session_id="s",
        base_model=BASE,
        sampler_id=f"s:sample:{number}",
        seq_id=number,
    )
    return workers.choose_replica(job, request)


def test_replicas_of_the_leader_are_chosen_from_by_their_load() -> None:
    workers = LedWorkers(lambda base_model: None)
    assert choose(workers, 0) == "", "none is known"
    workers.read(posted(1, "sample-0", "sample-1"))
    chosen = [choose(workers, number) for number in range(4)]
    assert sorted(chosen) == ["sample-0", "sample-0", "sample-1", "sample-1"]
    workers.read(posted(2, "sample-1"))
    assert choose(workers, 4) == "sample-1"


def test_a_replica_that_shall_end_gets_nothing_from_other_servers_either() -> None:
    workers = LedWorkers(lambda base_model: None)
    first, second = news("sample-0", "sample-1").states
    leaving = ModelNews(states=(first, second._replace(is_leaving=True)))
    workers.read(Posted("leader", 1, msgspec.json.encode({BASE: leaving})))
    assert {choose(workers, number) for number in range(4)} == {"sample-0"}


def test_what_was_sent_is_told_until_it_is_over_and_forgotten_with_the_leader() -> None:
    workers = LedWorkers(lambda base_model: None)
    workers.read(posted(1, "sample-0", "sample-1"))
    for number in range(3):
        choose(workers, number)
    assert workers.samples == {BASE: 120}
    assert workers.long_underway() == set()
    assert workers.long_underway() == {f"s:sample:{number}:{number}" for number in range(3)}
    workers.are_over(["s:sample:1:1"])
    assert workers.samples == {BASE: 80}
    workers.forget()
    assert (workers.samples, workers.long_underway()) == ({}, set())


def test_of_many_tellings_how_much_there_is_to_draw_the_last_goes_out() -> None:
    told = [Told(by="me", samples={BASE: number}) for number in (3, 2)] + [Told(by="me", done=("job",))]
    assert list(relay.joined(told)) == [Told(by="me", done=("job",)), Told(by="me", samples={BASE: 2})]
