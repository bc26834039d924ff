"""Headers, credential, retries and the meaning of answers, on a real server."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server import FOREVER, Drop, FakeServer, HalfBody, Html, Reply
from tests.support.training import KEY, PATIENCE, VirtualClock, make_config
from tinsmith.client.connection import Call, Connection
from tinsmith.client.futures import run
from tinsmith.client.hooks import Attempt, BillingPause, Record
from tinsmith.client.transport import HttpResponse, Traffic
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ClientClosedError,
    ConflictError,
    InternalServerError,
)
from tinsmith.types import GetInfoResponse, UntypedAPIFuture

INFO = Call("POST", "/api/v1/get_info", b'{"model_id": "m"}')
OK = Reply(json={"request_id": "r"})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    monkeypatch.setattr(Connection, "clock", clock)
    return clock


class Client:
    """A connection and the records its hooks were given."""

    def __init__(self, server: FakeServer, **settings: Any) -> None:
        self.records: list[Record] = []
        self.connection = Connection(make_config(server, hooks=(self.records.append,), **settings))

    def call(self, call: Call = INFO) -> HttpResponse:
        return self.connection.run(lambda: self.connection.call(call)).result(PATIENCE)

    def attempts(self, path: str = "/api/v1/get_info") -> list[Attempt]:
        return [record for record in self.records if isinstance(record, Attempt) and record.path == path]

    def close(self) -> None:
        run(self.connection.close).result(PATIENCE)


@pytest.fixture
def client(server: FakeServer, clock: VirtualClock) -> Iterator[Client]:
    client = Client(server)
    yield client
    client.close()


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_request_carries_what_the_protocol_asks_for(server: FakeServer, client: Client) -> None:
    server.script("get_info", OK)
    client.call(INFO._replace(headers={"X-Extra": "1"}, timeout=12.5))
    headers = server.received("get_info")[0].headers
    assert headers["x-api-key"] == KEY
    assert headers["accept"] == headers["content-type"] == "application/json"
    assert headers["x-stainless-read-timeout"] == "12.5"
    assert headers["x-stainless-retry-count"] == "0"
    assert headers["x-extra"] == "1"
    assert "tinsmith/" in headers["user-agent"]
    assert {"x-stainless-os", "x-stainless-arch", "x-stainless-runtime", "x-idempotency-key"} <= set(headers)


def test_a_get_has_no_body_headers_and_no_idempotency_key(server: FakeServer, client: Client) -> None:
    client.call(Call("GET", "/api/v1/get_server_capabilities", traffic=Traffic.REST))
    headers = server.received("get_server_capabilities")[0].headers
    assert "x-idempotency-key" not in headers
    assert "content-type" not in headers


def test_default_headers_replace_ours_however_they_are_written(server: FakeServer, clock: VirtualClock) -> None:
    client = Client(server, default_headers={"USER-AGENT": "mine", "CF-Access-Client-Id": "me"})
    server.script("get_info", OK)
    client.call()
    request = server.received("get_info")[0]
    assert request.headers["user-agent"] == "mine"
    assert request.headers["cf-access-client-id"] == "me"
    assert list(request.headers).count("user-agent") == 1
    client.close()


def test_flags_are_fetched_once_before_the_first_call_however_many_start_together(
    server: FakeServer, client: Client
) -> None:
    server.script("get_info", OK, times=FOREVER)

    async def many() -> None:
        await asyncio.gather(*[client.connection.call(INFO) for _ in range(20)])

    client.connection.run(many).result(PATIENCE)
    assert len(server.received("client/config")) == 1
    assert server.paths()[0] == "/api/v1/client/config"


# --- retries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        Reply(503, json={"detail": "busy"}),
        Reply(429, json={}),
        Reply(408, json={}),
        Reply(409, json={}),
        Reply(500, body=b"oops"),
        Html(502),
        Drop(),
        HalfBody(),
        Reply(400, body=b""),
        Reply(404, json={}, headers={"x-should-retry": "true"}),
    ],
    ids=repr,
)
def test_what_may_pass_is_repeated_with_the_same_key_and_one_record_per_try(
    server: FakeServer, client: Client, clock: VirtualClock, step: Any
) -> None:
    server.script("get_info", step, step, OK)
    assert client.call().status == 200
    requests = server.received("get_info")
    assert len({request.headers["x-idempotency-key"] for request in requests}) == 1
    assert [request.headers["x-stainless-retry-count"] for request in requests] == ["0", "1", "2"]
    attempts = client.attempts()
    assert [attempt.number for attempt in attempts] == [1, 2, 3]
    assert [attempt.retry_in_seconds for attempt in attempts] == [*clock.slept, None]
    assert [attempt.error is None for attempt in attempts] == [False, False, True]
    answered = isinstance(step, Reply | Html)
    assert [attempt.status for attempt in attempts] == [*[step.status if answered else None] * 2, 200]


def test_each_call_has_an_idempotency_key_of_its_own(server: FakeServer, client: Client) -> None:
    server.script("get_info", OK, OK)
    client.call()
    client.call()
    assert len({request.headers["x-idempotency-key"] for request in server.received("get_info")}) == 2


def test_retry_after_is_obeyed(server: FakeServer, client: Client, clock: VirtualClock) -> None:
    server.script("get_info", Reply(429, headers={"retry-after": "7"}, body=b"x"), OK)
    server.script("get_info", Reply(503, headers={"retry-after-ms": "250"}, body=b"x"), OK)
    client.call()
    client.call()
    assert clock.slept == [7.0, 0.25]


def test_the_server_can_forbid_retries(server: FakeServer, client: Client) -> None:
    server.script("get_info", Reply(503, json={}, headers={"x-should-retry": "false"}))
    with pytest.raises(InternalServerError):
        client.call()
    assert len(server.received("get_info")) == 1


def test_a_dead_server_is_reported_soon_and_given_up_when_the_budget_is_spent(
    server: FakeServer, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(server, retry_budget=40.0)
    server.script("client/config", Drop(), times=FOREVER)
    with caplog.at_level(logging.WARNING, "tinsmith"), pytest.raises(APIConnectionError):
        client.call()
    assert 30 <= sum(clock.slept) <= 40
    warnings = [record.getMessage() for record in caplog.records]
    assert "Trying again in" in warnings[0]
    assert 2 <= len(warnings) <= 5  # at once, and then not more than one in ten seconds
    client.close()


def test_a_server_that_is_back_is_reported_once(
    server: FakeServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("get_info", Drop(), Drop(), Drop(), OK, OK)
    with caplog.at_level(logging.WARNING, "tinsmith"):
        client.call()
        client.call()
    away, back = (record.getMessage() for record in caplog.records)
    assert "Trying again in" in away
    assert back.startswith("The server answers again after ")


def test_a_conflict_is_final_for_calls_the_server_does_not_recognise(server: FakeServer, client: Client) -> None:
    server.script("get_info", Reply(409, json={"detail": "already so"}))
    with pytest.raises(ConflictError):
        client.call(INFO._replace(idempotent=False))
    assert len(server.received("get_info")) == 1


def test_an_empty_400_is_repeated_three_times_and_then_raised(server: FakeServer, client: Client) -> None:
    server.script("get_info", Reply(400, body=b""), times=FOREVER)
    with pytest.raises(BadRequestError):
        client.call()
    assert len(server.received("get_info")) == 4


def test_a_billing_pause_is_visible_and_bounded(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    with FakeServer(flags={"billing_exception_max_pause_duration_sec": 30}) as server:
        client = Client(server)
        server.script("get_info", Reply(402, json={"detail": "no funds"}), times=FOREVER)
        with caplog.at_level(logging.WARNING, "tinsmith"), pytest.raises(BillingError, match="billing"):
            client.call()
        client.close()
    pauses = [record for record in client.records if isinstance(record, BillingPause)]
    assert [pause.seconds for pause in pauses] == [5.0] * 6
    assert "no funds" in caplog.text


# --- answers ---------------------------------------------------------------------------------------------------------


def test_an_error_names_status_call_body_and_remedy_and_carries_retry_after(server: FakeServer, client: Client) -> None:
    server.script("get_info", Reply(429, json={"detail": "slow down"}, headers={"retry-after": "4000"}))
    with pytest.raises(APIStatusError, match=r"429 .*slow down.*POST /api/v1/get_info.*Lower the number") as caught:
        client.call()
    error = caught.value
    assert (error.status_code, error.body, error.retry_after) == (429, {"detail": "slow down"}, 4000.0)
    assert error.request is not None
    assert error.request.method == "POST"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("step", [Html(200), Reply(json=["no", "object"]), Reply(json={"other": 1}), Reply(body=b"")])
def test_an_answer_that_does_not_fit_is_a_validation_error(server: FakeServer, client: Client, step: Any) -> None:
    server.script("get_info", step)
    with pytest.raises(APIResponseValidationError, match="UntypedAPIFuture"):
        client.connection.run(lambda: client.connection.call_for(UntypedAPIFuture, INFO)).result(PATIENCE)


@pytest.mark.parametrize("step", [Reply(404, json={"detail": "Not Found"}), Html(404), Html(200), Reply(json=[])])
def test_a_server_of_another_kind_is_recognised_and_the_message_names_base_url(
    server: FakeServer, client: Client, step: Any
) -> None:
    server.script("client/config", step)
    with pytest.raises(APIResponseValidationError, match=r"does not speak this API.*base_url"):
        client.call()


def test_a_redirected_post_is_not_followed_and_says_where_to(server: FakeServer, client: Client) -> None:
    server.script("get_info", Reply(308, body=b"", headers={"location": "https://elsewhere.example/api"}))
    with pytest.raises(APIStatusError, match=r"redirects to https://elsewhere\.example/api; use that as base_url"):
        client.call()


def test_the_key_does_not_follow_a_redirect_to_another_host(server: FakeServer, client: Client) -> None:
    get = Call("GET", "/api/v1/audit", traffic=Traffic.REST)
    with FakeServer() as other:
        server.script("audit", Reply(302, body=b"", headers={"location": other.url + "/stats?signature=1"}))
        assert client.call(get).status == 200
        landed = other.received()[0]
    assert (landed.path, landed.query) == ("/stats", {"signature": "1"})
    assert KEY not in str(dict(landed.headers))
    assert "x-api-key" not in landed.headers


def test_a_redirect_within_the_server_keeps_the_key_and_a_circle_ends(server: FakeServer, client: Client) -> None:
    server.script("old", Reply(302, body=b"", headers={"location": "/api/v1/get_server_capabilities"}))
    assert client.call(Call("GET", "/api/v1/old")).status == 200
    assert server.received("get_server_capabilities")[0].headers["x-api-key"] == KEY
    server.script("round", Reply(302, body=b"", headers={"location": "/api/v1/round"}), times=FOREVER)
    with pytest.raises(APIStatusError, match="302"):
        client.call(Call("GET", "/api/v1/round"))


def test_a_deprecation_note_is_logged_at_its_level(
    server: FakeServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    notes = {"x-deprecation-note": "upgrade soon"}
    server.script("get_info", Reply(json={}, headers=notes))
    server.script("get_info", Reply(json={}, headers={**notes, "x-deprecation-level": "error"}))
    client.call()
    client.call()
    assert [record.levelno for record in caplog.records if "upgrade" in record.message] == [30, 40]


def test_a_key_that_the_server_quotes_is_in_no_error_log_or_pickle(
    server: FakeServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"detail": f"the key {KEY} is not known", "key": KEY}
    server.script("get_info", Reply(503, json=said), Reply(401, json=said, headers={"set-cookie": "session=hush"}))
    with caplog.at_level(logging.DEBUG), pytest.raises(AuthenticationError, match="Check the API key") as caught:
        client.call()
    error = caught.value
    seen = f"{error} {error!r} {vars(error)} {caplog.text} {client.records} {client.connection.config!r}"
    for secret in (KEY, "hush"):
        assert secret not in seen
        assert secret.encode() not in pickle.dumps(error)


# --- closing ---------------------------------------------------------------------------------------------------------


def test_closing_ends_calls_in_progress_and_refuses_new_ones(server: FakeServer, client: Client) -> None:
    server.script("get_info", Reply(json={}, delay=30.0))
    pending = client.connection.run(lambda: client.connection.call_for(GetInfoResponse, INFO))
    server.wait_for("get_info")
    client.close()
    with pytest.raises(ClientClosedError):
        pending.result(PATIENCE)
    with pytest.raises(ClientClosedError):
        client.call()


def test_work_that_begins_while_the_client_closes_is_not_begun(client: Client) -> None:
    begun = []

    async def begin_late() -> None:
        await client.connection.close()
        await client.connection.guard(work())

    async def work() -> None:
        begun.append(True)

    with pytest.raises(ClientClosedError):
        run(begin_late).result(PATIENCE)
    assert not begun


def test_a_task_within_a_task_stays_known_until_the_outer_one_ends(client: Client) -> None:
    connection = client.connection

    async def nested() -> int:
        await connection.guard(asyncio.sleep(0))
        return len(connection._tasks)

    assert connection.run(nested).result(PATIENCE) == 1
    run(lambda: asyncio.sleep(0)).result(PATIENCE)
    assert not connection._tasks


def test_a_failing_call_that_nobody_waits_for_leaves_no_trace_in_the_log(
    server: FakeServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("get_info", Reply(422, json={}))
    client.connection.run(lambda: client.connection.call(INFO))
    server.wait_for("get_info")
    server.script("get_info", OK)
    client.call()
    gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
