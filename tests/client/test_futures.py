"""One future for everything: waited for, awaited, cancelled, from any thread or loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import pickle
import threading
import warnings
import weakref
from typing import Any

import pytest

from tests.support.training import PATIENCE
from tinsmith import errors
from tinsmith.client.futures import APIFuture, AwaitableConcurrentFuture, run
from tinsmith.client.loop import background_loop
from tinsmith.errors import RequestSummary, ResponseSummary, WouldDeadlockError
from tinsmith.types import RequestErrorCategory


async def forever() -> Any:
    await asyncio.Event().wait()


def give(value: Any) -> APIFuture[Any]:
    return run(lambda: asyncio.sleep(0, value))


def test_it_is_a_concurrent_future_and_knows_the_names_of_old_code() -> None:
    future = give(1)
    assert isinstance(future, concurrent.futures.Future)
    assert isinstance(future, AwaitableConcurrentFuture)
    assert future.future() is future
    assert future.result(PATIENCE) == 1
    assert future.exception() is None
    assert future.done()
    assert not future.cancel()


def test_the_functions_of_concurrent_futures_take_it() -> None:
    quick, slow = [give(index) for index in range(20)], run(forever)
    done, pending = concurrent.futures.wait([*quick, slow], timeout=1)
    assert (done, pending) == (set(quick), {slow})
    assert {future.result() for future in concurrent.futures.as_completed(quick, PATIENCE)} == set(range(20))
    slow.cancel()


def test_it_can_be_awaited_from_several_loops_and_several_times() -> None:
    future = give("value")

    async def await_twice() -> tuple[str, str]:
        return await future, await future

    assert asyncio.run(await_twice()) == ("value", "value")
    assert asyncio.run(await_twice()) == ("value", "value")
    assert run(await_twice).result(PATIENCE) == ("value", "value")


def test_asyncio_gather_takes_it() -> None:
    async def gather() -> list[int]:
        return await asyncio.gather(*[give(index) for index in range(10)])

    assert asyncio.run(gather()) == list(range(10))


def test_a_timeout_of_result_leaves_the_work_running() -> None:
    future = run(lambda: asyncio.sleep(0.05, "late"))
    with pytest.raises(TimeoutError):
        future.result(0)
    assert future.result(PATIENCE) == "late"


def test_a_timeout_of_result_async_cancels_the_work() -> None:
    stopped = threading.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            stopped.set()

    future = run(work)
    with pytest.raises(TimeoutError):
        asyncio.run(future.result_async(0.01))
    assert stopped.wait(PATIENCE)
    assert future.cancelled()


def test_wait_for_around_an_await_cancels_the_work() -> None:
    async def impatient() -> APIFuture[Any]:
        future = run(forever)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.01)
        return future

    assert asyncio.run(impatient()).cancelled()


def test_cancelling_before_it_starts_means_that_it_never_starts() -> None:
    begun = []

    async def work() -> None:
        begun.append(True)

    async def start_and_cancel() -> APIFuture[None]:
        future = run(work)
        assert future.cancel()
        return future

    future = run(start_and_cancel).result(PATIENCE)
    give(None).result(PATIENCE)
    assert future.cancelled()
    assert not begun
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
def test_whatever_the_work_raises_reaches_the_future(error: BaseException) -> None:
    async def work() -> None:
        raise error

    with pytest.raises((type(error), concurrent.futures.CancelledError)):
        run(work).result(PATIENCE)
    assert give("alive").result(PATIENCE) == "alive"


def test_work_that_cannot_even_be_made_reaches_the_future() -> None:
    def make() -> Any:
        raise TypeError("no coroutine came of it")

    with pytest.raises(TypeError, match="no coroutine"):
        run(make).result(PATIENCE)


def test_waiting_on_the_loops_own_thread_is_refused() -> None:
    pending = run(forever)

    async def wait_there() -> None:
        pending.result()

    with pytest.raises(WouldDeadlockError, match="await"):
        run(wait_there).result(PATIENCE)
    with pytest.raises(WouldDeadlockError):
        run(lambda: asyncio.sleep(0, pending.exception())).result(PATIENCE)
    pending.cancel()


def test_a_done_callback_may_ask_for_its_own_result() -> None:
    seen: concurrent.futures.Future[int] = concurrent.futures.Future()
    give(5).add_done_callback(lambda future: seen.set_result(future.result()))
    assert seen.result(PATIENCE) == 5


def test_waiting_inside_a_running_loop_gives_one_warning_at_the_callers_line() -> None:
    async def block() -> None:
        for _ in range(3):
            run(lambda: asyncio.sleep(0.01)).result(PATIENCE)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        asyncio.run(block())
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert caught[0].filename == __file__
    assert "_async" in str(caught[0].message)


def test_reading_a_result_that_is_there_never_warns() -> None:
    future = give(3)
    future.result(PATIENCE)

    async def read() -> int:
        return future.result()

    assert asyncio.run(read()) == 3


def test_threads_that_wait_from_the_very_beginning_are_all_woken() -> None:
    for _ in range(50):
        future: APIFuture[int] = APIFuture()
        barrier = threading.Barrier(5)

        def wait(future: APIFuture[int] = future, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            future.result(PATIENCE)

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        barrier.wait()
        future.resolve(1)
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("fails", [True, False])
def test_an_abandoned_future_ends_in_silence_and_is_freed(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> bytes:
        await asyncio.sleep(0.001)
        if fails:
            raise ValueError("nobody is there")
        return bytes(1000)

    others = set(background_loop()._tasks)
    reference = weakref.ref(run(work))
    give(None).result(PATIENCE)
    while not background_loop()._tasks <= others:
        give(None).result(PATIENCE)
    gc.collect()
    assert reference() is None
    assert not caplog.records


def test_completing_a_cancelled_future_is_silent() -> None:
    future: APIFuture[int] = APIFuture()
    future.cancel()
    future.resolve(1)
    future.fail(ValueError())
    assert future.cancelled()


def test_a_queued_future_costs_no_lock() -> None:
    assert "_own_condition" not in vars(APIFuture())


EXAMPLES = [
    errors.APIError("m", RequestSummary("POST", "http://x/y"), body={"a": 1}),
    errors.RateLimitError("m", ResponseSummary(429, {"a": "b"}, RequestSummary("GET", "u")), {"x": 1}, retry_after=2.5),
    errors.APIResponseValidationError(ResponseSummary(200, {}), "body", "m"),
    errors.APIConnectionError(message="m"),
    errors.APITimeoutError(message="m"),
    errors.NoProgressError(message="m"),
    errors.RequestFailedError("m", "id-1", RequestErrorCategory.User),
    errors.InvalidInputError("m", field="f", value=object()),
    errors.InvalidTypeError("m", field="f", value=3),
    errors.MissingExtraError("torch", "torch", "A loss"),
    errors.ClientClosedError("m"),
    errors.ForkedProcessError("m"),
    errors.WouldDeadlockError("m"),
    errors.UnconfirmedOperationError("m"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_survives_pickling(error: errors.TinkerError) -> None:
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
