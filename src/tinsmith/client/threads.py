"""Work that must not run on the event loop: encoding and decoding, and the user's own functions.

Encoding has a small pool to itself. A function of the user gets a thread of its own, because it may take any time, may
wait for other results, and may raise anything.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

NUM_CODERS = 2


async def run_coding(function: Callable[..., T], *args: Any) -> T:
    """Encodes or decodes in a thread."""
    return await asyncio.get_running_loop().run_in_executor(_coders(), functools.partial(function, *args))


@functools.cache
def _coders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=NUM_CODERS, thread_name_prefix="tinsmith-coding")


async def run_user_code(function: Callable[..., T], *args: Any) -> T:
    """Calls a function of the user in a thread and the context of the caller. Cancelling ends the wait alone."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function, *args)
        except BaseException as error:  # noqa: BLE001 - it reaches whoever waits
            loop.call_soon_threadsafe(_tell, outcome, None, _raisable(error))
        else:
            loop.call_soon_threadsafe(_tell, outcome, result, None)

    threading.Thread(target=work, name="tinsmith-user-code", daemon=True).start()
    return await outcome


def _tell(outcome: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(result)
    else:
        outcome.set_exception(error)


def _raisable(error: BaseException) -> Exception:
    """These few have a meaning of their own to asyncio: a task that raises one is taken for cancelled, or hangs."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
        return error
    stand_in = RuntimeError(f"Your function raised {type(error).__name__}({error}).")
    stand_in.__cause__ = error
    return stand_in
