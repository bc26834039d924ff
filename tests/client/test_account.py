"""What the clients of one account share: flags, the exchanged token, and nothing with any other account."""

import asyncio
import base64
import gc
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tinsmith
from tests.support.server import FOREVER, FakeServer, Html, Reply
from tinsmith import types
from tinsmith.client import account as accounts
from tinsmith.client.account import Token, jwt_claims
from tinsmith.client.config import Config
from tinsmith.errors import APIConnectionError, ClientClosedError, ConfigError

THREADS = 16


def rest_client(server: FakeServer, api_key: str = "tml-x", **settings: Any) -> tinsmith.RestClient:
    return tinsmith.RestClient(config=Config(base_url=server.url, api_key=api_key, **settings))


def from_threads(action: Callable[[], object]) -> list[object]:
    """Does the same in many threads that start together; errors are returned."""
    barrier = threading.Barrier(THREADS)

    def act(_: int) -> object:
        barrier.wait(10)
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - judged by the test
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(act, range(THREADS)))


# Flags


def test_concurrent_first_use_fetches_the_flags_once() -> None:
    with FakeServer() as server:
        server.script("client/config", Reply(json={}, delay=0.05))
        outcomes = from_threads(lambda: rest_client(server).list_sessions().result(10))
        assert all(isinstance(outcome, types.ListSessionsResponse) for outcome in outcomes)
        assert len(server.received("client/config")) == 1


def test_one_client_used_from_many_threads_makes_one_session() -> None:
    with FakeServer() as server, tinsmith.ServiceClient(base_url=server.url, api_key="tml-x") as service:
        from_threads(lambda: service.create_sampling_client(base_model="tiny/model-1").result(10))
        assert len(server.received("create_session")) == 1
        numbers = [request.json()["sampling_session_seq_id"] for request in server.received("create_sampling_session")]
        assert sorted(numbers) == list(range(THREADS))


def test_all_who_wait_for_a_failing_server_fail_together() -> None:
    with FakeServer() as server:
        server.script("client/config", Reply(503, json={"detail": "away"}), times=FOREVER)
        outcomes = from_threads(lambda: rest_client(server, retry_budget=0.8).list_sessions().result(10))
        assert {type(outcome) for outcome in outcomes} == {tinsmith.InternalServerError}
        assert len(server.received("client/config")) <= 2 * 3, "each caller tried the dead server in its turn"


def test_flags_are_fetched_again_after_a_failure() -> None:
    with FakeServer() as server:
        server.script("client/config", Reply(400, json={"detail": "not now"}))
        rest = rest_client(server)
        with pytest.raises(tinsmith.BadRequestError):
            rest.list_sessions().result(10)
        assert rest.list_sessions().result(10).sessions == []


def test_closing_the_client_that_fetches_the_flags_does_not_harm_another() -> None:
    with FakeServer() as server:
        server.script("client/config", Reply(json={}, delay=30))
        first, second = rest_client(server), rest_client(server)
        doomed = first.list_sessions()
        server.wait_for("client/config")
        waiting = second.list_sessions()
        first.close().result(10)
        with pytest.raises(ClientClosedError):
            doomed.result(10)
        assert waiting.result(10).sessions == []


@pytest.mark.parametrize(
    "answer", [Reply(404, json={"detail": "Not Found"}), Html(200), Reply(200, json=[1]), Reply(200, body=b"hello")]
)
def test_a_server_of_another_kind_is_recognised(answer: Any) -> None:
    with FakeServer() as server:
        server.script("client/config", answer)
        with pytest.raises(tinsmith.APIResponseValidationError, match="does not speak this API") as caught:
            rest_client(server).list_sessions().result(10)
        assert "TINKER_BASE_URL" in str(caught.value)


def test_unknown_flags_are_ignored_and_limits_taken_over() -> None:
    flags = {"something_new": 5, "sample_dispatch_bytes_semaphore_size": 7, "fwdbwd_dispatch_bytes_semaphore_size": 9}
    with FakeServer(flags=flags) as server:
        rest = rest_client(server)
        rest.list_sessions().result(10)
        account = rest._connection.account
        assert account.flags is not None
        assert account.flags.sample_dispatch_bytes_semaphore_size == 7
        assert account.sample_gate._max_bytes == 7


# Sharing


def test_clients_of_one_account_share_it_whatever_the_spelling() -> None:
    with FakeServer() as server:
        first = tinsmith.RestClient(base_url=server.url, api_key="tml-x")
        second = tinsmith.RestClient(base_url=server.url.upper().replace("HTTP", "http") + "/", api_key="tml-x")
        assert first._connection.account is second._connection.account


def test_other_keys_and_other_servers_share_nothing() -> None:
    urls, keys = ("http://one", "http://two"), ("tml-a", "tml-b")
    clients = [tinsmith.RestClient(base_url=url, api_key=key) for url in urls for key in keys]
    assert len({id(client._connection.account) for client in clients}) == 4


def test_an_account_ends_with_its_last_client() -> None:
    before = len(accounts._registry)
    client = tinsmith.RestClient(base_url="http://ends-with-its-client", api_key="tml-x")
    assert len(accounts._registry) == before + 1
    del client
    gc.collect()
    assert len(accounts._registry) <= before


# Tokens


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Exchange:
    """Makes a new token at every call, or fails."""

    def __init__(self, clock: Clock, lifetime: float) -> None:
        self._clock = clock
        self.lifetime = lifetime
        self.credentials: list[str] = []
        self.error: Exception | None = None

    async def __call__(self, credential: str) -> str:
        await asyncio.sleep(0)
        self.credentials.append(credential)
        if self.error is not None:
            raise self.error
        return jwt({"exp": self._clock.now + self.lifetime, "n": len(self.credentials)})


def jwt(claims: dict[str, Any]) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhead.{payload}.signature"


def number(token: str) -> int:
    return int(jwt_claims(token)["n"])


class Setting:
    def __init__(self, lifetime: float = 86_400.0, **config: Any) -> None:
        self.clock = Clock()
        self.exchange = Exchange(self.clock, lifetime)
        self.token = Token(Config(**{"api_key": "tml-x", **config}), self.clock)
        self.token.use_flags(types.ClientConfigResponse(pjwt_auth_enabled=True))

    async def current(self) -> int:
        return number(await self.token.current(self.exchange))


async def let_others_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_plain_key_is_sent_as_it_is() -> None:
    token = Token(Config(api_key="tml-x"))
    token.use_flags(types.ClientConfigResponse())
    assert asyncio.run(token.current(Exchange(Clock(), 1))) == "tml-x"


def test_a_token_is_exchanged_once_for_all_who_ask() -> None:
    async def scenario() -> None:
        setting = Setting()
        assert await asyncio.gather(*(setting.current() for _ in range(10))) == [1] * 10
        assert setting.exchange.credentials == ["tml-x"]

    asyncio.run(scenario())


def test_a_token_is_renewed_in_the_background_before_it_expires() -> None:
    async def scenario() -> None:
        setting = Setting(lifetime=1000)
        assert await setting.current() == 1
        setting.clock.now += 1000 - 301
        assert await setting.current() == 1
        await let_others_run()
        assert len(setting.exchange.credentials) == 1
        setting.clock.now += 2
        assert await setting.current() == 1, "nobody waits for a renewal ahead of time"
        await let_others_run()
        assert await setting.current() == 2

    asyncio.run(scenario())


def test_a_token_about_to_expire_is_renewed_before_it_is_used() -> None:
    async def scenario() -> None:
        setting = Setting(lifetime=1000)
        await setting.current()
        setting.clock.now += 1000 - 59
        assert await setting.current() == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("lifetime", [250, 60, 30, 1, 0, -86_400])
def test_a_short_lived_token_is_not_renewed_at_every_call(lifetime: float) -> None:
    async def scenario() -> None:
        setting = Setting(lifetime=lifetime)
        for _ in range(50):
            await setting.current()
            await let_others_run()
            setting.clock.now += 0.1
        assert len(setting.exchange.credentials) == 1

    asyncio.run(scenario())


def test_a_failed_renewal_keeps_the_token_and_is_not_repeated_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        setting = Setting(lifetime=1000)
        await setting.current()
        setting.clock.now += 1000 - 200
        setting.exchange.error = APIConnectionError(message="away")
        for _ in range(5):
            assert await setting.current() == 1
            await let_others_run()
        assert len(setting.exchange.credentials) == 2
        setting.exchange.error = None
        setting.clock.now += 61
        await setting.current()
        await let_others_run()
        assert await setting.current() == 3

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.text.count("could not be renewed ahead of time") == 1


def test_a_renewal_that_ended_with_its_client_is_taken_up_by_the_next_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        setting = Setting(lifetime=1000)
        await setting.current()
        setting.clock.now += 1000 - 200
        setting.exchange.error = ClientClosedError("closed")
        await setting.current()
        await let_others_run()
        setting.exchange.error = None
        await setting.current()
        await let_others_run()
        assert await setting.current() == 3

    asyncio.run(scenario())
    assert caplog.text == ""


def test_a_failed_first_exchange_reaches_the_caller() -> None:
    async def scenario() -> None:
        setting = Setting()
        setting.exchange.error = APIConnectionError(message="away")
        with pytest.raises(APIConnectionError, match="away"):
            await setting.current()
        setting.exchange.error = None
        assert await setting.current() == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("token", ["", "eyJ", "a.b", "a.!!!.c", "a.bnVsbA.c", "ü.ü.ü", "a.eyJleHAiOiJsYXRlciJ9.c"])
def test_a_token_that_cannot_be_read_has_no_claims_that_matter(token: str) -> None:
    assert "exp" not in jwt_claims(token) or isinstance(jwt_claims(token)["exp"], str)

    async def scenario() -> None:
        setting = Setting()

        async def exchange(credential: str) -> str:
            return token

        for _ in range(3):
            assert await setting.token.current(exchange) == token

    asyncio.run(scenario())


# Which credential is exchanged


COMMAND_FIRST = types.ClientConfigResponse(pjwt_auth_enabled=True, credential_default_source="credential_cmd")


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        ({"api_key": "tml-k"}, types.ClientConfigResponse(pjwt_auth_enabled=True), "tml-k"),
        ({"credential_command": "echo tml-c"}, types.ClientConfigResponse(pjwt_auth_enabled=True), "tml-c"),
        ({"api_key": "tml-k", "credential_command": "echo tml-c"}, COMMAND_FIRST, "tml-c"),
        ({"api_key": "eyJk", "credential_command": "echo tml-c"}, COMMAND_FIRST, "eyJk"),
    ],
)
def test_the_credential_for_the_exchange(
    config: dict[str, str], flags: types.ClientConfigResponse, expected: str
) -> None:
    token = Token(Config(**config))  # type: ignore[arg-type]
    token.use_flags(flags)
    assert asyncio.run(token.raw()) == expected


def test_a_server_that_wants_a_command_says_so() -> None:
    token = Token(Config(api_key="tml-x"))
    token.use_flags(COMMAND_FIRST)
    with pytest.raises(ConfigError, match="TINKER_CREDENTIAL_CMD"):
        asyncio.run(token.raw())


def test_a_command_alone_is_not_enough_where_keys_are_taken_as_they_are() -> None:
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        Token(Config(credential_command="echo tml-x")).use_flags(types.ClientConfigResponse())


# Against a server


def test_after_the_exchange_every_call_carries_the_token() -> None:
    with FakeServer(flags={"pjwt_auth_enabled": True}) as server:
        rest = rest_client(server)
        rest.list_sessions().result(10)
        rest.list_sessions().result(10)
        keys = [(request.endpoint, request.headers["x-api-key"][:4]) for request in server.requests]
        assert keys == [("client/config", "tml-"), ("auth/token", "tml-"), ("sessions", "eyJh"), ("sessions", "eyJh")]


def test_a_refused_exchange_is_raised_as_it_is() -> None:
    with FakeServer(flags={"pjwt_auth_enabled": True}) as server:
        server.script("auth/token", Reply(401, json={"detail": "revoked"}), times=FOREVER)
        with pytest.raises(tinsmith.AuthenticationError, match="revoked"):
            rest_client(server).list_sessions().result(10)
        assert server.paths("sessions") == []


def test_a_failing_command_is_raised_and_nothing_is_sent(tmp_path: Any) -> None:
    with FakeServer() as server:
        rest = tinsmith.RestClient(config=Config(base_url=server.url, credential_command="exit 1"))
        with pytest.raises(ConfigError, match="status 1"):
            rest.list_sessions().result(10)
        assert server.requests == []


def test_a_command_supplies_the_credential() -> None:
    with FakeServer(flags={"pjwt_auth_enabled": True}) as server:
        rest = tinsmith.RestClient(config=Config(base_url=server.url, credential_command="echo tml-from-command"))
        rest.list_sessions().result(10)
        (exchange,) = server.received("auth/token")
        assert exchange.headers["x-api-key"] == "tml-from-command"
