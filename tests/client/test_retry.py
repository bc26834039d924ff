"""What is tried again, how long the pauses are, and where it ends."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest

from tests.support.training import VirtualClock
from tinsmith.client import retry as retry_module
from tinsmith.client.retry import (
    Action,
    Retry,
    RetryConfig,
    RetryPolicy,
    classify,
    is_user_error,
    parse_retry_after,
    with_retries,
)
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    BillingError,
    ClientClosedError,
    ConfigError,
    InternalServerError,
    InvalidInputError,
    InvalidTypeError,
    RequestFailedError,
    ResponseSummary,
    status_error_class,
)
from tinsmith.types import RequestErrorCategory


def status_error(
    status: int, headers: dict[str, str] | None = None, body: object = "text", retry_after: float | None = None
) -> APIStatusError:
    summary = ResponseSummary(status, headers or {})
    return status_error_class(status)(f"Error code: {status}", summary, body, retry_after=retry_after)


def failed(category: RequestErrorCategory) -> RequestFailedError:
    return RequestFailedError("failed", "id", category)


TABLE: list[tuple[Exception, Action, bool]] = [
    (APIConnectionError(), Action.RETRY, False),
    (APITimeoutError(), Action.RETRY, False),
    (TimeoutError(), Action.RETRY, False),
    (status_error(408), Action.RETRY, False),
    (status_error(500), Action.RETRY, False),
    (status_error(502), Action.RETRY, False),
    (status_error(503), Action.RETRY, False),
    (status_error(529), Action.RETRY, False),
    (status_error(429), Action.RETRY, False),
    (status_error(409), Action.RETRY, False),
    (status_error(402), Action.PAUSE, True),
    (status_error(410), Action.REDO, False),
    (status_error(400, body=None), Action.RETRY, False),
    (status_error(400), Action.FAIL, True),
    (status_error(401), Action.FAIL, True),
    (status_error(403), Action.FAIL, True),
    (status_error(404), Action.FAIL, True),
    (status_error(413), Action.FAIL, True),
    (status_error(422), Action.FAIL, True),
    (failed(RequestErrorCategory.User), Action.FAIL, True),
    (failed(RequestErrorCategory.Server), Action.REDO, False),
    (failed(RequestErrorCategory.Unknown), Action.REDO, False),
    (APIResponseValidationError(ResponseSummary(200, {})), Action.FAIL, False),
    (InvalidInputError("bad"), Action.FAIL, True),
    (InvalidTypeError("bad"), Action.FAIL, True),
    (ConfigError("no key"), Action.FAIL, True),
    (ClientClosedError("closed"), Action.FAIL, False),
    (ZeroDivisionError(), Action.FAIL, False),
]


@pytest.mark.parametrize(("error", "action", "user_error"), TABLE, ids=lambda value: str(getattr(value, "args", value)))
def test_one_table_says_what_is_tried_again_and_whose_fault_it_is(
    error: Exception, action: Action, user_error: bool
) -> None:
    assert classify(error) == (action, user_error)
    assert is_user_error(error) is user_error


@pytest.mark.parametrize("status", [400, 402, 408, 409, 422, 429, 500, 503])
@pytest.mark.parametrize(("value", "action"), [("true", Action.RETRY), ("false", Action.FAIL)])
def test_what_the_server_says_about_retrying_comes_first(status: int, value: str, action: Action) -> None:
    assert classify(status_error(status, {"x-should-retry": value})).action is action


def test_what_is_not_recognised_by_the_server_is_not_repeated_after_a_conflict_or_a_failure() -> None:
    assert classify(status_error(409), idempotent=False).action is Action.FAIL
    assert classify(failed(RequestErrorCategory.Server), idempotent=False).action is Action.FAIL


def test_the_cause_of_an_error_decides_about_its_fault_and_circles_end() -> None:
    error, other = RuntimeError("wrapped"), RuntimeError("other")
    error.__cause__ = status_error(422)
    assert is_user_error(error)
    error.__cause__, other.__cause__ = other, error
    assert not is_user_error(error)


# --- Retry-After -----------------------------------------------------------------------------------------------------

NOW = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "4"}, 4.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after": " 7 "}, 7.0),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "86400"}, 86400.0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "1e999"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after-ms": "nonsense", "retry-after": "9"}, 9.0),
        ({"retry-after-ms": "-1"}, 0.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:47 GMT"}, 10.0),
        ({"retry-after": "Sunday, 06-Nov-94 08:49:47 GMT"}, 10.0),
        ({"retry-after": "Sun Nov  6 08:49:47 1994"}, 10.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:07 GMT"}, 0.0),
        ({"retry-after": "Sun, 06 Nov 99999999 08:49:47 GMT"}, None),
        ({"retry-after": "Mon, 07 Nov 1994 01:00:10 GMT", "date": "Mon, 07 Nov 1994 01:00:00 GMT"}, 10.0),
        ({"retry-after": "Mon, 07 Nov 1994 01:00:10 GMT", "date": "no date"}, 58233.0),
    ],
)
def test_every_form_of_retry_after_is_understood(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after(headers, lambda: NOW) == seconds


# --- the budget ------------------------------------------------------------------------------------------------------


class Calls:
    """Fails in the given ways and then succeeds, and keeps what the observer was told."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.numbers: list[int] = []
        self.told: list[tuple[int, str, float | None]] = []

    async def attempt(self, number: int) -> str:
        self.numbers.append(number)
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    def observe(self, number: int, elapsed: float, outcome: str | Exception, pause: float | None) -> None:
        assert elapsed >= 0
        self.told.append((number, outcome if isinstance(outcome, str) else type(outcome).__name__, pause))


def perform(calls: Calls, policy: RetryPolicy, **options: Any) -> tuple[str, VirtualClock]:
    clock = VirtualClock()
    result = asyncio.run(with_retries(calls.attempt, Retry(policy, clock=clock, **options), calls.observe))
    return result, clock


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_module.chance, "random", lambda: 0.0)


@pytest.mark.usefixtures("no_jitter")
def test_pauses_double_up_to_their_limit_and_every_try_is_told_with_its_pause() -> None:
    calls = Calls(*[status_error(503) for _ in range(6)])
    result, clock = perform(calls, RetryPolicy(max_seconds=300))
    assert result == "done"
    assert clock.slept == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert calls.numbers == [1, 2, 3, 4, 5, 6, 7]
    failures = [(number, "InternalServerError", pause) for number, pause in enumerate(clock.slept, 1)]
    assert calls.told == [*failures, (7, "done", None)]


def test_jitter_takes_away_a_quarter_at_most() -> None:
    policy = RetryPolicy(max_seconds=300)
    delays = [policy.delay(3) for _ in range(1000)]
    assert min(delays) >= 3.0
    assert max(delays) <= 4.0
    assert len(set(delays)) > 900
    assert policy.delay(10_000) <= 10.0


def test_a_dead_server_ends_in_its_error_when_the_time_is_up() -> None:
    calls = Calls(*[APIConnectionError() for _ in range(1000)])
    clock, policy = VirtualClock(), RetryPolicy(max_seconds=60, max_attempts=1000)
    with pytest.raises(APIConnectionError):
        asyncio.run(with_retries(calls.attempt, Retry(policy, clock=clock), calls.observe))
    assert 45 <= clock.time - 1000.0 <= 60
    assert calls.told[-1][2] is None


def test_tries_are_bounded_too() -> None:
    calls = Calls(*[status_error(500) for _ in range(1000)])
    with pytest.raises(InternalServerError):
        perform(calls, RetryPolicy(max_seconds=math.inf, max_attempts=5))
    assert calls.numbers == [1, 2, 3, 4, 5]


def test_retry_after_decides_the_pause() -> None:
    _, clock = perform(
        Calls(status_error(429, retry_after=4.0), status_error(503, retry_after=0.2)), RetryPolicy(max_seconds=300)
    )
    assert clock.slept == [4.0, 0.2]


@pytest.mark.usefixtures("no_jitter")
def test_a_server_that_always_asks_for_no_wait_is_not_stormed() -> None:
    _, clock = perform(Calls(*[status_error(429, retry_after=0.0) for _ in range(4)]), RetryPolicy(max_seconds=300))
    assert clock.slept == [0.5, 1.0, 2.0, 4.0]


def test_a_retry_after_beyond_the_time_limit_ends_at_once_and_is_told_to_the_user() -> None:
    calls = Calls(status_error(429, retry_after=86400.0))
    with pytest.raises(APIStatusError) as caught:
        perform(calls, RetryPolicy(max_seconds=300))
    assert caught.value.retry_after == 86400.0
    assert calls.numbers == [1]


def test_an_empty_400_is_repeated_three_times() -> None:
    calls = Calls(*[status_error(400, body=None) for _ in range(9)])
    with pytest.raises(APIStatusError):
        perform(calls, RetryPolicy(max_seconds=300))
    assert calls.numbers == [1, 2, 3, 4]


def test_empty_400s_far_apart_do_not_add_up() -> None:
    retry = Retry(RetryPolicy(max_seconds=300))
    for _ in range(10):
        retry.pause_after(status_error(400, body=None))
        retry.progressed()


def test_a_billing_pause_is_bounded_and_does_not_eat_the_time_for_retries() -> None:
    policy = RetryPolicy(max_seconds=10, billing_pause_limit=60)
    result, clock = perform(Calls(*[status_error(402) for _ in range(5)], status_error(503)), policy)
    assert result == "done"
    assert clock.slept[:5] == [5.0] * 5
    with pytest.raises(BillingError):
        perform(Calls(*[status_error(402) for _ in range(100)]), policy)


def test_without_a_billing_window_402_fails_at_once() -> None:
    calls = Calls(status_error(402))
    with pytest.raises(BillingError):
        perform(calls, RetryPolicy(max_seconds=10, billing_pause_limit=0))
    assert calls.numbers == [1]


def test_final_errors_are_not_repeated_and_extra_ones_are_if_asked() -> None:
    for error in (status_error(422), status_error(410), ZeroDivisionError()):
        calls = Calls(error)
        with pytest.raises(type(error)):
            perform(calls, RetryPolicy(max_seconds=300))
        assert calls.numbers == [1]
    result, _ = perform(
        Calls(ZeroDivisionError()), RetryPolicy(max_seconds=300, retryable_exceptions=(ZeroDivisionError,))
    )
    assert result == "done"


def test_a_conflict_is_repeated_only_where_the_server_recognises_the_repetition() -> None:
    assert perform(Calls(status_error(409)), RetryPolicy(max_seconds=300))[0] == "done"
    with pytest.raises(APIStatusError):
        perform(Calls(status_error(409)), RetryPolicy(max_seconds=300), idempotent=False)


def test_progress_starts_the_limits_anew() -> None:
    clock = VirtualClock()
    retry = Retry(RetryPolicy(max_seconds=10, max_attempts=3), clock=clock)
    for _ in range(5):
        retry.pause_after(status_error(503))
        clock.time += 9
        retry.progressed()
    clock.time += 9
    retry.others_progressed(clock.now())
    assert retry.pause_after(status_error(503)) < 1


@pytest.mark.parametrize(
    ("error", "in_doubt"),
    [
        (APIConnectionError(), True),
        (APITimeoutError(), True),
        (status_error(503), True),
        (status_error(429), False),
        (status_error(402), False),
    ],
)
def test_it_remembers_whether_a_failed_try_may_have_arrived(error: Exception, in_doubt: bool) -> None:
    retry = Retry(RetryPolicy(max_seconds=300))
    retry.pause_after(error)
    retry.pause_after(status_error(429))
    assert retry.in_doubt is in_doubt


# --- the public record -----------------------------------------------------------------------------------------------


def test_the_defaults_of_retry_config_are_those_of_the_official_package() -> None:
    import tinker.lib.retry_handler as official

    theirs = official.RetryConfig()
    for name in ("max_connections", "progress_timeout", "retry_delay_base", "retry_delay_max", "jitter_factor"):
        assert getattr(RetryConfig(), name) == getattr(theirs, name)
    assert hash(RetryConfig()) == hash(RetryConfig())


@pytest.mark.parametrize("value", [0, -1])
def test_retry_config_refuses_a_limit_that_lets_nothing_through(value: int) -> None:
    with pytest.raises(ValueError, match="max_connections"):
        RetryConfig(max_connections=value)


def test_retry_config_becomes_the_policy() -> None:
    config = RetryConfig(retry_delay_base=2.0, retry_delay_max=3.0, jitter_factor=0.0, progress_timeout=70)
    policy = config.policy()
    assert [policy.delay(retries) for retries in range(3)] == [2.0, 3.0, 3.0]
    assert policy.max_seconds == 70
    assert RetryConfig(enable_stuck_detection=False).policy().max_seconds == math.inf


def test_pauses_leave_the_users_own_random_numbers_alone() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    RetryPolicy(max_seconds=1.0).delay(3)
    assert random.random() == expected
