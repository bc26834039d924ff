"""Turn-taking: the operations of one model leave in the order in which they were called, with consecutive numbers.

An operation passes through four stages:

1. `add`      on the caller's thread; this fixes its place.
2. prepare    off the loop, as soon as it is added: the body is encoded while earlier operations are still being sent.
3. its turn   on the loop: it gets the next number (or numbers, one per chunk) and is sent. Nothing else of this
              model is sent meanwhile, so a slow submission delays the ones behind it; encoding does not.
4. collect    its result is polled for, while later operations take their turns.

A number is given out at the turn, so an operation that fails or is cancelled before leaves no hole. One that the
server refuses has used its number up; the server counts it as failed. One that is cancelled while it is being sent
goes on to be sent, and only the wait for its result ends.

If every try to send an operation failed without an answer, the server may or may not have it. Repeating the very same
operation is safe then, because the server recognises the number; anything else would build on an unknown state and
is refused with `UnconfirmedOperationError`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tinsmith.client.connection import Connection, closed_error
from tinsmith.client.futures import APIFuture, settle
from tinsmith.client.retry import Action, classify
from tinsmith.errors import UnconfirmedOperationError
from tinsmith.types import UntypedAPIFuture

T = TypeVar("T")


class Submission(Protocol):
    """One request of an operation, encoded but for its number."""

    @property
    def fingerprint(self) -> bytes:
        """Equal for equal requests, whatever their number."""

    async def send(self, seq_id: int) -> UntypedAPIFuture: ...


class Operation(Generic[T]):
    def __init__(
        self,
        *,
        prepare: Callable[[], Coroutine[Any, Any, Sequence[Submission]]],
        collect: Callable[[Sequence[UntypedAPIFuture]], Coroutine[Any, Any, T]],
        byte_cost: int = 0,
        in_parallel: Callable[[], bool] = lambda: False,
    ) -> None:
        self.future: APIFuture[T] = APIFuture()
        self.prepare = prepare
        self.collect = collect
        self.byte_cost = byte_cost
        self.in_parallel = in_parallel
        """Whether several submissions may be sent at once; asked at the turn, when the server's flags are known."""
        self.stage: asyncio.Task[Any] | None = None
        """What cancelling interrupts: the preparation or the collection. Sending is never interrupted."""



class _Unconfirmed(NamedTuple):
    first_number: int
    fingerprints: list[bytes]
    error: Exception


class TurnQueue:
    """The operations of one model. `add` may be called from any thread; all else happens on the loop."""

    def __init__(self, connection: Connection, max_inflight: int | None) -> None:
        self._connection = connection
        self._loop = connection.loop
        self._next_number = 1
        self._waiting: deque[Operation[Any]] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._unconfirmed: _Unconfirmed | None = None
        self._slots = asyncio.Semaphore(max_inflight) if max_inflight else None

    def add(self, operation: Operation[T]) -> APIFuture[T]:
        self._connection.check_open()
        self._loop.post(self._accept, operation)
        return operation.future

    def _accept(self, operation: Operation[Any]) -> None:
        if operation.future.cancelled():
            return
        operation.stage = self._loop.start_task(self._connection.guard(self._prepare(operation)))
        operation.future.when_cancelled(lambda: self._loop.post(self._interrupt, operation))
        self._waiting.append(operation)
        if self._runner is None or self._runner.done():
            self._runner = self._loop.start_task(self._connection.guard(self._run()))

    def _interrupt(self, operation: Operation[Any]) -> None:
        if operation.stage is not None:
            self._loop.cancel_soon(operation.stage)

    async def _prepare(self, operation: Operation[Any]) -> Sequence[Submission]:
        budget = self._connection.account.training_bytes
        await budget.acquire(operation.byte_cost)
        try:
            return await operation.prepare()
        except BaseException:
            budget.release(operation.byte_cost)
            raise

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._take_turn(self._waiting.popleft())
        except asyncio.CancelledError:  # the client is being closed
            for operation in self._waiting:
                operation.future.fail(closed_error())
            raise

    async def _take_turn(self, operation: Operation[Any]) -> None:
        """Sends one operation. Whatever goes wrong concerns its future alone."""
        future = operation.future
        assert operation.stage is not None
        try:
            submissions = await asyncio.shield(operation.stage)
        except asyncio.CancelledError:
            if not operation.stage.cancelled():
                future.fail(closed_error())
                raise
            return
        except Exception as error:  # noqa: BLE001 - it reaches the future
            future.fail(error)
            return
        operation.stage = None
        if self._slots is not None:
            await self._slots.acquire()
        try:
            answers = [] if future.cancelled() else await self._send(submissions, operation.in_parallel())
        except asyncio.CancelledError:
            future.fail(closed_error())
            raise
        except Exception as error:  # noqa: BLE001 - it reaches the future
            self._connection.report(error)
            future.fail(error)
            answers = []
        finally:
            self._connection.account.training_bytes.release(operation.byte_cost)
        if answers and not future.cancelled():
            self._start_collecting(operation, answers)
        else:
            self._free_slot()

    def _free_slot(self, _: object = None) -> None:
        if self._slots is not None:
            self._slots.release()

    def _start_collecting(self, operation: Operation[T], answers: Sequence[UntypedAPIFuture]) -> None:
        operation.future.request_id = answers[0].request_id
        collected = self._connection.guard(operation.collect(answers))
        operation.stage = self._loop.start_task(settle(collected, operation.future))
        operation.stage.add_done_callback(self._free_slot)

    async def _send(self, submissions: Sequence[Submission], in_parallel: bool) -> list[UntypedAPIFuture]:
        first = self._first_number(submissions)
        send = _send_together if in_parallel and len(submissions) > 1 else _send_one_by_one
        outcomes = await send(submissions, first)
        self._next_number = first + len(outcomes)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        for error in errors:
            if classify(error).action in (Action.RETRY, Action.PAUSE):
                self._unconfirmed = _Unconfirmed(first, [each.fingerprint for each in submissions], error)
                raise error
        if errors:
            raise errors[0]
        return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]

    def _first_number(self, submissions: Sequence[Submission]) -> int:
        if self._unconfirmed is None:
            return self._next_number
        first, fingerprints, error = self._unconfirmed
        if [each.fingerprint for each in submissions] != fingerprints:
            raise UnconfirmedOperationError(
                f"Operation {first} of this model was sent but never confirmed ({error}), so what the model has seen is "
                "not known. Repeat exactly that operation, or continue from a checkpoint in a new training client."
            ) from error
        self._unconfirmed = None
        return first


async def _send_one_by_one(submissions: Sequence[Submission], first: int) -> list[UntypedAPIFuture | Exception]:
    """Stops at the first failure: what was not sent has used no number."""
    outcomes: list[UntypedAPIFuture | Exception] = []
    for number, submission in enumerate(submissions, first):
        outcomes.append(await _outcome(submission.send(number)))
        if isinstance(outcomes[-1], Exception):
            break
    return outcomes


async def _send_together(submissions: Sequence[Submission], first: int) -> list[UntypedAPIFuture | Exception]:
    """The first one last: servers start on it, and then find the others there already.

    All are sent even if one fails, because a number that never arrives would hold up the server for ever.
    """
    later = [_outcome(each.send(number)) for number, each in enumerate(submissions[1:], first + 1)]
    outcomes = list(await asyncio.gather(*later))
    return [await _outcome(submissions[0].send(first)), *outcomes]


async def _outcome(sending: Awaitable[UntypedAPIFuture]) -> UntypedAPIFuture | Exception:
    try:
        return await sending
    except Exception as error:  # noqa: BLE001 - judged by the caller
        return error
