"""Remote reporting: the service's form, in the background, bounded, and at nobody's cost."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import selectors
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinsmith.client import telemetry
from tinsmith.client.hooks import Attempt, Backoff, BillingPause, Hooks, QueueStateChange, Record
from tinsmith.client.retry import is_user_error
from tinsmith.client.telemetry import TelemetryReporter, telemetry_hook
from tinsmith.errors import APIConnectionError, BadRequestError, RequestFailedError, ResponseSummary
from tinsmith.types import RequestErrorCategory


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for a timer it moves the clock to it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    """A real event loop on which an hour passes at once."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        runner.run(main)


def clock() -> float:
    return asyncio.get_running_loop().time()


class Service:
    """Takes batches; while `answer` is set, it does that instead."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.times: list[float] = []
        self.answer: Callable[[], Coroutine[Any, Any, None]] | None = None

    async def send(self, body: bytes) -> None:
        self.bodies.append(body)
        self.times.append(clock())
        if self.answer is not None:
            await self.answer()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for body in self.bodies for event in json.loads(body)["events"]]

    @property
    def names(self) -> list[str]:
        return [event.get("event_name", event["event"]) for event in self.events]


async def refuse() -> None:
    raise APIConnectionError


async def hang() -> None:
    await asyncio.Event().wait()


def make_reporter(service: Service, session_id: str | None = "session-0001", **options: Any) -> TelemetryReporter:
    options = {"sdk_version": "0.36.0", "is_user_error": is_user_error, "clock": clock, **options}
    return TelemetryReporter(service.send, session_id=session_id, **options)


def failed_request(message: str = "target_tokens missing") -> RequestFailedError:
    return RequestFailedError(message, "req-0025", RequestErrorCategory.User)


# --- the form --------------------------------------------------------------------------------------------------------

RECORDED_START = (
    b'{"events":[{"event":"SESSION_START","event_id":"00000000-0000-4000-8000-000000000008","event_session_index":0,'
    b'"severity":"INFO","timestamp":"2026-11-15T13:47:32.246510Z"}],"platform":"Linux","sdk_version":"0.36.0",'
    b'"session_id":"session-0001","process_uuid":"00000000-0000-4000-8000-000000000009"}'
)
RECORDED_MESSAGE = (
    "Request failed: target_tokens missing for self.request_id='req-0025' and expected type "
    "self.model_cls=<class 'tinker.OptimStepResponse'>"
)
RECORDED_USER_ERROR = (
    b'{"events":[{"event":"GENERIC_EVENT","event_id":"00000000-0000-4000-8000-000000000011","event_name":"user_error",'
    b'"event_session_index":3,"severity":"WARNING","timestamp":"2026-11-15T13:47:46.018885Z","event_data":'
    b'{"error_type":"RequestFailedError","message":"' + RECORDED_MESSAGE.encode() + b'"}},'
    b'{"duration":"0:00:13.772382","event":"SESSION_END","event_id":"00000000-0000-4000-8000-000000000012",'
    b'"event_session_index":4,"severity":"INFO","timestamp":"2026-11-15T13:47:46.018892Z"}],"platform":"Linux",'
    b'"sdk_version":"0.36.0","session_id":"session-0001","process_uuid":"00000000-0000-4000-8000-000000000009"}'
)
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def without_ids(body: bytes) -> bytes:
    return _UUID.sub(b"UUID", body)


def test_the_batches_equal_those_recorded_from_the_official_client_byte_for_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    start = datetime(2026, 11, 15, 13, 47, 32, 246510, UTC)
    failure = datetime(2026, 11, 15, 13, 47, 46, 18885, UTC)
    times = iter([start, start, start, failure, failure + timedelta(microseconds=7)])
    seconds = [0.0]
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service, clock=lambda: seconds[0], now=lambda: next(times))
        await reporter._flush()
        reporter.record_event("one")
        reporter.record_event("two")
        await reporter._flush()
        seconds[0] = 13.772382
        reporter.record_exception(failed_request(RECORDED_MESSAGE))
        await reporter.close()

    run(main())
    assert without_ids(service.bodies[0]) == without_ids(RECORDED_START)
    assert len(service.bodies[0]) == 296  # the recorded content-length
    assert without_ids(service.bodies[2]) == without_ids(RECORDED_USER_ERROR)


def test_an_unhandled_error_has_its_own_event_and_a_generic_one_always_has_data() -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.record_exception(APIConnectionError(message="refused"))
        reporter.record_event("thing", {"count": 3, "missing": None}, "DEBUG")
        reporter.record_event("bare")
        await reporter.close()

    run(main())
    keys = {"event", "event_id", "event_session_index", "severity", "timestamp"}
    _, error, thing, bare, _ = service.events
    assert set(error) == keys | {"error_type", "error_message"}  # raised nowhere, so there is no traceback
    assert (error["error_type"], error["error_message"], error["severity"]) == (
        "APIConnectionError",
        "refused",
        "ERROR",
    )
    assert (thing["event_data"], thing["severity"]) == ({"count": 3, "missing": None}, "DEBUG")
    assert set(bare) == keys | {"event_name", "event_data"}
    assert bare["event_data"] == {}


def test_a_user_error_is_a_warning_with_the_status_of_the_answer_behind_it() -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service)
        answer = BadRequestError("Error code: 400", ResponseSummary(400, {}), {"detail": "rank is too high"})
        with pytest.raises(ValueError, match="wrapped"), reporter.capture_exceptions():
            raise ValueError("wrapped") from answer
        await reporter.close()

    run(main())
    event = service.events[1]
    assert (event["event_name"], event["severity"]) == ("user_error", "WARNING")
    assert event["event_data"] == {
        "error_type": "ValueError",
        "message": "Error code: 400 - rank is too high",
        "status_code": 400,
    }


def test_a_client_without_session_has_an_id_of_its_own_and_no_start_or_end() -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service, session_id=None)
        reporter.record_event("thing")
        await reporter.close()

    run(main())
    assert service.names == ["thing"]
    session_id = json.loads(service.bodies[0])["session_id"]
    assert session_id.startswith("sessionless-")
    assert _UUID.fullmatch(session_id.removeprefix("sessionless-").encode())


def test_all_reporters_of_a_process_share_its_uuid() -> None:
    service = Service()

    async def main() -> None:
        await make_reporter(service, "session-1").close()
        await make_reporter(service, "session-2").close()

    run(main())
    uuids = {json.loads(body)["process_uuid"] for body in service.bodies}
    assert len(uuids) == 1
    assert len({event["event_id"] for event in service.events}) == 4


FORK_SCRIPT = """
import os, threading
from tinsmith.client import telemetry

async def send(body): raise AssertionError
reporter = telemetry.TelemetryReporter(send, session_id="s", sdk_version="1", is_user_error=lambda error: False)
inherited_lock_is_held = threading.Thread(target=reporter._lock.acquire)
inherited_lock_is_held.start(); inherited_lock_is_held.join()
print(telemetry._process_uuid, flush=True)
if os.fork() == 0:
    reporter.record_event("thing")
    reporter.record_exception(ValueError())
    print(telemetry._process_uuid, len(reporter._queue), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_forked_child_has_a_new_uuid_and_records_nothing_into_its_dead_copy() -> None:
    done = subprocess.run([sys.executable, "-c", FORK_SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    parent, child = done.stdout.splitlines()
    child_uuid, num_queued = child.split()
    assert child_uuid != parent
    assert num_queued == "1"


# --- in the background -----------------------------------------------------------------------------------------------


def test_events_leave_every_ten_seconds_and_an_idle_session_sends_nothing() -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.start()
        await asyncio.sleep(35)
        assert service.times == [10.0]
        reporter.record_event("thing")
        await asyncio.sleep(10)
        assert service.times == [10.0, 40.0]
        await reporter.close()

    run(main())


def test_an_exception_leaves_at_once() -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.start()
        await asyncio.sleep(3)
        reporter.record_exception(ValueError("oh"))
        await asyncio.sleep(0.001)
        assert service.times == [3.0]
        assert service.names == ["SESSION_START", "UNHANDLED_EXCEPTION"]
        await reporter.close()

    run(main())


def test_a_batch_holds_a_hundred_events_at_most() -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service)
        for number in range(249):
            reporter.record_event(f"event-{number}")
        await reporter._flush()

    run(main())
    assert [len(json.loads(body)["events"]) for body in service.bodies] == [100, 100, 50]
    assert [event["event_session_index"] for event in service.events] == list(range(250))


def test_while_the_service_is_away_a_batch_is_repeated_with_growing_pauses_and_then_given_up() -> None:
    service = Service()
    service.answer = refuse

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.start()
        await asyncio.sleep(11)
        reporter.record_event("later")
        await asyncio.sleep(300)
        assert reporter.dropped == 2  # both batches
        service.answer = None
        reporter.record_event("after")
        await asyncio.sleep(61)
        await reporter.close()

    run(main())
    pauses = [after - before for before, after in zip(service.times, service.times[1:], strict=False)]
    assert pauses[:9] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert len(set(service.bodies[:5])) == 1
    assert service.names[-3:] == ["after", "dropped", "SESSION_END"]
    assert service.events[-2]["event_data"] == {"total": 2}


def test_an_exception_does_not_shorten_the_pause_after_a_failure() -> None:
    service = Service()
    service.answer = refuse

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.start()
        for _ in range(100):
            reporter.record_exception(ValueError())
            await asyncio.sleep(0.1)
        await reporter.close()

    run(main())
    assert len(service.times) == 5  # at 0, 1, 3 and 7 seconds, and the last try at close


def test_after_a_short_outage_nothing_is_lost() -> None:
    service = Service()
    service.answer = refuse

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.start()
        reporter.record_event("during")
        await asyncio.sleep(12)
        service.answer = None
        await asyncio.sleep(60)
        assert service.bodies[-1] == service.bodies[0]
        assert reporter.dropped == 0
        await reporter.close()

    run(main())


def test_a_service_that_never_answers_is_given_up_like_one_that_refuses() -> None:
    service = Service()
    service.answer = hang

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.start()
        await asyncio.sleep(120)
        assert reporter.dropped == 1
        await reporter.close()

    run(main())


def test_the_queue_is_bounded_and_what_does_not_fit_is_counted() -> None:
    seconds = [0.0]
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service, clock=lambda: seconds[0])
        for _ in range(8):
            for number in range(200 * telemetry.SHOWN_PER_FOLD):
                reporter.record_event(f"event-{number % 200}")
            seconds[0] += 60
        assert len(reporter._queue) == telemetry.MAX_QUEUED
        assert reporter.dropped == 1 + 8 * 200 * telemetry.SHOWN_PER_FOLD - telemetry.MAX_QUEUED
        lost = reporter.dropped
        await reporter._flush()
        assert service.events[-1]["event_data"] == {"total": lost}

    run(main())


def test_any_thread_may_record() -> None:
    service = Service()

    def work(reporter: TelemetryReporter, name: int) -> None:
        for number in range(20 * telemetry.SHOWN_PER_FOLD):
            reporter.record_event(f"event-{name}-{number % 20}")
        reporter.record_exception(type(f"Error{name}", (Exception,), {})())

    async def main() -> None:
        reporter = make_reporter(service, clock=lambda: 0.0)
        reporter.start()
        await asyncio.gather(*(asyncio.to_thread(work, reporter, name) for name in range(8)))
        await reporter.close()

    asyncio.run(main())
    indices = [event["event_session_index"] for event in service.events]
    assert indices == list(range(2 + 8 * (20 * telemetry.SHOWN_PER_FOLD + 1)))


# --- at nobody's cost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, refuse, hang])
def test_the_users_exception_passes_unchanged_and_without_delay(answer: Any) -> None:
    service = Service()
    service.answer = answer

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.start()
        await asyncio.sleep(11)  # now a send is under way, or has failed
        before = clock()
        error = BadRequestError("Error code: 400", ResponseSummary(400, {}), {"detail": "no"})
        with pytest.raises(BadRequestError) as caught, reporter.capture_exceptions():
            raise error
        assert caught.value is error
        assert clock() == before
        await reporter.close()

    run(main())


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_recording_never_raises_and_one_bad_event_spoils_no_other() -> None:
    service = Service()

    def confused(error: BaseException) -> bool:
        raise RuntimeError("cannot tell")

    async def main() -> None:
        reporter = make_reporter(service, is_user_error=confused)
        reporter.record_exception(_Unspeakable())
        await reporter.close()
        reporter = make_reporter(service)
        reporter.record_exception(_Unspeakable())
        reporter.record_event("odd", {"huge": 10**30, "object": object(), "nan": float("nan"), "half": "\ud800"})
        reporter.record_event("good")
        await reporter.close()
        reporter.record_event("late")

    run(main())
    assert service.names == [
        *("SESSION_START", "SESSION_END"),
        *("SESSION_START", "UNHANDLED_EXCEPTION", "odd", "good", "SESSION_END"),
    ]
    assert service.events[4]["event_data"] == {"nan": None, "half": "?"}


def test_recording_after_the_loop_is_gone_does_nothing() -> None:
    service = Service()
    kept: list[TelemetryReporter] = []

    async def main() -> None:
        kept.append(make_reporter(service, clock=lambda: 0.0))
        kept[0].start()
        await asyncio.sleep(0)

    run(main())
    kept[0].record_exception(ValueError())
    assert service.bodies == []


def test_close_reports_the_end_once() -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.start()
        await asyncio.sleep(3661.5)
        await reporter.close()
        await reporter.close()
        reporter.record_event("late")
        await asyncio.sleep(60)

    run(main())
    assert service.names == ["SESSION_START", "SESSION_END"]
    assert service.events[-1]["duration"] == "1:01:01.500000"


def test_close_takes_two_seconds_at_most_and_abandons_the_rest() -> None:
    service = Service()
    service.answer = hang

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.start()
        await asyncio.sleep(10.5)
        await reporter.close()
        assert clock() == pytest.approx(12.5)
        assert reporter.dropped == 2
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_close_is_bounded_even_if_the_sender_resists() -> None:
    service = Service()

    async def resist() -> None:
        for _ in range(20):
            try:
                await asyncio.sleep(3)
            except asyncio.CancelledError:
                continue

    service.answer = resist

    async def main() -> None:
        reporter = make_reporter(service)
        await reporter.close(timeout=1.0)
        assert clock() == pytest.approx(1.1)

    run(main())


def test_close_gives_up_after_one_refusal() -> None:
    service = Service()
    service.answer = refuse

    async def main() -> None:
        reporter = make_reporter(service)
        await reporter.close()
        assert clock() == 0
        assert len(service.bodies) == 1

    run(main())


def test_close_waits_for_the_batch_under_way_instead_of_sending_it_twice() -> None:
    service = Service()

    async def slow() -> None:
        await asyncio.sleep(1)

    service.answer = slow

    async def main() -> None:
        reporter = make_reporter(service)
        reporter.start()
        await asyncio.sleep(10.5)
        await reporter.close()
        assert clock() == pytest.approx(12)

    run(main())
    assert service.names == ["SESSION_START", "SESSION_END"]


class _Session:
    """Owns a reporter, as the real one does."""

    def __init__(self, service: Service) -> None:
        self.reporter = make_reporter(service)
        self.hooks = Hooks([telemetry_hook(self.reporter)])
        self.reporter.start()


def test_a_dropped_session_is_collected_and_its_task_ends_at_the_next_tick() -> None:
    service = Service()

    async def main() -> None:
        session = _Session(service)
        await asyncio.sleep(1)
        reference, reporter = weakref.ref(session), weakref.ref(session.reporter)
        del session
        gc.collect()
        assert reference() is None
        assert reporter() is None
        await asyncio.sleep(10)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_a_dropped_session_is_collected_even_while_the_service_is_away() -> None:
    service = Service()
    service.answer = refuse

    async def main() -> None:
        session = _Session(service)
        await asyncio.sleep(45)
        reference = weakref.ref(session.reporter)
        del session
        gc.collect()
        assert reference() is None
        await asyncio.sleep(60)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_a_hook_that_outlives_its_reporter_does_nothing() -> None:
    hook = telemetry_hook(make_reporter(Service(), clock=lambda: 0.0))
    gc.collect()
    hook(Backoff("sampling", 1.0, 429))


# --- folding ---------------------------------------------------------------------------------------------------------


def failed_poll(status: int = 503) -> Attempt:
    return Attempt("POST", "/api/v1/retrieve_future", 4, status, "InternalServerError", 0.01, 0.5, "req-1")


def test_a_storm_of_failures_becomes_ten_events_a_minute_with_the_true_count() -> None:
    service = Service()
    total = 0

    async def main() -> None:
        nonlocal total
        reporter = make_reporter(service)
        hook = telemetry_hook(reporter)
        reporter.start()
        for _ in range(600):
            for _ in range(10):
                hook(failed_poll())
                total += 1
            await asyncio.sleep(0.5)
        await reporter.close()

    run(main())
    storm = [event for event in service.events if event["event"] == "GENERIC_EVENT"]
    counted = sum(event["event_data"].get("count", 1) for event in storm)
    assert counted == total
    seconds = [datetime.fromisoformat(event["timestamp"]) for event in storm]
    assert seconds == sorted(seconds)
    assert {event["event_data"].get("kind") for event in storm} == {
        None,
        "APIFuture.result_async.api_status_error:InternalServerError:503",
    }


def test_no_minute_holds_more_than_ten_events_of_a_kind() -> None:
    service = Service()
    epoch = datetime(2026, 1, 1, tzinfo=UTC)

    async def main() -> None:
        reporter = make_reporter(service, now=lambda: epoch + timedelta(seconds=clock()))
        reporter.start()
        for step in range(2000):
            reporter.record_event("storm", severity="ERROR")
            await asyncio.sleep((step * 37 % 100) / 100)
        await reporter.close()

    run(main())
    times = [
        (datetime.fromisoformat(event["timestamp"]) - epoch).total_seconds()
        for event in service.events
        if event["event"] == "GENERIC_EVENT"
    ]
    busiest = max(sum(start <= time < start + 60 for time in times) for start in times)
    assert 8 <= busiest <= 10
    assert {event["severity"] for event in service.events if event.get("event_name") == "folded"} == {"ERROR"}


def test_a_rare_failure_is_not_hidden_by_a_frequent_one() -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service)
        hook = telemetry_hook(reporter)
        for _ in range(500):
            hook(failed_poll(503))
        hook(failed_poll(401))
        await reporter.close()

    run(main())
    statuses = Counter(event.get("event_data", {}).get("status_code") for event in service.events)
    assert statuses[503] == telemetry.SHOWN_PER_FOLD
    assert statuses[401] == 1


def test_a_flood_of_different_kinds_is_folded_together_and_forgotten_when_quiet() -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service)
        for number in range(5000):
            reporter.record_event(f"event-{number}")
        assert len(reporter._folding._kinds) == telemetry.MAX_KINDS + 1
        assert len(reporter._queue) == 1 + telemetry.MAX_KINDS + telemetry.SHOWN_PER_FOLD
        reporter.start()
        await asyncio.sleep(200)
        assert len(reporter._folding._kinds) == 0
        await reporter.close()

    run(main())
    (folded,) = [event for event in service.events if event.get("event_name") == "folded"]
    expected = 5000 - telemetry.MAX_KINDS - telemetry.SHOWN_PER_FOLD
    assert folded["event_data"] == {"kind": "other", "count": expected}


# --- the bridge from local hooks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "name", "severity", "some_data"),
    [
        (
            QueueStateChange("paused_capacity", "please wait", "Training", "req-1"),
            "queue_state_change",
            "INFO",
            {"state": "paused_capacity", "subject": "Training", "request_id": "req-1"},
        ),
        (Backoff("sampling", 5.0, 429), "backoff", "WARNING", {"scope": "sampling", "seconds": 5.0, "status": 429}),
        (BillingPause("training", 5.0), "billing_pause", "WARNING", {"scope": "training", "seconds": 5.0}),
        (
            failed_poll(),
            "APIFuture.result_async.api_status_error",
            "WARNING",
            {"status_code": 503, "is_retryable": True, "attempt_count": 4, "request_id": "req-1"},
        ),
        (
            Attempt("POST", "/api/v1/retrieve_futures", 1, None, "APIConnectionError", 0.1, 1.0),
            "APIFuture.result_async.connection_error",
            "WARNING",
            {"exception_type": "APIConnectionError", "status_code": None},
        ),
        (
            Attempt("POST", "/api/v1/forward_backward", 7, 403, "PermissionDeniedError", 0.1),
            "InternalClientHolder.execute_with_retries.exception",
            "ERROR",
            {"func": "/api/v1/forward_backward", "is_retryable": False, "attempt_count": 7},
        ),
    ],
)
def test_what_hooks_see_is_reported(record: Record, name: str, severity: str, some_data: dict[str, object]) -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service, session_id=None)
        Hooks([telemetry_hook(reporter)]).emit(record)
        await reporter.close()

    run(main())
    (event,) = service.events
    assert (event["event_name"], event["severity"]) == (name, severity)
    assert event["event_data"].items() >= some_data.items()


@pytest.mark.parametrize(
    "record",
    [
        Attempt("POST", "/api/v1/asample", 1, 200, None, 0.1),
        Attempt("POST", "/api/v1/retrieve_future", 1, 408, "APIStatusError", 20.0, 0.0, "req-1"),
        Attempt("POST", "/api/v1/telemetry", 1, 503, "InternalServerError", 0.1),
    ],
)
def test_good_answers_pending_polls_and_telemetry_itself_are_not_reported(record: Attempt) -> None:
    service = Service()

    async def main() -> None:
        reporter = make_reporter(service, session_id=None)
        telemetry_hook(reporter)(record)
        await reporter.close()

    run(main())
    assert service.bodies == []


def test_the_loop_thread_is_the_only_one_that_sends() -> None:
    senders: set[str] = set()

    async def send(body: bytes) -> None:
        senders.add(threading.current_thread().name)

    async def main() -> None:
        reporter = TelemetryReporter(send, session_id="s", sdk_version="1", is_user_error=is_user_error)
        reporter.start()
        await asyncio.to_thread(reporter.record_exception, ValueError())
        await asyncio.sleep(0)
        await reporter.close()

    asyncio.run(main())
    assert senders == {threading.main_thread().name}
