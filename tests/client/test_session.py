"""A session is opened once, kept alive while somebody uses it, and finished with a reason."""

import asyncio
import contextlib
import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinsmith
from tests.support.server import FOREVER, FakeServer, Reply
from tinsmith import types
from tinsmith.client import session as sessions
from tinsmith.client.config import Config
from tinsmith.errors import InvalidInputError


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def quick_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HEARTBEAT_SECONDS", 0.02)


def service_client(server: FakeServer, **arguments: Any) -> tinsmith.ServiceClient:
    return tinsmith.ServiceClient(base_url=server.url, api_key="tml-x", **arguments)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


# Opening


def test_nothing_is_sent_before_the_first_use(server: FakeServer) -> None:
    client = service_client(server)
    rest = tinsmith.RestClient(base_url=server.url, api_key="tml-x")
    admin = tinsmith.AdminClient(base_url=server.url, api_key="tml-x")
    assert server.requests == [], (client, rest, admin)


def test_a_session_is_opened_with_what_the_user_says(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TAGS", "one,two")
    with service_client(server, user_metadata={"run": "7"}, project_id="p-1", display_name="try") as client:
        client.create_sampling_client(base_model="tiny/model-1").result(10)
        (opened,) = server.received("create_session")
        assert opened.json() == {
            "tags": ["one", "two"],
            "user_metadata": {"run": "7"},
            "sdk_version": "0.38.0",
            "project_id": "p-1",
            "display_name": "try",
            "type": "create_session",
        }


def test_capabilities_need_no_session(server: FakeServer) -> None:
    client = service_client(server)
    client.get_server_capabilities()
    client.rest.list_sessions().result(10)
    assert server.paths("create_session") == []
    assert client.get_console_url().endswith("/sessions")
    client.close("success").result(10)
    assert server.received(lambda request: request.path.endswith("/finish")) == []


@pytest.mark.parametrize("wrong", [{"user_metadata": {1: "a"}}, {"user_metadata": ["a"]}, {"display_name": 5}])
def test_bad_session_data_is_refused_by_the_constructor(server: FakeServer, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        service_client(server, **wrong)
    assert server.requests == []


def test_unknown_arguments_are_ignored_with_a_warning(server: FakeServer) -> None:
    with pytest.warns(FutureWarning, match="nonsense"):
        service_client(server, nonsense=1)


def test_messages_of_the_server_are_logged_at_their_level(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.api.messages.update(info_message="hello", warning_message="careful", error_message="broken")
    with caplog.at_level(logging.INFO, "tinsmith"), service_client(server) as client:
        client.create_sampling_client(base_model="tiny/model-1").result(10)
    levels = {record.getMessage(): record.levelno for record in caplog.records}
    assert levels["hello"] == logging.INFO
    assert levels["careful"] == logging.WARNING
    assert levels["broken"] == logging.ERROR


def test_a_session_that_could_not_be_opened_is_tried_again_at_the_next_use(server: FakeServer) -> None:
    server.script("create_session", Reply(403, json={"detail": "not yet"}))
    with service_client(server) as client:
        with pytest.raises(tinsmith.PermissionDeniedError):
            client.create_sampling_client(base_model="tiny/model-1").result(10)
        client.create_sampling_client(base_model="tiny/model-1").result(10)


# Dynamic flags


def test_flags_that_may_change_are_fetched_with_the_session(server: FakeServer) -> None:
    server.dynamic_flags.update(sample_cancel_enabled=True, sample_cancel_max_batch_size=3)
    with service_client(server) as client:
        account = client._connection.account
        client.create_sampling_client(base_model="tiny/model-1").result(10)
        until(lambda: account.dynamic_flags.sample_cancel_enabled)
        assert account.cancellations._value == 3


def test_flags_that_may_change_are_fetched_again(
    server: FakeServer, quick_heartbeat: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MIN_REFRESH_SECONDS", 0)
    server.dynamic_flags.update(refresh_interval_sec=0)
    with service_client(server) as client:
        client.create_sampling_client(base_model="tiny/model-1").result(10)
        server.wait_for("client/dynamic_config", 3)


@pytest.mark.parametrize("answer", [Reply(404, json={"detail": "Not Found"}), Reply(500, json={}), Reply(json=[1])])
def test_a_server_without_them_leaves_the_defaults(server: FakeServer, answer: Reply, quick_heartbeat: None) -> None:
    server.script("client/dynamic_config", answer, times=FOREVER)
    with service_client(server) as client:
        client.create_sampling_client(base_model="tiny/model-1").result(10)
        server.wait_for("session_heartbeat", 2)
        assert client._connection.account.dynamic_flags == types.ClientDynamicConfigResponse()


def test_a_failed_refresh_keeps_the_last_good_flags(
    server: FakeServer, quick_heartbeat: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MIN_REFRESH_SECONDS", 0)
    server.dynamic_flags.update(refresh_interval_sec=0, sample_cancel_enabled=True)
    with service_client(server) as client:
        client.create_sampling_client(base_model="tiny/model-1").result(10)
        server.wait_for("client/dynamic_config", 2)
        server.script("client/dynamic_config", Reply(503, json={}), times=FOREVER)
        server.wait_for("client/dynamic_config", len(server.received("client/dynamic_config")) + 3)
        assert client._connection.account.dynamic_flags.sample_cancel_enabled


# Heartbeats


def test_a_session_is_kept_alive(server: FakeServer, quick_heartbeat: None) -> None:
    with service_client(server) as client:
        client.create_sampling_client(base_model="tiny/model-1").result(10)
        beats = server.wait_for("session_heartbeat", 3)
        assert beats[0].json() == {"session_id": "session-0001", "type": "session_heartbeat"}
    count = len(server.received("session_heartbeat"))
    time.sleep(0.1)
    assert len(server.received("session_heartbeat")) <= count + 1


def test_an_ended_session_gets_no_more_heartbeats_and_nobody_is_alarmed(
    server: FakeServer, quick_heartbeat: None, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("session_heartbeat", Reply(410, json={"detail": "gone"}), times=FOREVER)
    with service_client(server) as client:
        client.create_sampling_client(base_model="tiny/model-1").result(10)
        server.wait_for("session_heartbeat")
        keeper = client._session._keeper
        assert keeper is not None
        until(keeper.done)
        assert len(server.received("session_heartbeat")) == 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_silence_is_reported_once_per_period(
    server: FakeServer, quick_heartbeat: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "HEARTBEAT_WARNING_SECONDS", 0.3)
    server.script("session_heartbeat", Reply(500, json={}), times=FOREVER)
    with service_client(server) as client:
        client.create_sampling_client(base_model="tiny/model-1").result(10)
        server.wait_for("session_heartbeat", 3)
        assert "heartbeat" not in caplog.text
        until(lambda: "No heartbeat has reached the server" in caplog.text)
        beats, warnings = len(server.received("session_heartbeat")), caplog.text.count("No heartbeat")
        assert warnings < beats / 3


def test_a_failing_heartbeat_goes_on_and_recovers(server: FakeServer, quick_heartbeat: None) -> None:
    server.script("session_heartbeat", Reply(500, json={}), Reply(401, json={}), Reply(429, json={}))
    with service_client(server) as client:
        client.create_sampling_client(base_model="tiny/model-1").result(10)
        server.wait_for("session_heartbeat", 6)


def test_a_dropped_client_is_collected_and_its_heartbeat_stops(server: FakeServer, quick_heartbeat: None) -> None:
    open_before = len(sessions._open_sessions)
    service = service_client(server)
    client = service.create_sampling_client(base_model="tiny/model-1")
    client.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result(10)
    references = [weakref.ref(service), weakref.ref(client), weakref.ref(service._session)]
    connection, keeper = weakref.ref(service._connection), service._session._keeper
    assert keeper is not None
    del service, client
    until(lambda: gc.collect() >= 0 and all(reference() is None for reference in [*references, connection]))
    until(keeper.done)
    beats = len(server.received("session_heartbeat"))
    time.sleep(0.1)
    assert len(server.received("session_heartbeat")) == beats
    assert len(sessions._open_sessions) <= open_before


def test_a_sampling_client_keeps_the_session_of_a_dropped_service_client(
    server: FakeServer, quick_heartbeat: None
) -> None:
    client = service_client(server).create_sampling_client(base_model="tiny/model-1")
    gc.collect()
    server.wait_for("session_heartbeat", len(server.received("session_heartbeat")) + 3)
    assert client.get_base_model() == "tiny/model-1"


# Finishing


def finish_bodies(server: FakeServer) -> list[Any]:
    return [request.json() for request in server.received(lambda request: request.path.endswith("/finish"))]


@pytest.mark.parametrize(
    ("error", "status"), [(None, "success"), (ValueError("x"), "errored"), (KeyboardInterrupt(), "interrupted")]
)
def test_leaving_the_block_gives_the_reason(server: FakeServer, error: BaseException | None, status: str) -> None:
    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected, service_client(server) as client:
        client.create_sampling_client(base_model="tiny/model-1").result(10)
        if error is not None:
            raise error
    assert finish_bodies(server) == [{"reason": {"type": status}, "detail": None}]


def test_the_first_reason_counts(server: FakeServer) -> None:
    client = service_client(server)
    client.create_sampling_client(base_model="tiny/model-1").result(10)
    first = client.close("errored", "out of data")
    second = client.close("success")
    first.result(10)
    second.result(10)
    assert finish_bodies(server) == [{"reason": {"type": "errored"}, "detail": "out of data"}]


def test_an_unknown_reason_is_refused(server: FakeServer) -> None:
    client = service_client(server)
    with pytest.raises(InvalidInputError, match="'success', 'errored' or 'interrupted'"):
        client.close("done")  # type: ignore[arg-type]


def test_after_closing_every_call_says_so(server: FakeServer) -> None:
    service = service_client(server)
    client = service.create_sampling_client(base_model="tiny/model-1")
    rest = service.rest
    service.close("success").result(10)
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    for use in (
        lambda: client.sample(prompt, 1, params),
        lambda: client.compute_logprobs(prompt),
        client.get_base_model,
        rest.list_sessions,
        service.get_server_capabilities,
        lambda: service.create_sampling_client(base_model="tiny/model-1"),
        service.__enter__,
    ):
        with pytest.raises(tinsmith.ClientClosedError, match="Create a new ServiceClient"):
            use()


def test_closing_one_client_leaves_another_of_the_account_alone(server: FakeServer) -> None:
    first, second = service_client(server), service_client(server)
    sampler = second.create_sampling_client(base_model="tiny/model-1")
    first.create_sampling_client(base_model="tiny/model-1").result(10)
    first.close("success").result(10)
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    assert sampler.sample(prompt, 1, params).result(10).sequences
    second.close("success").result(10)


def test_a_cancelled_close_can_be_repeated(server: FakeServer) -> None:
    client = service_client(server)
    client.create_sampling_client(base_model="tiny/model-1").result(10)
    closing = client.close("success")
    closing.cancel()
    client.close("success").result(10)
    with pytest.raises(tinsmith.ClientClosedError):
        client.get_server_capabilities()


def test_closing_goes_on_when_its_caller_stops_waiting(server: FakeServer) -> None:
    client = service_client(server)
    client.create_sampling_client(base_model="tiny/model-1").result(10)
    server.script("finish", Reply(200, json={}, delay=0.5))
    with pytest.raises(TimeoutError):
        asyncio.run(client.close("success").result_async(0.05))
    client.close("success").result(10)
    assert client._connection._disconnected


def test_a_config_of_ones_own_is_used(server: FakeServer) -> None:
    config = Config(base_url=server.url, api_key="tml-x", tags=("mine",), telemetry=False)
    with tinsmith.ServiceClient(config=config) as client:
        assert client.holder.session_id == "session-0001"
    (opened,) = server.received("create_session")
    assert opened.json()["tags"] == ["mine"]
    assert server.paths("telemetry") == []
