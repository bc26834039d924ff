"""Sampling when the server is busy, broken, slow or forgetful: the right retries, no hang, no leak."""

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from email.utils import formatdate
from typing import Any

import pytest

import tinsmith
from tests.support.server import FOREVER, Drop, FakeServer, HalfBody, Hang, Html, Recorded, Reply
from tinsmith import types
from tinsmith.client import limits, samples
from tinsmith.client.config import Config

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4)
QUICK = tinsmith.RetryConfig(retry_delay_base=0.02, retry_delay_max=0.05)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def service_client(server: FakeServer, **settings: Any) -> tinsmith.ServiceClient:
    return tinsmith.ServiceClient(config=Config(base_url=server.url, api_key="tml-x", telemetry=False, **settings))


def sampling_client(server: FakeServer, retry_config: Any = QUICK, **settings: Any) -> tinsmith.SamplingClient:
    return service_client(server, **settings).create_sampling_client(None, "tiny/model-1", retry_config)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def numbers(requests: list[Recorded]) -> list[int]:
    return [request.json()["seq_id"] for request in requests]


def is_idle(client: tinsmith.SamplingClient) -> bool:
    """Nothing of a sample is left: no slot, no place in the gate, no timer."""
    account = client._connection.account
    return (
        account.pending._taken == 0
        and account.sample_gate._submitting == 0
        and account.sample_gate._bytes_submitting == 0
        and client._queue.lane._unfinished == 0
        and not client._queue.resting
    )


# Too much at once


def date_in(seconds: float, now: float) -> str:
    return formatdate(now + seconds, usegmt=True)


@pytest.mark.parametrize(
    "headers",
    [
        {"retry-after-ms": "400"},
        {"retry-after": "0.4"},
        {"retry-after": date_in(1, 1e9), "date": date_in(0, 1e9)},
        {"retry-after": "Sunday, 09-Sep-01 01:46:41 GMT", "date": date_in(0, 1e9)},
        {"retry-after": "Sun Sep  9 01:46:41 2001", "date": date_in(0, 1e9)},
    ],
    ids=lambda headers: "; ".join(headers.values()),
)
def test_a_sample_that_was_turned_away_returns_under_its_number_when_the_server_said(
    server: FakeServer, headers: dict[str, str]
) -> None:
    client = sampling_client(server)
    server.script("asample", Reply(429, json={"detail": "busy"}, headers=headers))
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences
    first, second = server.received("asample")
    assert numbers([first, second]) == [0, 0]
    wanted = 0.4 if headers.get("retry-after") == "0.4" or "retry-after-ms" in headers else 1.0
    assert wanted * 0.98 <= second.arrived - first.arrived < wanted + 1.0


def test_all_clients_of_the_account_wait_when_one_is_turned_away(server: FakeServer) -> None:
    first, second = sampling_client(server), sampling_client(server)
    second.sample(PROMPT, 1, PARAMS).result(10)
    server.script("asample", Reply(429, json={}, headers={"retry-after": "0.5"}))
    turned_away = first.sample(PROMPT, 1, PARAMS)
    until(lambda: first._connection.account.sample_gate._closed_until > 0)
    other = second.sample(PROMPT, 1, PARAMS)
    turned_away.result(10)
    other.result(10)
    refused, *later = server.received("asample")[1:]
    assert all(request.arrived - refused.arrived >= 0.49 for request in later)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(3, samples.BACKOFF_SECONDS), (20_000, samples.LARGE_PROMPT_BACKOFF_SECONDS)],
)
def test_without_a_word_of_the_server_small_and_large_prompts_wait_for_different_times(
    server: FakeServer, tokens: int, seconds: float
) -> None:
    backoffs: list[Any] = []
    client = sampling_client(server, hooks=(backoffs.append,))
    server.script("asample", Reply(429, json={}))
    future = client.sample(types.ModelInput.from_ints([1] * tokens), 1, PARAMS)
    until(lambda: any(isinstance(record, tinsmith.Backoff) for record in backoffs))
    (told,) = [record for record in backoffs if isinstance(record, tinsmith.Backoff)]
    assert told == tinsmith.Backoff("sampling", seconds, 429)
    future.cancel()


def test_for_a_while_after_being_turned_away_few_are_sent_at_once(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = sampling_client(server)
    server.script("asample", Reply(429, json={}, headers={"retry-after": "0.1"}))
    first = client.sample(PROMPT, 1, PARAMS)
    until(lambda: client._connection.account.sample_gate._closed_until > 0)
    server.script("asample", *[Reply(503, json={}, delay=0.3)] * 10)
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(50)]
    server.wait_for("asample", 1 + limits.MAX_THROTTLED_SUBMISSIONS)
    time.sleep(0.1)
    assert len(server.received("asample")) == 1 + limits.MAX_THROTTLED_SUBMISSIONS
    for future in [first, *futures]:
        assert future.result(20).sequences


@pytest.mark.parametrize("headers", [{"retry-after": "0"}, {"retry-after-ms": "1"}, {"retry-after": "-5"}])
def test_a_server_that_says_now_again_and_again_is_not_stormed(server: FakeServer, headers: dict[str, str]) -> None:
    client = sampling_client(server)
    server.script("asample", Reply(429, json={}, headers=headers), times=FOREVER)
    future = client.sample(PROMPT, 1, PARAMS)
    time.sleep(0.6)
    assert len(server.received("asample")) <= 8
    future.cancel()


def test_being_turned_away_is_no_retry_that_could_be_switched_off(server: FakeServer) -> None:
    client = sampling_client(server, tinsmith.RetryConfig(enable_retry_logic=False))
    server.script("asample", Reply(429, json={}, headers={"retry-after-ms": "50"}))
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences


def test_an_account_that_cannot_pay_pauses_and_goes_on(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinsmith.client import retry

    monkeypatch.setattr(retry, "BILLING_PAUSE_SECONDS", 0.1)
    records: list[Any] = []
    client = sampling_client(server, hooks=(records.append,))
    server.script("asample", Reply(402, json={"detail": "no money"}), times=2)
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences
    assert [type(record) for record in records].count(tinsmith.BillingPause) == 2


def test_an_account_that_never_pays_fails_in_the_end() -> None:
    with FakeServer(flags={"billing_exception_max_pause_duration_sec": 0}) as server:
        server.script("asample", Reply(402, json={"detail": "no money"}), times=FOREVER)
        with pytest.raises(tinsmith.BillingError, match="no money"):
            sampling_client(server).sample(PROMPT, 1, PARAMS).result(10)


# A server that fails


@pytest.mark.parametrize(
    "fault",
    [
        Reply(503, json={}),
        Reply(500, json={}),
        Reply(408, json={}),
        Reply(409, json={}),
        Html(502),
        Drop(),
        Drop(executed=True),
        HalfBody(),
        Reply(400, body=b""),
    ],
    ids=repr,
)
def test_a_submission_that_failed_is_repeated_under_its_number(server: FakeServer, fault: Any) -> None:
    client = sampling_client(server)
    server.script("asample", fault, fault)
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences
    assert numbers(server.received("asample")) == [0, 0, 0]
    assert is_idle(client)


def test_each_failure_costs_one_request(server: FakeServer) -> None:
    """The HTTP layer does not repeat it too."""
    client = sampling_client(server)
    server.script("asample", Reply(503, json={}), times=3)
    client.sample(PROMPT, 1, PARAMS).result(10)
    retries = [request.headers["x-stainless-retry-count"] for request in server.received("asample")]
    assert retries == ["0"] * 4


def test_a_slow_submission_times_out_and_is_repeated(server: FakeServer) -> None:
    client = sampling_client(server, timeout=0.3)
    server.script("asample", Hang())
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences
    assert numbers(server.received("asample")) == [0, 0]


def test_a_storm_of_failures_is_weathered_by_all(server: FakeServer) -> None:
    client = sampling_client(server)
    server.script("asample", Reply(503, json={}), times=60)
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(40)]
    for future in futures:
        assert future.result(20).sequences
    assert sorted(set(numbers(server.received("asample")))) == list(range(40))
    assert is_idle(client)


def test_failures_pause_longer_and_longer(server: FakeServer) -> None:
    config = tinsmith.RetryConfig(retry_delay_base=0.1, retry_delay_max=1.0, jitter_factor=0.0)
    client = sampling_client(server, config)
    server.script("asample", Reply(503, json={}), times=3)
    client.sample(PROMPT, 1, PARAMS).result(10)
    times = [request.arrived for request in server.received("asample")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[0] >= 0.1
    assert gaps[1] >= 0.2
    assert gaps[2] >= 0.4


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_an_error_of_the_user_is_not_repeated(server: FakeServer, status: int) -> None:
    client = sampling_client(server)
    server.script("asample", Reply(status, json={"detail": "no"}), times=FOREVER)
    with pytest.raises(tinsmith.APIStatusError) as caught:
        client.sample(PROMPT, 1, PARAMS).result(10)
    assert caught.value.status_code == status
    assert len(server.received("asample")) == 1
    assert is_idle(client)


@pytest.mark.parametrize(
    ("config", "flags"),
    [(tinsmith.RetryConfig(enable_retry_logic=False), {}), (QUICK, {"sample_no_retries": True})],
)
def test_retries_can_be_switched_off_by_the_user_and_by_the_server(config: Any, flags: dict[str, Any]) -> None:
    with FakeServer(flags=flags) as server:
        client = sampling_client(server, config)
        server.script("asample", Reply(503, json={}), times=FOREVER)
        with pytest.raises(tinsmith.InternalServerError):
            client.sample(PROMPT, 1, PARAMS).result(10)
        assert len(server.received("asample")) == 1


def test_errors_of_the_users_own_choice_are_retried(server: FakeServer) -> None:
    config = tinsmith.RetryConfig(retry_delay_base=0.02, retryable_exceptions=(tinsmith.NotFoundError,))
    client = sampling_client(server, config)
    server.script("asample", Reply(404, json={}))
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences


def test_a_server_that_never_recovers_is_given_up_after_the_progress_timeout(server: FakeServer) -> None:
    config = tinsmith.RetryConfig(progress_timeout=0.4, retry_delay_base=0.05, retry_delay_max=0.1)
    client = sampling_client(server, config)
    server.script("asample", Reply(503, json={"detail": "away"}), times=FOREVER)
    started = time.monotonic()
    with pytest.raises(tinsmith.InternalServerError, match="away"):
        client.sample(PROMPT, 1, PARAMS).result(10)
    assert 0.2 < time.monotonic() - started < 5
    assert is_idle(client)


# Results that are lost or bad


def test_a_lost_result_is_asked_for_again_under_a_new_number(server: FakeServer) -> None:
    client = sampling_client(server)
    server.script("retrieve_future", Reply(410, json={"detail": "expired"}))
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences
    assert numbers(server.received("asample")) == [0, 1]


def test_a_server_that_loses_every_result_is_given_up(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_REDONE", 3)
    client = sampling_client(server)
    server.script("retrieve_future", Reply(410, json={"detail": "expired"}), times=FOREVER)
    with pytest.raises(tinsmith.RequestExpiredError):
        client.sample(PROMPT, 1, PARAMS).result(10)
    assert numbers(server.received("asample")) == [0, 1, 2, 3]
    assert is_idle(client)


@pytest.mark.parametrize("category", ["server", "unknown", "Server", "something new"])
def test_a_result_that_failed_on_the_server_is_redone_once(server: FakeServer, category: str) -> None:
    client = sampling_client(server)
    server.fail_future("asample", "worker died", category)
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences
    assert numbers(server.received("asample")) == [0, 1]
    server.fail_future("asample", "worker died", category, times=2)
    with pytest.raises(tinsmith.RequestFailedError, match="worker died"):
        client.sample(PROMPT, 1, PARAMS).result(10)
    assert numbers(server.received("asample")) == [0, 1, 2, 3]


@pytest.mark.parametrize("category", ["user", "User"])
def test_a_result_that_failed_by_the_users_fault_is_not_redone(server: FakeServer, category: str) -> None:
    client = sampling_client(server)
    server.fail_future("asample", "token out of range", category)
    with pytest.raises(tinsmith.RequestFailedError, match="token out of range"):
        client.sample(PROMPT, 1, PARAMS).result(10)
    assert numbers(server.received("asample")) == [0]


@pytest.mark.parametrize("fault", [Reply(503, json={}), Drop(), HalfBody(), Reply(429, json={}), Html(504)], ids=repr)
def test_a_poll_that_failed_is_repeated_without_a_new_sample(server: FakeServer, fault: Any) -> None:
    client = sampling_client(server)
    server.script("retrieve_future", fault)
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences
    assert len(server.received("asample")) == 1


def test_a_refused_poll_keeps_its_type(server: FakeServer) -> None:
    client = sampling_client(server)
    server.script("retrieve_future", Reply(403, json={"detail": "not yours"}), times=FOREVER)
    with pytest.raises(tinsmith.PermissionDeniedError, match="not yours"):
        client.sample(PROMPT, 1, PARAMS).result(10)


def test_waiting_ends_when_nothing_finishes_for_too_long(server: FakeServer) -> None:
    server.settings.long_poll = 0.05
    client = sampling_client(server, tinsmith.RetryConfig(progress_timeout=0.3))
    server.hold("asample")
    with pytest.raises(tinsmith.NoProgressError, match="progress_timeout"):
        client.sample(PROMPT, 1, PARAMS).result(10)
    assert len(server.received("asample")) == 1, "repeating what is stuck would not help"
    assert is_idle(client)


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (tinsmith.RetryConfig(progress_timeout=0.1, enable_stuck_detection=False), {}),
        (tinsmith.RetryConfig(progress_timeout=0.1), {"sample_enable_stuck_detection": False}),
    ],
)
def test_the_watch_over_progress_can_be_switched_off(config: Any, flags: dict[str, Any]) -> None:
    with FakeServer(flags=flags, long_poll=0.05) as server:
        client = sampling_client(server, config)
        server.hold("asample")
        future = client.sample(PROMPT, 1, PARAMS)
        server.wait_for("retrieve_future", 4)
        time.sleep(0.2)
        assert not future.done()
        server.release()
        assert future.result(10).sequences


def test_a_poll_that_waits_long_does_not_block_others(server: FakeServer) -> None:
    client = sampling_client(server)
    server.hold("asample")
    held = [client.sample(PROMPT, 1, PARAMS) for _ in range(50)]
    server.wait_for("retrieve_future", 50)
    assert client.get_base_model() == "tiny/model-1"
    server.release()
    for future in held:
        future.result(10)


# Cancelling at awkward moments


def test_cancelling_one_that_rests_frees_its_place_at_once(server: FakeServer) -> None:
    config = tinsmith.RetryConfig(retry_delay_base=60, retry_delay_max=60)
    client = sampling_client(server, config)
    server.script("asample", Reply(503, json={}))
    doomed = client.sample(PROMPT, 1, PARAMS)
    until(lambda: bool(client._queue.resting))
    doomed.cancel()
    with pytest.raises(CancelledError):
        doomed.result(10)
    until(lambda: is_idle(client))
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences


def test_cancelling_one_that_was_turned_away_lets_the_next_one_go(server: FakeServer) -> None:
    client = sampling_client(server)
    server.script("asample", Reply(429, json={}, headers={"retry-after": "0.3"}))
    doomed, next_one = client.sample(PROMPT, 1, PARAMS), client.sample(PROMPT, 1, PARAMS)
    until(lambda: client._connection.account.sample_gate._closed_until > 0)
    doomed.cancel()
    assert next_one.result(10).sequences
    until(lambda: is_idle(client))


def test_cancelling_all_at_any_time_leaves_nothing_behind(server: FakeServer) -> None:
    client = sampling_client(server, tinsmith.RetryConfig(max_connections=20, retry_delay_base=0.01))
    server.script("asample", Reply(503, json={}, delay=0.005), times=100)
    server.hold("asample")
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(200)]
    for index, future in enumerate(futures):
        if index % 20 == 0:
            time.sleep(0.01)
        future.cancel()
    until(lambda: is_idle(client))
    server.clear_script()
    server.release()
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences


# Closing


def expect_closed(futures: list[Any]) -> None:
    for future in futures:
        with pytest.raises(tinsmith.ClientClosedError):
            future.result(5)


def test_closing_ends_queued_and_working_samples(server: FakeServer) -> None:
    service = service_client(server)
    client = service.create_sampling_client(None, "tiny/model-1", tinsmith.RetryConfig(max_connections=2))
    server.hold("asample")
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(10)]
    server.wait_for("retrieve_future", 2)
    service.close("success")
    expect_closed(futures)
    until(lambda: is_idle(client))


@pytest.mark.parametrize("seconds", ["3600", "0.2"])
def test_closing_during_a_backoff_does_not_wait_for_its_end(server: FakeServer, seconds: str) -> None:
    service = service_client(server)
    client = service.create_sampling_client(base_model="tiny/model-1")
    server.script("asample", Reply(429, json={}, headers={"retry-after": seconds}), times=FOREVER)
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    until(lambda: client._connection.account.sample_gate._closed_until > 0)
    service.close("success")
    expect_closed(futures)
    until(lambda: is_idle(client))


def test_closing_ends_resting_samples(server: FakeServer) -> None:
    service = service_client(server)
    config = tinsmith.RetryConfig(retry_delay_base=60, retry_delay_max=60)
    client = service.create_sampling_client(None, "tiny/model-1", config)
    server.script("asample", Reply(503, json={}), times=FOREVER)
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    until(lambda: len(client._queue.resting) == 5)
    service.close("success")
    expect_closed(futures)
    until(lambda: is_idle(client))


def test_closing_ends_a_wait_for_room(server: FakeServer) -> None:
    service, other = service_client(server, max_pending=1), service_client(server, max_pending=1)
    client, bystander = (each.create_sampling_client(base_model="tiny/model-1") for each in (service, other))
    server.hold("asample")
    held = bystander.sample(PROMPT, 1, PARAMS)
    outcome: list[Exception] = []

    def wait_for_room() -> None:
        try:
            client.sample(PROMPT, 1, PARAMS)
        except tinsmith.ClientClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait_for_room)
    thread.start()
    until(lambda: len(client._connection.account.pending._line) == 1)
    service.close("success").result(10)
    thread.join(10)
    assert len(outcome) == 1
    server.release()
    assert held.result(10).sequences
    assert bystander.sample(PROMPT, 1, PARAMS).result(10).sequences


def test_cancelled_samples_in_the_queue_are_not_counted_twice_at_closing(server: FakeServer) -> None:
    service, other = service_client(server), service_client(server)
    client = service.create_sampling_client(None, "tiny/model-1", tinsmith.RetryConfig(max_connections=1))
    server.hold("asample")
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    server.wait_for("retrieve_future")
    for future in futures[2:]:
        future.cancel()
    service.close("success").result(10)
    until(lambda: is_idle(client))
    assert other._connection.account.pending._taken == 0


# Dropping


def test_a_dropped_client_still_finishes_what_was_asked_and_is_then_collected(server: FakeServer) -> None:
    client = sampling_client(server)
    server.hold("asample")
    future = client.sample(PROMPT, 1, PARAMS)
    server.wait_for("retrieve_future")
    reference = weakref.ref(client)
    del client
    gc.collect()
    server.release()
    assert future.result(10).sequences
    until(lambda: gc.collect() >= 0 and reference() is None)


def test_a_dropped_client_whose_samples_were_cancelled_is_collected_during_a_long_backoff(server: FakeServer) -> None:
    client = sampling_client(server)
    server.script("asample", Reply(429, json={}, headers={"retry-after": "3600"}), times=FOREVER)
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(10)]
    gate = client._connection.account.sample_gate
    until(lambda: gate._closed_until > 0)
    for future in futures:
        future.cancel()
    reference = weakref.ref(client)
    del client, futures, future
    until(lambda: gc.collect() >= 0 and reference() is None)


def test_an_abandoned_future_is_completed_in_silence(server: FakeServer) -> None:
    client = sampling_client(server)
    server.fail_future("asample", "nobody will know", "user")
    client.sample(PROMPT, 1, PARAMS)
    until(lambda: len(server.received("retrieve_future")) == 1)
    until(lambda: is_idle(client))


def test_a_closed_client_is_not_retried_whatever_the_user_wants_retried() -> None:
    with FakeServer() as server:
        service = service_client(server)
        retry_everything = tinsmith.RetryConfig(retryable_exceptions=(Exception,))
        client = service.create_sampling_client(base_model="tiny/model-1", retry_config=retry_everything)
        server.hold("asample")
        future = client.sample(PROMPT, 1, PARAMS)
        server.wait_for("retrieve_future", 1)
        service.close("success").result(10)
        with pytest.raises(tinsmith.ClientClosedError):
            future.result(10)
