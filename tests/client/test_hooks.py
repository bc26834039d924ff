"""Local hooks: they see everything, and harm nothing."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from contextvars import ContextVar

import pytest

from tinsmith.client.hooks import (
    MODEL_CREATION,
    TRAINING,
    Attempt,
    Backoff,
    BillingPause,
    Hook,
    Hooks,
    ProgressLogger,
    QueueStateChange,
    QueueStateLogger,
    Record,
)
from tinsmith.errors import InvalidTypeError

ATTEMPT = Attempt("POST", "/api/v1/asample", 1, 200, None, 0.25)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_hook_gets_every_record_in_order() -> None:
    first: list[Record] = []
    second: list[Record] = []
    hooks = Hooks([first.append, second.append])
    records: list[Record] = [
        ATTEMPT,
        QueueStateChange("paused_capacity", None, TRAINING, "req-1"),
        Backoff("sampling", 5.0, 429),
        BillingPause("training", 5.0),
    ]
    for record in records:
        hooks.emit(record)
    assert first == second == records


@pytest.mark.parametrize("record", [ATTEMPT, QueueStateChange("active", None, TRAINING), Backoff("sampling", 1.0, 429)])
def test_records_cannot_be_changed(record: Record) -> None:
    with pytest.raises(AttributeError):
        setattr(record, record._fields[0], "other")


def test_a_failing_hook_is_named_once_and_the_others_still_run(caplog: pytest.LogCaptureFixture) -> None:
    def broken(record: Record) -> None:
        raise ValueError("my hook is wrong")

    seen: list[Record] = []
    hooks = Hooks([broken, seen.append])
    for _ in range(50):
        hooks.emit(ATTEMPT)
    assert len(seen) == 50
    (line,) = caplog.records
    assert "broken" in line.getMessage()
    assert "Attempt" in line.getMessage()


def test_each_failing_hook_gets_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    def one(record: Record) -> None:
        raise ValueError

    def two(record: Record) -> None:
        raise KeyError

    hooks = Hooks([one, two])
    hooks.emit(ATTEMPT)
    hooks.emit(ATTEMPT)
    assert len(caplog.records) == 2


def test_a_hook_cannot_cancel_the_call_it_watches() -> None:
    def cancelling(record: Record) -> None:
        raise asyncio.CancelledError

    async def call() -> str:
        Hooks([cancelling]).emit(ATTEMPT)
        return "done"

    assert asyncio.run(call()) == "done"


def test_an_interrupt_in_a_hook_still_stops_the_program() -> None:
    def interrupted(record: Record) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hooks([interrupted]).emit(ATTEMPT)


async def _coroutine_hook(record: Record) -> None:
    pass


class _CoroutineObject:
    async def __call__(self, record: Record) -> None:
        pass


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (_coroutine_hook, "coroutine function"),
        (functools.partial(_coroutine_hook), "coroutine function"),
        (_CoroutineObject(), "coroutine function"),
        ("print", "must be a function of one record, not 'print'"),
    ],
)
def test_what_cannot_be_a_hook_is_refused_at_once(hook: Hook, words: str) -> None:
    with pytest.raises(InvalidTypeError, match=words):
        Hooks([hook])


def test_a_hook_sees_the_context_variables_of_the_call_across_threads() -> None:
    step: ContextVar[int] = ContextVar("step")
    seen: list[tuple[int, str]] = []
    hooks = Hooks([lambda record: seen.append((step.get(), threading.current_thread().name))])
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="sdk-loop")
    thread.start()

    async def call() -> None:
        hooks.emit(ATTEMPT)

    step.set(7)
    asyncio.run_coroutine_threadsafe(call(), loop).result(timeout=5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=5)
    loop.close()
    assert seen == [(7, "sdk-loop")]


def lines_of(
    caplog: pytest.LogCaptureFixture, hook: Hook, clock: Clock, script: list[tuple[float, Record]]
) -> list[str]:
    with caplog.at_level(logging.INFO, "tinsmith.client.hooks"):
        for time, record in script:
            clock.now = time
            hook(record)
    return [record.getMessage() for record in caplog.records]


def queue(state: str, subject: str = TRAINING, reason: str | None = None) -> QueueStateChange:
    return QueueStateChange(state, reason, subject, "req-1")


def test_a_pause_is_told_once_and_not_once_per_poll(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    script: list[tuple[float, Record]] = [(t * 0.5, queue("paused_capacity")) for t in range(1000)]
    assert lines_of(caplog, QueueStateLogger(clock), clock, script) == [
        "Training is paused: the server is short of capacity."
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_flapping_between_active_and_paused_gives_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    script: list[tuple[float, Record]] = [
        (float(t), queue("active" if t % 2 else "paused_rate_limit")) for t in range(180)
    ]
    assert len(lines_of(caplog, QueueStateLogger(clock), clock, script)) == 3


def test_another_kind_of_pause_is_told_when_the_minute_is_over(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    script: list[tuple[float, Record]] = [
        (0.0, queue("paused_capacity")),
        (30.0, queue("paused_rate_limit")),
        (60.0, queue("paused_rate_limit")),
    ]
    assert lines_of(caplog, QueueStateLogger(clock), clock, script) == [
        "Training is paused: the server is short of capacity.",
        "Training is paused: the limit on concurrent training clients is reached.",
    ]


def test_subjects_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    script: list[tuple[float, Record]] = [
        (0.0, queue("paused_rate_limit", MODEL_CREATION)),
        (1.0, queue("paused_rate_limit", "sampler-7")),
        (2.0, queue("paused_capacity", "sampler-8", "maintenance until noon")),
        (3.0, queue("unknown", "sampler-9")),
    ]
    assert lines_of(caplog, QueueStateLogger(clock), clock, script) == [
        "Model creation is paused: the limit on concurrent training clients is reached.",
        "Sampling with sampler-7 is paused: the limit on concurrent sampler weights is reached.",
        "Sampling with sampler-8 is paused by the server: maintenance until noon.",
        "Sampling with sampler-9 is waiting at the server, which gave no reason.",
    ]


def test_active_work_and_other_records_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    script: list[tuple[float, Record]] = [(0.0, queue("active")), (1.0, ATTEMPT), (2.0, Backoff("sampling", 1.0, 429))]
    assert lines_of(caplog, QueueStateLogger(clock), clock, script) == []


def test_a_run_with_many_samplers_does_not_make_the_logger_grow() -> None:
    logger = QueueStateLogger(Clock())
    for index in range(logger.max_subjects):
        logger(queue("paused_capacity", f"sampler-{index}"))
    logger(queue("active", "sampler-0"))
    logger(queue("paused_capacity", "one-more"))
    assert len(logger._announced) == logger.max_subjects
    assert "sampler-0" in logger._announced
    assert "sampler-1" not in logger._announced  # the one not heard of for longest


def test_progress_is_an_info_line_with_counts_at_most_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    good = ATTEMPT
    retried = ATTEMPT._replace(status=429, error="RateLimitError", retry_in_seconds=1.0)
    lost = ATTEMPT._replace(status=None, error="APIConnectionError", retry_in_seconds=0.5)
    failed = ATTEMPT._replace(status=400, error="BadRequestError")
    script: list[tuple[float, Record]] = [
        (1.0, good),
        (2.0, retried),
        (3.0, retried),
        (4.0, lost),
        (5.0, failed),
        (10.0, good),
        (11.0, good),
        (19.9, good),
        (20.0, good),
    ]
    assert lines_of(caplog, ProgressLogger(10.0, clock), clock, script) == [
        "Requests so far: 2 answered, 3 retried (RateLimitError 2, APIConnectionError 1), 1 failed.",
        "Requests so far: 5 answered, 3 retried (RateLimitError 2, APIConnectionError 1), 1 failed.",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}
