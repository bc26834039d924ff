"""The one place that decides what is tried again, how long to wait, and whose fault an error is.

==============================  =======================  ==========
What happened                   What we do               User error
==============================  =======================  ==========
header `x-should-retry`         as it says               by status
no answer, timeout              try again                no
408, 5xx                        try again                no
429                             try again, Retry-After   no
409                             try again if idempotent  no
402                             pause, bounded           yes
410 on a future                 redo the request         no
400 with an empty body          try again, 3 times       no
other 4xx                       fail                     yes
failed future, category user    fail                     yes
failed future, other category   redo once if idempotent  no
malformed answer                fail                     no
refused before it was sent      fail                     yes
==============================  =======================  ==========

An empty 400 comes from a proxy in front of the server, not from the server. Tries and time are bounded by a
`RetryPolicy`; every try is told to the hooks as one `Attempt` record by the caller that made it. Retry-After decides
the pause where the server sends it; one that reaches beyond the time limit ends the tries at once.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    ClientClosedError,
    ConfigError,
    InvalidInputError,
    RequestExpiredError,
    RequestFailedError,
)

T = TypeVar("T")

chance = random.Random()
"""Our own dice: throwing the shared ones would change what a user's seed gives."""

MAX_EMPTY_400 = 3
BILLING_PAUSE_SECONDS = 5.0


class Clock:
    """Time as the retries see it. Tests put another one in its place, so that nobody waits."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


SYSTEM_CLOCK = Clock()


class Action(enum.Enum):
    RETRY = "try again after a pause"
    PAUSE = "wait for billing"
    REDO = "start over with the original request"
    FAIL = "raise"


class Verdict(NamedTuple):
    action: Action
    is_user_error: bool


def classify(error: BaseException, *, idempotent: bool = True) -> Verdict:
    """The table above. `idempotent` says that the server recognises a repeated request."""
    if isinstance(error, APIStatusError):
        return _classify_status(error, idempotent)
    if isinstance(error, RequestFailedError):
        if error.category.value == "user":
            return Verdict(Action.FAIL, True)
        return Verdict(Action.REDO if idempotent else Action.FAIL, False)
    if isinstance(error, APIResponseValidationError):
        return Verdict(Action.FAIL, False)
    if isinstance(error, APIConnectionError | TimeoutError):
        return Verdict(Action.RETRY, False)
    refused_here = isinstance(error, InvalidInputError | ConfigError)
    return Verdict(Action.FAIL, refused_here or _cause_is_user_error(error))


def is_user_error(error: BaseException) -> bool:
    """Whether the user's request was at fault, rather than the server or the network."""
    return classify(error).is_user_error


def may_have_arrived(error: BaseException) -> bool:
    """Whether the server may have accepted the request although this is all that came back."""
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409) or error.status_code >= 500
    if isinstance(error, APIConnectionError):
        return not isinstance(error.__cause__, ConnectionError)  # that one says that there never was a connection
    return isinstance(error, APIResponseValidationError)


def _classify_status(error: APIStatusError, idempotent: bool) -> Verdict:
    status = error.status_code
    is_user_error = 400 <= status < 500 and status not in (408, 409, 410, 429) and not is_empty_400(error)
    should_retry = error.response.headers.get("x-should-retry")
    if should_retry in ("true", "false"):
        return Verdict(Action.RETRY if should_retry == "true" else Action.FAIL, is_user_error)
    if status == 402:
        action = Action.PAUSE
    elif isinstance(error, RequestExpiredError):
        action = Action.REDO
    elif status in (408, 429) or status >= 500 or is_empty_400(error) or (status == 409 and idempotent):
        action = Action.RETRY
    else:
        action = Action.FAIL
    return Verdict(action, is_user_error)


def is_empty_400(error: APIStatusError) -> bool:
    return error.status_code == 400 and not error.body


def _cause_is_user_error(error: BaseException) -> bool:
    seen = {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, APIStatusError | RequestFailedError):
            return classify(cause).is_user_error
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


class RetryPolicy(NamedTuple):
    """How often and how long. The time limit counts from the last sign of progress."""

    max_seconds: float
    max_attempts: int = 100
    base_delay: float = 0.5
    max_delay: float = 10.0
    jitter: float = 0.25
    billing_pause_limit: float = 3600.0
    retryable_exceptions: tuple[type[BaseException], ...] = ()
    """Retried besides what the table says."""

    def delay(self, retries: int) -> float:
        """Doubles from `base_delay` to `max_delay`, minus up to `jitter` of it at random."""
        whole = min(self.base_delay * 2.0 ** min(retries, 60), self.max_delay)
        return whole * (1.0 - self.jitter * chance.random())


class RetryConfig(msgspec.Struct, frozen=True):
    """How sampling is retried; pass it where a sampling client is created."""

    max_connections: int | None = 1000
    """Unfinished samples per sampling client. A lower limit of the server wins, and that is logged."""
    progress_timeout: float = 7200.0
    """Seconds without any sample finishing after which waiting ones fail with `NoProgressError`."""
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[BaseException], ...] = (TimeoutError, APIConnectionError, RequestExpiredError)

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections <= 0:
            raise InvalidInputError(
                f"max_connections is {self.max_connections}; it must be greater than 0, or None for no limit.",
                field="max_connections",
                value=self.max_connections,
            )

    def policy(self, billing_pause_limit: float = 3600.0) -> RetryPolicy:
        return RetryPolicy(
            max_seconds=self.progress_timeout if self.enable_stuck_detection else math.inf,
            max_attempts=1_000_000,
            base_delay=self.retry_delay_base,
            max_delay=self.retry_delay_max,
            jitter=self.jitter_factor,
            billing_pause_limit=billing_pause_limit,
            retryable_exceptions=self.retryable_exceptions,
        )


class Retry:
    """The state of one call being tried again. `pause_after(error)` gives the wait, or raises the error."""

    def __init__(self, policy: RetryPolicy, *, idempotent: bool = True, clock: Clock = SYSTEM_CLOCK) -> None:
        self.policy = policy
        self.clock = clock
        self.in_doubt = False
        """Whether the server may have accepted one of the tries that failed."""
        self.is_final: Callable[[APIStatusError], bool] = lambda error: False
        """Which answers end the tries although the table says otherwise."""
        self._idempotent = idempotent
        self._failures = 0
        self._empty_400s = 0
        self._started = clock.now()
        self._billing_started: float | None = None

    def progressed(self) -> None:
        """The server answered properly: the limits start anew."""
        self._started = self.clock.now()
        self._failures = self._empty_400s = 0
        self._billing_started = None

    def others_progressed(self, when: float) -> None:
        """Something else finished at that time, so the server is alive: the time limit counts from there."""
        self._started = max(self._started, when)

    def pause_after(self, error: Exception, default: float | None = None) -> float:
        """Seconds to wait before the next try; raises the error when there should be none.

        What the server asks for decides, then the default, then the policy.
        """
        self.in_doubt = self.in_doubt or may_have_arrived(error)
        action = self._action(error)
        if action is Action.PAUSE:
            return self._billing_pause(error)
        if action is not Action.RETRY or self._is_exhausted(error):
            raise error
        self._failures += 1
        # A server that asks for no wait at all, every time, would be asked without end.
        wait = getattr(error, "retry_after", None) or default or self.policy.delay(self._failures - 1)
        if self.clock.now() + wait > self._started + self.policy.max_seconds:
            raise error
        return float(wait)

    def _action(self, error: Exception) -> Action:
        if isinstance(error, APIStatusError) and self.is_final(error):
            return Action.FAIL
        action = classify(error, idempotent=self._idempotent).action
        is_ours = isinstance(error, ClientClosedError | InvalidInputError | ConfigError)  # the same every time
        if action is Action.FAIL and not is_ours and isinstance(error, self.policy.retryable_exceptions):
            return Action.RETRY
        return action

    def _is_exhausted(self, error: Exception) -> bool:
        if isinstance(error, APIStatusError) and is_empty_400(error):
            self._empty_400s += 1
            if self._empty_400s > MAX_EMPTY_400:
                return True
        return self._failures + 1 >= self.policy.max_attempts

    def _billing_pause(self, error: Exception) -> float:
        now = self.clock.now()
        if self._billing_started is None:
            self._billing_started = now
        if now - self._billing_started >= self.policy.billing_pause_limit:
            raise error
        self._started = now  # the limit on retries is for a server that fails, and this one does not
        return BILLING_PAUSE_SECONDS


Observer = Callable[[int, float, "T | Exception", float | None], None]
"""Told about every try: its number, its seconds, what came of it, and the pause before the next one if there is one."""


async def with_retries(attempt: Callable[[int], Awaitable[T]], retry: Retry, observe: Observer[T]) -> T:
    """Calls `attempt(number)` until it succeeds or its error is final."""
    for number in itertools.count(1):
        started = time.perf_counter()
        try:
            result = await attempt(number)
        except Exception as error:  # noqa: BLE001 - the policy decides what becomes of it
            elapsed = time.perf_counter() - started
            try:
                pause = retry.pause_after(error)
            except Exception:
                observe(number, elapsed, error, None)
                raise
            observe(number, elapsed, error, pause)
        else:
            observe(number, time.perf_counter() - started, result, None)
            return result
        await retry.clock.sleep(pause)
    raise AssertionError("a count has no end")


def parse_retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Seconds to wait, from `retry-after-ms` or `retry-after` (seconds, or a date in any of the three HTTP forms).

    A date is measured against the answer's own `date` header, so a client with a wrong clock waits correctly.
    What cannot be understood counts as absent; what lies in the past means no wait.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return max(0.0, milliseconds / 1000)
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None:
        return max(0.0, seconds)
    due = _http_date(value)
    if due is None:
        return None
    sent = _http_date(headers.get("date"))
    return max(0.0, due - (sent if sent is not None else now()))


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _http_date(text: str | None) -> float | None:
    if not text:
        return None
    from email.utils import mktime_tz, parsedate_tz  # costs 10 ms to import, and dates are rare

    try:
        parsed = parsedate_tz(text)
        return float(mktime_tz(parsed)) if parsed else None
    except (ValueError, OverflowError):
        return None
