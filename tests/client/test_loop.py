"""The background loop: calls from any thread, in order, and nothing stops it. And the threads beside it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, Future

import pytest

from tests.support.training import PATIENCE
from tinsmith.client import loop as loop_module
from tinsmith.client.futures import run
from tinsmith.client.loop import BackgroundLoop, background_loop
from tinsmith.client.threads import run_coding, run_user_code


def settled(loop: BackgroundLoop) -> None:
    """Waits until the loop has done all that was posted before."""
    done = threading.Event()
    loop.post(done.set)
    assert done.wait(PATIENCE)


def test_concurrent_first_calls_create_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_current", None)
    barrier, loops = threading.Barrier(16), []

    def first_call() -> None:
        barrier.wait()
        loops.append(background_loop())

    threads = [threading.Thread(target=first_call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, loops))) == 1
    loops[0].asyncio_loop.call_soon_threadsafe(loops[0].asyncio_loop.stop)
    loops[0]._thread.join(PATIENCE)
    loops[0].asyncio_loop.close()


def test_what_one_thread_posts_runs_in_order_and_none_is_lost() -> None:
    loop = background_loop()
    seen: list[tuple[int, int]] = []

    def post(thread: int) -> None:
        for index in range(2000):
            loop.post(seen.append, (thread, index))

    threads = [threading.Thread(target=post, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settled(loop)
    assert len(seen) == 8000
    for number in range(4):
        assert [index for thread, index in seen if thread == number] == list(range(2000))


def test_callers_who_are_quicker_than_the_loop_do_not_keep_it_from_working() -> None:
    loop, stop = background_loop(), threading.Event()

    def post_again() -> None:
        if not stop.is_set():
            loop.post(post_again)
            loop.post(post_again) if len(loop._inbox) < 10 else None

    loop.post(post_again)
    assert run(lambda: asyncio.sleep(0.01, "worked")).result(PATIENCE) == "worked"
    stop.set()


def test_a_callback_runs_in_the_context_of_its_caller() -> None:
    trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace")
    trace.set("mine")
    seen: list[str] = []
    background_loop().post(lambda: seen.append(trace.get()))
    settled(background_loop())
    assert seen == ["mine"]


def test_a_failing_callback_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    loop = background_loop()
    loop.post(lambda: 1 / 0)
    settled(loop)
    assert "tinsmith callback failed" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt()])
def test_an_exit_raised_on_the_loop_is_logged_and_the_loop_goes_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    loop = background_loop()

    def leave() -> None:
        raise error

    with caplog.at_level(logging.ERROR, "tinsmith"):
        loop.asyncio_loop.call_soon_threadsafe(leave)
        settled(loop)
    assert "which goes on" in caplog.text
    assert run(lambda: asyncio.sleep(0, "alive")).result(PATIENCE) == "alive"


def test_a_task_is_cancelled_only_after_it_has_begun() -> None:
    loop = background_loop()
    steps: list[str] = []

    async def work() -> None:
        try:
            steps.append("begun")
            await asyncio.Event().wait()
        finally:
            steps.append("cleaned up")

    def start_and_cancel() -> None:
        loop.cancel_soon(loop.start_task(work()))

    loop.post(start_and_cancel)
    while len(steps) < 2:
        settled(loop)
    assert steps == ["begun", "cleaned up"]


def test_importing_the_clients_starts_no_thread() -> None:
    script = "import threading, tinsmith, tinsmith.client.service; assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# --- threads ---------------------------------------------------------------------------------------------------------


def test_coding_runs_in_a_thread_of_its_own_pool() -> None:
    async def name() -> str:
        return await run_coding(lambda: threading.current_thread().name)

    assert run(name).result(PATIENCE).startswith("tinsmith-coding")


def test_user_code_that_never_returns_holds_up_neither_coding_nor_other_user_code() -> None:
    release = threading.Event()

    async def many() -> str:
        stuck = [asyncio.ensure_future(run_user_code(release.wait)) for _ in range(50)]
        free = await run_user_code(lambda: "user") + await run_coding(lambda: " and coding")
        release.set()
        await asyncio.gather(*stuck)
        return free

    assert run(many).result(PATIENCE) == "user and coding"


def test_user_code_sees_the_callers_context_variables() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")

    async def call() -> int:
        variable.set(7)
        return await run_user_code(variable.get)

    assert run(call).result(PATIENCE) == 7


@pytest.mark.parametrize("error", [SystemExit(1), StopIteration(), asyncio.CancelledError(), CancelledError()])
def test_errors_that_mean_something_to_asyncio_reach_the_caller_as_ordinary_ones(error: BaseException) -> None:
    def function() -> None:
        raise error

    future = run(lambda: run_user_code(function))
    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        future.result(PATIENCE)
    assert caught.value.__cause__ is error


def test_other_errors_of_user_code_pass_unchanged() -> None:
    error = KeyError("mine")

    def function() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        run(lambda: run_user_code(function)).result(PATIENCE)
    assert caught.value is error


def test_cancelling_ends_the_wait_for_user_code_and_its_late_result_is_dropped() -> None:
    begun, release, finished = threading.Event(), threading.Event(), Future[None]()

    def function() -> None:
        begun.set()
        release.wait()
        finished.set_result(None)

    future = run(lambda: run_user_code(function))
    assert begun.wait(PATIENCE)
    future.cancel()
    settled(background_loop())
    release.set()
    finished.result(PATIENCE)
    settled(background_loop())
    assert future.cancelled()
