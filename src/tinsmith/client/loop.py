"""The background event loop that lets sync and async calls share one implementation.

One daemon thread and one asyncio loop per process, started on first use. Threads do not survive a fork, and
neither does the HTTP library underneath, so use in a forked child fails at once with the remedy.

The loop is stopped when the interpreter exits. A thread that still runs while the interpreter is taken down is killed
in the middle of what it does, and the native code of the HTTP library answers that with an abort of the whole process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from tinsmith.errors import ClientClosedError, ForkedProcessError

logger = logging.getLogger(__name__)

EXIT_SECONDS = 1.0
"""How long the interpreter waits for the loop when it exits."""
QUIET_SECONDS = 0.02


class BackgroundLoop:
    def __init__(self) -> None:
        self.asyncio_loop = asyncio.new_event_loop()
        self._visitors: set[int] = set()
        """Threads that are calling into the loop. Native ones must be out of there before the interpreter goes."""
        self._last_visit = 0.0
        self._visit = self.asyncio_loop.call_soon_threadsafe
        self.asyncio_loop.call_soon_threadsafe = self._noted_visit  # type: ignore[assignment]
        self._inbox: deque[tuple[contextvars.Context, Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake_up_due = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_stopped = False
        self._thread = threading.Thread(target=self._run, name="tinsmith", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Goes on whatever is raised: asyncio lets SystemExit (from a hook, say) through, and every call would hang."""
        while True:
            try:
                self.asyncio_loop.run_forever()
                return
            except BaseException as error:
                logger.error("%r was raised on Tinsmith's event loop, which goes on.", error, exc_info=error)

    def _noted_visit(self, *args: Any, **options: Any) -> asyncio.Handle:
        thread = threading.get_ident()
        self._visitors.add(thread)
        self._last_visit = time.monotonic()
        try:
            return self._visit(*args, **options)
        finally:
            self._visitors.discard(thread)

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Runs a callback on the loop, in the order of the calls, from whatever thread they come.

        Waking the loop costs a system call, so callbacks that arrive together share one wake-up. Each runs in the
        context of its caller, so tracing set up there is seen by hooks here.
        """
        if self.is_stopped:
            raise ClientClosedError("The interpreter is exiting, so nothing can be sent any more.")
        self._inbox.append((contextvars.copy_context(), callback, args))
        if not self._wake_up_due:
            self._wake_up_due = True
            self.asyncio_loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        # Cleared first: whoever appends from here on either is counted below or orders another wake-up. Only what is
        # there now is done in one go, so that callers who are quicker than the loop do not keep it from its work.
        self._wake_up_due = False
        for _ in range(len(self._inbox)):
            context, callback, args = self._inbox.popleft()
            try:
                context.run(callback, *args)
            except Exception as error:  # noqa: BLE001 - one bad callback must not lose the others
                self.asyncio_loop.call_exception_handler({"message": "tinsmith callback failed", "exception": error})

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task and keeps it alive. On the loop's thread only."""
        task = self.asyncio_loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel_soon(self, task: asyncio.Task[Any]) -> None:
        """Cancels a task from any thread, but not before its first step: an unstarted coroutine cannot clean up."""
        self.post(self.asyncio_loop.call_soon, task.cancel)

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self, timeout: float) -> None:
        """Cancels what runs and ends the thread. Nothing can be posted any more."""
        self.is_stopped = True
        self.asyncio_loop.call_soon_threadsafe(lambda: self.asyncio_loop.create_task(self._wind_up(timeout)))
        self._thread.join(2 * timeout)
        deadline = time.monotonic() + timeout
        while self._is_visited() and time.monotonic() < deadline:
            time.sleep(0.002)  # lets go of the interpreter lock, for which they wait

    def _is_visited(self) -> bool:
        """Or was a moment ago: what was cancelled just now may still call back."""
        return bool(self._visitors) or time.monotonic() - self._last_visit < QUIET_SECONDS

    async def _wind_up(self, timeout: float) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        self.asyncio_loop.stop()


_lock = threading.Lock()
_current: BackgroundLoop | None = None
_forked = False


def background_loop() -> BackgroundLoop:
    """The loop of this process; concurrent first calls create it once."""
    global _current
    check_not_forked()
    if _current is None:
        with _lock:
            if _current is None:
                _current = BackgroundLoop()
    return _current


def check_not_forked() -> None:
    if _forked:
        raise ForkedProcessError(
            "This process was forked from one that had already used Tinsmith, and its network threads do not exist "
            "here. Start workers with multiprocessing.get_context('spawn') (or 'forkserver'), or make the first "
            "client after the fork."
        )


def is_loop_thread() -> bool:
    return _current is not None and _current.is_current_thread()


def _stop_at_exit() -> None:
    if _current is not None and not _forked:
        _current.stop(EXIT_SECONDS)


atexit.register(_stop_at_exit)


def _after_fork_in_child() -> None:
    global _forked, _lock
    _forked = _forked or _current is not None
    _lock = threading.Lock()  # the copied one may be held by a thread that does not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
