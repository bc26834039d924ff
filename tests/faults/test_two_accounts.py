"""Two accounts in one process share nothing: not the credential, not the limits, not the trouble."""

import threading
import time
from collections.abc import Iterator

import pytest

import tinsmith
from tests.support.server import FOREVER, FakeServer, Reply
from tinsmith import types
from tinsmith.client.config import Config

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=2)
BUSY = Reply(429, json={"detail": "busy"}, headers={"retry-after": "3600"})


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer() as one, FakeServer() as other:
        yield one, other


def sampling_client(server: FakeServer, key: str, max_pending: int = 1000) -> tinsmith.SamplingClient:
    config = Config(base_url=server.url, api_key=key, max_pending=max_pending, when_full="error", telemetry=False)
    return tinsmith.ServiceClient(config=config).create_sampling_client(base_model="tiny/model-1")


def test_every_request_carries_the_key_of_its_own_account(servers: tuple[FakeServer, FakeServer]) -> None:
    clients = [sampling_client(server, f"tml-{index}") for index, server in enumerate(servers)]
    threads = [
        threading.Thread(target=lambda client=client: [client.sample(PROMPT, 1, PARAMS).result(10) for _ in range(20)])
        for client in clients
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for index, server in enumerate(servers):
        assert {request.headers["x-api-key"] for request in server.requests} == {f"tml-{index}"}
        assert len(server.received("asample")) == 60


def test_a_busy_server_does_not_hold_up_another(servers: tuple[FakeServer, FakeServer]) -> None:
    busy, idle = servers
    held_up, free = sampling_client(busy, "tml-x"), sampling_client(idle, "tml-x")
    busy.script("asample", BUSY, times=FOREVER)
    waiting = held_up.sample(PROMPT, 1, PARAMS)
    busy.wait_for("asample")
    assert free.sample(PROMPT, 1, PARAMS).result(10).sequences
    waiting.cancel()


def test_a_busy_account_does_not_hold_up_another_on_the_same_server(servers: tuple[FakeServer, FakeServer]) -> None:
    server, _ = servers
    held_up, free = sampling_client(server, "tml-busy"), sampling_client(server, "tml-free")
    server.script(
        lambda request: request.endpoint == "asample" and request.headers["x-api-key"] == "tml-busy",
        BUSY,
        times=FOREVER,
    )
    waiting = held_up.sample(PROMPT, 1, PARAMS)
    server.wait_for("asample")
    assert free.sample(PROMPT, 1, PARAMS).result(10).sequences
    waiting.cancel()


def test_a_full_account_does_not_fill_another(servers: tuple[FakeServer, FakeServer]) -> None:
    one, other = servers
    full, free = sampling_client(one, "tml-x", max_pending=1), sampling_client(other, "tml-x", max_pending=1)
    one.hold("asample")
    held = full.sample(PROMPT, 1, PARAMS)
    with pytest.raises(tinsmith.PendingLimitError):
        full.sample(PROMPT, 1, PARAMS)
    assert free.sample(PROMPT, 1, PARAMS).result(10).sequences
    one.release()
    held.result(10)


def test_clients_of_one_account_share_the_room(servers: tuple[FakeServer, FakeServer]) -> None:
    server, _ = servers
    first, second = (sampling_client(server, "tml-x", max_pending=1) for _ in range(2))
    server.hold("asample")
    held = first.sample(PROMPT, 1, PARAMS)
    with pytest.raises(tinsmith.PendingLimitError):
        second.sample(PROMPT, 1, PARAMS)
    server.release()
    held.result(10)


def test_a_client_with_many_samples_does_not_starve_another_of_the_account(
    servers: tuple[FakeServer, FakeServer],
) -> None:
    server, _ = servers
    many, few = sampling_client(server, "tml-x"), sampling_client(server, "tml-x")
    few.sample(PROMPT, 1, PARAMS).result(10)
    gate = few._connection.account.sample_gate
    gate._loop.call_soon_threadsafe(gate.back_off, 0.3)
    while gate._closed_until == 0.0:
        time.sleep(0.001)
    crowd = [many.sample(PROMPT, 1, PARAMS) for _ in range(300)]
    alone = few.sample(PROMPT, 1, PARAMS)
    alone.result(10)
    place = [request.json()["sampling_session_id"] for request in server.received("asample")[1:]].index(
        few.sampling_session_id
    )
    assert place < 20
    for future in crowd:
        future.cancel()


def test_flags_of_one_server_do_not_apply_to_another() -> None:
    with FakeServer(flags={"sample_use_retrieve_futures": True}) as one, FakeServer() as other:
        for server in (one, other):
            sampling_client(server, "tml-x").sample(PROMPT, 1, PARAMS).result(10)
        assert one.received("retrieve_futures")
        assert other.received("retrieve_futures") == []


def test_an_exchanged_token_stays_with_its_account() -> None:
    flags = {"pjwt_auth_enabled": True}
    with FakeServer(flags=flags) as one, FakeServer() as other:
        for server in (one, other):
            sampling_client(server, "tml-x").sample(PROMPT, 1, PARAMS).result(10)
        assert {request.headers["x-api-key"] for request in other.requests} == {"tml-x"}
        assert one.received("asample")[0].headers["x-api-key"].startswith("eyJ")
