"""Remote reporting: what the SDK tells the server about its own errors.

Calls put events into a bounded queue and go on; one background task sends them in batches. The service being slow or
away costs events, never a call. An event says what failed and where. It holds no header, no request, no prompt and no
token: the text of an error is taken over only where the server or the network wrote it, and through
`redaction.py`. Local hooks are another feature with another switch; see `client/hooks.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import platform
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, NamedTuple, ParamSpec
from uuid import uuid4

import msgspec

from tinsmith.client.hooks import Attempt, Backoff, BillingPause, Hook, QueueStateChange, Record
from tinsmith.client.redaction import WITHHELD, causes_of, fit_to_send, places_of, server_text
from tinsmith.errors import APIStatusError, RequestFailedError
from tinsmith.types.telemetry import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    Severity,
    TelemetryEvent,
    TelemetrySendRequest,
    UnhandledExceptionEvent,
)

logger = logging.getLogger(__name__)

MAX_QUEUED = 10_000
MAX_BATCH = 100
FLUSH_SECONDS = 10.0
SEND_SECONDS = 10.0
"""A guard behind the sender's own, shorter timeout."""
MAX_TRIES = 5
FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0
CLOSE_SECONDS = 2.0

FOLD_SECONDS = 60.0
SHOWN_PER_FOLD = 8
"""Of one kind in any minute. With the minute's summary and the one at close that makes ten at most."""
MAX_KINDS = 256

P = ParamSpec("P")

# --- folding ---------------------------------------------------------------------------------------------------------


class _Folded(NamedTuple):
    kind: str
    severity: Severity
    num_events: int


class _Kind:
    __slots__ = ("folded", "folded_since", "severity", "shown_at")

    def __init__(self, severity: Severity) -> None:
        self.severity = severity
        self.shown_at: deque[float] = deque(maxlen=SHOWN_PER_FOLD)
        self.folded = 0
        self.folded_since = 0.0


class _Folding:
    """Lets a few events of a kind through in any minute and counts the rest. Not thread-safe by itself."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}

    def admits(self, name: str, severity: Severity, now: float) -> bool:
        if name not in self._kinds and len(self._kinds) >= MAX_KINDS:
            name = "other"
        kind = self._kinds.setdefault(name, _Kind(severity))
        if len(kind.shown_at) < SHOWN_PER_FOLD or now - kind.shown_at[0] >= FOLD_SECONDS:
            kind.shown_at.append(now)
            return True
        if not kind.folded:
            kind.folded_since = now
        kind.folded += 1
        return False

    def summaries(self, now: float, *, at_once: bool = False) -> list[_Folded]:
        """The counts that are due, each given once; kinds that have gone quiet are forgotten."""
        due = []
        for name, kind in list(self._kinds.items()):
            if kind.folded and (at_once or now - kind.folded_since >= FOLD_SECONDS):
                due.append(_Folded(name, kind.severity, kind.folded))
                kind.folded = 0
            elif not kind.folded and now - kind.shown_at[-1] >= FOLD_SECONDS:
                del self._kinds[name]
        return due


_KIND_FIELDS = ("error_type", "exception_type", "status_code", "state")


def _kind(name: str, data: Mapping[str, object]) -> str:
    return ":".join([name, *(str(data[field]) for field in _KIND_FIELDS if data.get(field) is not None)])


# --- the reporter ----------------------------------------------------------------------------------------------------

_process_uuid = str(uuid4())


def _renew_process_uuid() -> None:
    global _process_uuid
    _process_uuid = str(uuid4())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_process_uuid)


def _never_raises(
    method: Callable[Concatenate[TelemetryReporter, P], None],
) -> Callable[Concatenate[TelemetryReporter, P], None]:
    @functools.wraps(method)
    def guarded(self: TelemetryReporter, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - reporting an error must not become one
            logger.debug("A telemetry event was lost to %s.", type(error).__name__)

    return guarded


def _utc_now() -> datetime:
    return datetime.now(UTC)


class TelemetryReporter:
    """Gathers the events of one session and sends them in the background.

    `start` and `close` belong on the SDK's loop; `record_...` may be called from any thread, never waits and never
    raises. `send` posts one body and raises unless the server accepted it; it must bring its own timeout and must not
    refer to the session, which owns this object. The background task refers to the reporter only while it sends, so
    that a session dropped without `close` is collected and its task ends at the next tick.
    """

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        *,
        session_id: str | None,
        sdk_version: str,
        is_user_error: Callable[[BaseException], bool],
        secrets: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self.session_id = f"sessionless-{uuid4()}" if session_id is None else session_id
        self.dropped = 0
        """Events lost so far: the queue was full, or the service did not take them."""
        self._send = send
        self._has_session = session_id is not None
        self._sdk_version = sdk_version
        self._is_user_error = is_user_error
        self._secrets = secrets
        self._clock = clock
        self._now = now
        self._started_at = clock()
        self._pid = os.getpid()
        # Reentrant: a signal handler or a finalizer may report while this very thread is reporting.
        self._lock = threading.RLock()
        self._queue: deque[TelemetryEvent] = deque()
        self._folding = _Folding()
        self._num_events = 0
        self._dropped_told = 0
        self._closed = False
        self._unsent: list[TelemetryEvent] = []
        self._tries = 0
        self._failures = 0
        self._sending = asyncio.Lock()
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        if self._has_session:
            self._add(SessionStartEvent, "INFO")

    def start(self) -> None:
        """Begins to send. Call it on the SDK's loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(_keep_sending(weakref.ref(self), self._wake), name="tinsmith-telemetry")

    async def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Reports the end of the session and sends what waits; whatever takes longer than `timeout` is abandoned."""
        if self._closed:
            return
        with self._lock:
            self._add_summaries(at_once=True)
            if self._has_session:
                duration = timedelta(seconds=self._clock() - self._started_at)
                self._add(SessionEndEvent, "INFO", duration=str(duration))
            self._closed = True
        last = asyncio.ensure_future(self._flush())
        tasks = {last} if self._task is None else {last, self._task}
        try:
            await asyncio.wait({last}, timeout=timeout)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.wait(tasks, timeout=0.1)
        self.dropped += len(self._queue) + len(self._unsent)

    @_never_raises
    def record_event(self, name: str, data: Mapping[str, object] | None = None, severity: Severity = "INFO") -> None:
        """A named event. Values that are neither text, number nor truth value are left out: they may be payload."""
        data = data or {}
        if self._admits(_kind(name, data), severity):
            sendable = {key: self._sendable(value) for key, value in data.items() if _is_plain(value)}
            self._add(GenericEvent, severity, event_name=name, event_data=sendable)

    @_never_raises
    def record_exception(self, error: BaseException, severity: Severity = "ERROR") -> None:
        """An error that reached the user. One that the user's request caused becomes a `user_error` event."""
        if self._is_user_error(error):
            self.record_event("user_error", _user_error_data(error), "WARNING")
        elif self._admits(f"UNHANDLED_EXCEPTION:{type(error).__name__}", severity):
            self._add(
                UnhandledExceptionEvent,
                severity,
                error_type=type(error).__name__,
                error_message=self._sendable(server_text(error) or WITHHELD),
                traceback=self._sendable(places_of(error)),
            )
        self._wake_up()

    @contextlib.contextmanager
    def capture_exceptions(self, severity: Severity = "ERROR") -> Iterator[None]:
        """Records what the block raises, and lets it pass."""
        try:
            yield
        except Exception as error:
            self.record_exception(error, severity)
            raise

    def _sendable(self, value: Any) -> Any:
        return fit_to_send(value, tuple(self._secrets)) if isinstance(value, str) else value

    def _admits(self, kind: str, severity: Severity) -> bool:
        """Asked before an event is put together, so that in a storm of failures the folded ones cost little."""
        if os.getpid() != self._pid:  # in a forked child nothing sends, and the lock may be held for ever
            return False
        with self._lock:
            return not self._closed and self._folding.admits(kind, severity, self._clock())

    def _add(self, make: Callable[..., TelemetryEvent], severity: Severity, **fields: Any) -> None:
        with self._lock:
            if len(self._queue) >= MAX_QUEUED:
                self.dropped += 1
                return
            index, self._num_events = self._num_events, self._num_events + 1
            event = make(
                event_id=str(uuid4()), event_session_index=index, severity=severity, timestamp=self._now(), **fields
            )
            self._queue.append(event)

    def _add_summaries(self, *, at_once: bool = False) -> None:
        for kind, severity, count in self._folding.summaries(self._clock(), at_once=at_once):
            self._add(GenericEvent, severity, event_name="folded", event_data={"kind": kind, "count": count})
        # Told only to a service that takes batches again; a report that is lost itself would call for the next one.
        if self.dropped > self._dropped_told and not self._failures:
            self._dropped_told = self.dropped
            self._add(GenericEvent, "WARNING", event_name="dropped", event_data={"total": self.dropped})

    def _wake_up(self) -> None:
        if self._loop is not None and os.getpid() == self._pid:
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _flush(self) -> float:
        """Sends until nothing waits or a batch fails; gives the seconds to hold off, 0 if all went well."""
        async with self._sending:
            while batch := self._next_batch():
                if not await self._deliver(batch):
                    return self._hold_off()
                self._unsent, self._tries, self._failures = [], 0, 0
        return 0.0

    def _next_batch(self) -> list[TelemetryEvent]:
        """The batch that failed last, or else the oldest events."""
        if not self._unsent:
            with self._lock:
                if not self._closed and len(self._queue) < MAX_BATCH:
                    self._add_summaries()
                self._unsent = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
        return self._unsent

    def _encode(self, events: list[TelemetryEvent]) -> bytes:
        request = TelemetrySendRequest(
            events=events,
            platform=platform.system(),
            sdk_version=self._sdk_version,
            session_id=self.session_id,
            process_uuid=_process_uuid,
        ).to_builtins()
        request["events"] = [_in_wire_order(event) for event in request["events"]]
        return msgspec.json.encode(request)

    async def _deliver(self, batch: list[TelemetryEvent]) -> bool:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(self._encode(batch))
        except Exception as error:  # noqa: BLE001 - whatever it is, it must stay here
            if not self._failures:
                logger.debug("Telemetry cannot be sent now: %s.", type(error).__name__)
            return False
        return True

    def _hold_off(self) -> float:
        """Counts a failure. The pause goes on growing over batches that are given up: the service is still away."""
        self._tries += 1
        self._failures += 1
        if self._tries >= MAX_TRIES:
            with self._lock:
                self.dropped += len(self._unsent)
            self._unsent, self._tries = [], 0
        return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures - 1, 60), MAX_BACKOFF_SECONDS)


async def _keep_sending(reference: weakref.ref[TelemetryReporter], wake: asyncio.Event) -> None:
    hold_off = 0.0
    while True:
        if hold_off:
            await asyncio.sleep(hold_off)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await wake.wait()
        wake.clear()
        reporter = reference()
        if reporter is None:
            return
        hold_off = await reporter._flush()
        del reporter


def _in_wire_order(event: dict[str, object]) -> dict[str, object]:
    """The order of the official client, so that a batch can be compared with a recorded one byte for byte."""
    return {name: event[name] for name in sorted(event, key=lambda name: (name == "event_data", name))}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63)


def _user_error_data(error: BaseException) -> dict[str, object]:
    data: dict[str, object] = {"error_type": type(error).__name__}
    origin = next((link for link in causes_of(error) if isinstance(link, APIStatusError | RequestFailedError)), error)
    if message := server_text(origin):
        data["message"] = message
    if isinstance(origin, APIStatusError):
        data["status_code"] = origin.status_code
    return data


# --- the bridge from local records -----------------------------------------------------------------------------------

_POLLS = ("/retrieve_future", "/retrieve_futures")


def telemetry_hook(reporter: TelemetryReporter) -> Hook:
    """A hook that reports failed attempts, queue states and pauses. It does not keep the reporter alive."""
    reference = weakref.ref(reporter)

    def report(record: Record) -> None:
        event = _event_of(record)
        reporter = reference()
        if event is not None and reporter is not None:
            reporter.record_event(*event)

    return report


def _event_of(record: Record) -> tuple[str, dict[str, object], Severity] | None:
    match record:
        case Attempt():
            return _failed_attempt(record)
        case QueueStateChange():
            data: dict[str, object] = {
                "state": record.state,
                "subject": record.subject,
                "request_id": record.request_id,
            }
            return "queue_state_change", data, "INFO"
        case Backoff():
            return "backoff", record._asdict(), "WARNING"
        case BillingPause():
            return "billing_pause", record._asdict(), "WARNING"


def _failed_attempt(attempt: Attempt) -> tuple[str, dict[str, object], Severity] | None:
    if attempt.error is None or attempt.path.endswith("/telemetry"):  # a report about a report would feed itself
        return None
    is_poll = attempt.path.endswith(_POLLS)
    if is_poll and attempt.status == 408:  # pending, which is no failure
        return None
    if not is_poll:
        name = "InternalClientHolder.execute_with_retries.exception"
    elif attempt.status is None:
        name = "APIFuture.result_async.connection_error"
    else:
        name = "APIFuture.result_async.api_status_error"
    data: dict[str, object] = {
        "func": attempt.path,
        "exception_type": attempt.error,
        "status_code": attempt.status,
        "is_retryable": attempt.retry_in_seconds is not None,
        "attempt_count": attempt.number,
        "elapsed_time": attempt.elapsed_seconds,
        "request_id": attempt.request_id,
    }
    return name, data, "ERROR" if attempt.retry_in_seconds is None else "WARNING"
