"""Local hooks: what the SDK tells the user's own code while it works.

A hook is a plain function of one record. It runs where the record arises, as a rule on the SDK's loop thread with
the context variables of the call, so it must return at once: one that waits stops every other call. Hooks are given
in `Config.hooks`. They have nothing to do with what is reported to the server; that is `client/telemetry.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from tinsmith.errors import InvalidTypeError

logger = logging.getLogger(__name__)

TRAINING = "Training"
MODEL_CREATION = "Model creation"


class Attempt(NamedTuple):
    """One HTTP request was answered, or failed."""

    method: str
    path: str
    """Without host and query."""
    number: int
    """1 for the first try of a call."""
    status: int | None
    """None when no answer came."""
    error: str | None
    """The name of the error's class; None for a good answer."""
    elapsed_seconds: float
    retry_in_seconds: float | None = None
    """None when there will be no further try."""
    request_id: str | None = None


class QueueStateChange(NamedTuple):
    """The server says how it stands with work it has accepted."""

    state: str
    """`active`, `paused_rate_limit`, `paused_capacity` or `unknown`."""
    reason: str | None
    """In the server's words, if it gave any."""
    subject: str
    """`TRAINING`, `MODEL_CREATION`, or the id of a sampler."""
    request_id: str | None = None


class Backoff(NamedTuple):
    """New requests are held back because the server asked for it."""

    scope: str
    """What is held back, such as `sampling`."""
    seconds: float
    status: int | None
    """The answer that caused it."""


class BillingPause(NamedTuple):
    """The account cannot pay at the moment; the call waits and asks again."""

    scope: str
    seconds: float


Record: TypeAlias = Attempt | QueueStateChange | Backoff | BillingPause
Hook: TypeAlias = Callable[[Record], None]


class Hooks:
    """The hooks of one client. A failing hook is reported in the log once and never harms the call."""

    __slots__ = ("_blamed", "hooks")

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.hooks = tuple(hooks)
        self._blamed: set[int] = set()
        for hook in self.hooks:
            _check(hook)

    def emit(self, record: Record) -> None:
        for hook in self.hooks:
            try:
                hook(record)
            # CancelledError too: it would cancel the call that merely told about itself.
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                self._blame(hook, record, error)

    def _blame(self, hook: Hook, record: Record, error: BaseException) -> None:
        if id(hook) in self._blamed:
            return
        self._blamed.add(id(hook))
        logger.warning(
            "Hook %r failed on a %s record; further failures of this hook are not shown.",
            hook,
            type(record).__name__,
            exc_info=error,
        )


def _check(hook: object) -> None:
    if not callable(hook):
        raise InvalidTypeError(f"A hook must be a function of one record, not {hook!r}.", field="hooks", value=hook)
    if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(type(hook).__call__):
        raise InvalidTypeError(
            f"Hook {hook!r} is a coroutine function, and nothing would await it; pass a plain function "
            "(it may hand the record to your loop with call_soon_threadsafe).",
            field="hooks",
            value=hook,
        )


class QueueStateLogger:
    """Hook: tells in the log that work is held up; at most one line a minute per subject, none while nothing changes.

    Every pending poll may bring a record, thousands of them for one sampler, some active and some not.
    """

    interval_seconds = 60.0
    max_subjects = 1000

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._announced: dict[str, tuple[str, float]] = {}
        """The state last heard or told, and the time of the last line, by subject; the stalest subject first."""

    def __call__(self, record: Record) -> None:
        if not isinstance(record, QueueStateChange):
            return
        state, told_at = self._announced.get(record.subject, ("active", -self.interval_seconds))
        if record.state == state:
            return
        now = self._clock()
        if record.state == "active":
            self._remember(record, told_at)
        elif now - told_at >= self.interval_seconds:
            self._remember(record, now)
            logger.warning("%s is %s.", _work(record.subject), _why(record))

    def _remember(self, record: QueueStateChange, told_at: float) -> None:
        self._announced.pop(record.subject, None)
        self._announced[record.subject] = (record.state, told_at)
        if len(self._announced) > self.max_subjects:
            del self._announced[next(iter(self._announced))]


def _work(subject: str) -> str:
    return subject if subject in (TRAINING, MODEL_CREATION) else f"Sampling with {subject}"


def _why(record: QueueStateChange) -> str:
    if record.reason:
        return f"paused by the server: {record.reason}"
    if record.state == "paused_capacity":
        return "paused: the server is short of capacity"
    if record.state == "paused_rate_limit":
        limit = "training clients" if record.subject in (TRAINING, MODEL_CREATION) else "sampler weights"
        return f"paused: the limit on concurrent {limit} is reached"
    return "waiting at the server, which gave no reason"


class ProgressLogger:
    """Hook: an INFO line with counts of answers, retries and failures, at most one per `interval_seconds`.

    Off unless it is put into `Config.hooks`.
    """

    def __init__(self, interval_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._told_at = clock()
        self._counts: Counter[str] = Counter()
        self._retried: Counter[str] = Counter()

    def __call__(self, record: Record) -> None:
        if not isinstance(record, Attempt):
            return
        if record.error is None:
            self._counts["answered"] += 1
        elif record.retry_in_seconds is None:
            self._counts["failed"] += 1
        else:
            self._retried[record.error] += 1
        now = self._clock()
        if now - self._told_at >= self._interval_seconds:
            self._told_at = now
            self._tell()

    def _tell(self) -> None:
        errors = ", ".join(f"{name} {count}" for name, count in self._retried.most_common())
        logger.info(
            "Requests so far: %d answered, %d retried%s, %d failed.",
            self._counts["answered"],
            self._retried.total(),
            f" ({errors})" if errors else "",
            self._counts["failed"],
        )
