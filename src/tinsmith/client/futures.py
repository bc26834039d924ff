"""The one future type: a result that can be waited for, awaited or cancelled, from any thread or loop."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, TypeVar

from tinsmith.client.loop import BackgroundLoop, background_loop, check_not_forked, is_loop_thread
from tinsmith.errors import ClientClosedError, WouldDeadlockError

T = TypeVar("T")


class APIFuture(Future[T]):
    """What every operation returns.

    `future.result(timeout)` waits, `await future` awaits, `future.cancel()` gives up: what has not been sent is
    not sent, what has been sent goes on at the server (samples are stopped there too). A timeout of `result()`
    leaves the work running; a timeout of `result_async()` cancels it, as asyncio does.
    """

    request_id: str | None = None
    """The server's name for the operation, known once it was accepted."""

    _on_cancel: Callable[[], object] | None = None

    def __init__(self, on_cancel: Callable[[], object] | None = None) -> None:
        # The fields of the base class, but with its lock and condition made on first use: they take more than
        # a kilobyte, and thousands of futures may be queued that nobody waits for yet.
        self._state = "PENDING"
        self._result = None
        self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self._on_cancel = on_cancel

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        condition: threading.Condition | None = self.__dict__.get("_own_condition")
        # Two threads may both find none; setdefault is atomic, so that they end up with the same one.
        return condition or self.__dict__.setdefault("_own_condition", threading.Condition())

    def result(self, timeout: float | None = None) -> T:
        self._check_can_block()
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():  # the operation's own
                raise
            raise TimeoutError(f"No result within {timeout:g} s. The work goes on; ask again, or cancel().") from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_can_block()
        return super().exception(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """The same, awaited."""
        async with asyncio.timeout(timeout):
            return await self

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            check_not_forked()
        return asyncio.wrap_future(self).__await__()

    async def coroutine(self) -> T:
        """The result, for what takes a coroutine and nothing else, such as `asyncio.create_task`."""
        return await self

    def future(self) -> Future[T]:
        """The same object: it is a `concurrent.futures.Future` itself."""
        return self

    def _invoke_callbacks(self) -> None:
        """Once, and then they are let go: some refer to whoever holds this future, for good."""
        super()._invoke_callbacks()  # type: ignore[misc]
        self._done_callbacks.clear()

    def cancel(self) -> bool:
        """Gives it up; False if it is over already."""
        cancelled = super().cancel()
        if cancelled:
            self._run_on_cancel()
        return cancelled

    def when_cancelled(self, action: Callable[[], object]) -> None:
        """Sets what cancel() does besides ending the wait. Called by whoever does the work."""
        self._on_cancel = action
        if self.cancelled():
            self._run_on_cancel()

    def _run_on_cancel(self) -> None:
        # Several threads may cancel at once; pop is atomic, so that one of them gets the action.
        action = self.__dict__.pop("_on_cancel", None)
        if action is not None:
            with contextlib.suppress(ClientClosedError):  # the interpreter is exiting, and all ends by itself
                action()

    def resolve(self, value: T) -> None:
        """Sets the result, in silence if the caller has given up meanwhile."""
        with contextlib.suppress(InvalidStateError):
            self.set_result(value)
        self._on_cancel = None

    def fail(self, error: BaseException) -> None:
        """Sets the error, in silence if the caller has given up meanwhile."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)
        self._on_cancel = None

    def _check_can_block(self) -> None:
        if self.done():
            return
        check_not_forked()
        if is_loop_thread():
            raise WouldDeadlockError(
                "result() was called on Tinsmith's own event-loop thread (from a hook or a done-callback), where it "
                "could never return. Do the waiting in another thread, or use `await`."
            )
        if _blocks_a_loop():
            warnings.warn(
                "This call blocks the running event loop until the operation is done; `await` the future, or the "
                "method's twin that ends in _async, instead.",
                RuntimeWarning,
                stacklevel=_levels_to_user_code(),
            )


AwaitableConcurrentFuture = APIFuture


def _blocks_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return "ipykernel" not in sys.modules  # every notebook cell runs inside a loop, where blocking is what one means


def _levels_to_user_code() -> int:
    """The `stacklevel` at which the caller of `_check_can_block` sees the first frame outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tinsmith."):
        level, frame = level + 1, frame.f_back
    return level


def run(make: Callable[[], Coroutine[Any, Any, T]], loop: BackgroundLoop | None = None) -> APIFuture[T]:
    """Runs a coroutine on the background loop. Whatever happens to it reaches the future."""
    loop = loop or background_loop()
    future: APIFuture[T] = APIFuture()
    loop.post(_start, loop, make, future)
    return future


def _start(loop: BackgroundLoop, make: Callable[[], Coroutine[Any, Any, T]], future: APIFuture[T]) -> None:
    if not future.cancelled():
        task = loop.start_task(settle(make, future))
        future.when_cancelled(lambda: loop.cancel_soon(task))


async def settle(make: Callable[[], Coroutine[Any, Any, T]], future: APIFuture[T]) -> None:
    """Awaits what `make` gives and hands what comes of it to the future, whatever that is."""
    try:
        result = await make()
    except asyncio.CancelledError:
        future.fail(CancelledError())
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit too: it is for the caller, not for the loop
        future.fail(error)
    else:
        future.resolve(result)
