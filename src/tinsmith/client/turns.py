"""Turn-taking: the operations of one model leave in the order in which they were called, with consecutive numbers.

An operation passes through four stages:

1. `add`      on the caller's thread; this fixes its place.
2. prepare    off the loop, as soon as it is added and the model is there: the body is encoded while earlier operations
              are still being sent.
3. its turn   on the loop: it gets the next number (or numbers, one per chunk) and is sent. Nothing else of this
              model is sent meanwhile, so a slow submission delays the ones behind it; encoding does not.
4. collect    its result is polled for, while later operations take their turns.

A number is given out at the turn, so an operation that fails or is cancelled before leaves no hole. One that is
cancelled while it is being sent goes on to be sent, and only the wait for its result ends. What a submission does to
its number depends on the answer:

==========================================  =======================================================================
accepted                                    taken
refused by the server (4xx with JSON)       taken: the server counts it as failed
not accepted (402, 429, no connection, no   free: the next operation gets it
token, a proxy's own answer)
no answer, 5xx, an answer without sense     unknown: the server may or may not have the operation
==========================================  =======================================================================

With an unknown number, repeating the very same operation is safe, because the server recognises the number; anything
else would build on an unknown state and is refused with `UnconfirmedOperationError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tinsmith.client.connection import TOKEN_PATH, Connection, closed_error
from tinsmith.client.futures import APIFuture, settle
from tinsmith.client.retry import Retry, may_have_arrived
from tinsmith.errors import APIStatusError, UnconfirmedOperationError, WouldDeadlockError
from tinsmith.types import UntypedAPIFuture

T = TypeVar("T")

_user_code_of: contextvars.ContextVar[TurnQueue | None] = contextvars.ContextVar("_user_code_of", default=None)


class Submission(Protocol):
    """One request of an operation, encoded but for its number."""

    @property
    def fingerprint(self) -> object:
        """Equal for equal requests, whatever their number."""

    async def send(self, seq_id: int, retry: Retry) -> UntypedAPIFuture: ...


class Operation(Generic[T]):
    """`prepare` gives the submissions, possibly none; `collect` makes the result of the answers to them."""

    def __init__(
        self,
        *,
        prepare: Callable[[], Coroutine[Any, Any, Sequence[Submission]]],
        collect: Callable[[Sequence[UntypedAPIFuture]], Coroutine[Any, Any, T]],
        byte_cost: int = 0,
        in_parallel: Callable[[], bool] = lambda: False,
        runs_user_code: bool = False,
    ) -> None:
        self.future: APIFuture[T] = APIFuture()
        self.prepare = prepare
        self.collect = collect
        self.byte_cost = byte_cost
        self.reserved_bytes = 0
        self.runs_user_code = runs_user_code
        self.in_parallel = in_parallel
        """Whether several submissions may be sent at once; asked at the turn, when the server's flags are known."""
        self.stage: asyncio.Task[Any] | None = None
        """What cancelling interrupts: the preparation or the collection. Sending is never interrupted."""


class _Number(enum.Enum):
    TAKEN = "the server knows it"
    FREE = "the server does not know it"
    UNKNOWN = "the server may know it"


class _Sent(NamedTuple):
    number: _Number
    answer: UntypedAPIFuture | None = None
    error: Exception | None = None


class _Unconfirmed(NamedTuple):
    first_number: int
    fingerprints: list[object]
    error: Exception


class TurnQueue:
    """The operations of one model. `add` may be called from any thread; all else happens on the loop."""

    def __init__(
        self, connection: Connection, max_inflight: int | None, num_before: Callable[[], Awaitable[int]]
    ) -> None:
        """`num_before` waits until there is a model, and tells how many operations it has had by then."""
        self._connection = connection
        self._loop = connection.loop
        self._num_before = num_before
        self._next_number = 1
        self._waiting: deque[Operation[Any]] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._unconfirmed: _Unconfirmed | None = None
        self._user_code: asyncio.Task[Any] | None = None
        """The preparation of the latest operation that runs a function of the user's."""
        self._slots = asyncio.Semaphore(max_inflight) if max_inflight else None
        self._entrance = asyncio.Lock()

    def add(self, operation: Operation[T], *, after: Operation[Any] | None = None) -> APIFuture[T]:
        """Fixes the place of an operation. With `after` the two go together: nothing comes in between."""
        self._connection.check_open()
        self.check_can_wait()
        self._loop.post(self._accept, [operation] if after is None else [after, operation])
        return operation.future

    def check_can_wait(self) -> None:
        """Not in a function of the user's for which whatever is added waits."""
        if _user_code_of.get() is self:
            raise WouldDeadlockError(
                "A custom loss called an operation of the training client that is computing it, or a sampling client "
                "that this one has yet to make. That could only be done after the loss is known; do it before, or use "
                "another client for it."
            )

    @contextlib.contextmanager
    def user_code(self) -> Iterator[None]:
        """Marks a function of the user for which an operation of this queue waits."""
        token = _user_code_of.set(self)
        try:
            yield
        finally:
            _user_code_of.reset(token)

    # Preparing

    def _accept(self, operations: Sequence[Operation[Any]]) -> None:
        for operation in operations:
            operation.stage = self._loop.start_task(self._prepare(operation, self._user_code))
            if operation.runs_user_code:
                self._user_code = operation.stage
            operation.future.when_cancelled(functools.partial(self._loop.post, self._interrupt, operation))
            self._waiting.append(operation)
        if self._runner is None or self._runner.done():
            self._runner = self._loop.start_task(self._run())

    def _interrupt(self, operation: Operation[Any]) -> None:
        if operation.stage is not None:
            self._loop.cancel_soon(operation.stage)

    async def _prepare(
        self, operation: Operation[Any], user_code: asyncio.Task[Any] | None
    ) -> Sequence[Submission] | None:
        """Gives what is to be sent, or None if it cannot be; then the future knows why."""
        try:
            return await self._connection.guard(self._encoded(operation, user_code))
        except BaseException as error:  # noqa: BLE001 - it reaches the future
            self._give_up(operation, error)
            return None

    async def _encoded(self, operation: Operation[Any], user_code: asyncio.Task[Any] | None) -> Sequence[Submission]:
        # One after the other: whoever had bytes before its turn came would keep them from those whose turn is first.
        async with self._entrance:
            self._next_number = max(self._next_number, 1 + await self._num_before())
            # The user's function may wait for another client of the account, which needs bytes itself: so nothing that
            # has to wait for the function may hold any.
            if user_code is not None and not user_code.done():
                await asyncio.wait([user_code])
            # Bodies that wait to be sent are bounded in bytes, so that many large calls do not fill the memory.
            await self._connection.account.training_bytes.acquire(operation.byte_cost)
            operation.reserved_bytes = operation.byte_cost
        return await operation.prepare()

    def _release(self, operation: Operation[Any]) -> None:
        self._connection.account.training_bytes.release(operation.reserved_bytes)
        operation.reserved_bytes = 0

    def _give_up(self, operation: Operation[Any], error: BaseException) -> None:
        self._release(operation)
        operation.future.fail(error)

    # Taking turns

    async def _run(self) -> None:
        with self._connection.tracked():
            while self._waiting:
                await self._settle_turn(self._waiting.popleft())

    async def _settle_turn(self, operation: Operation[Any]) -> None:
        """Whatever goes wrong in a turn concerns its own future alone, unless the client is being closed."""
        try:
            await self._take_turn(operation)
        except asyncio.CancelledError:
            for each in (operation, *self._waiting):
                self._give_up(each, closed_error())
            raise
        except Exception as error:  # noqa: BLE001 - it reaches the future
            self._connection.report(error)
            self._give_up(operation, error)

    async def _take_turn(self, operation: Operation[Any]) -> None:
        assert operation.stage is not None
        await asyncio.wait([operation.stage])
        submissions = operation.stage.result()
        operation.stage = None
        if submissions is None:
            return
        if self._slots is not None:
            await self._slots.acquire()
        try:
            answers = None if operation.future.cancelled() else await self._send(operation, submissions)
        except BaseException:
            self._free_slot()
            raise
        self._release(operation)
        if answers is None or operation.future.cancelled():
            self._free_slot()
        else:
            self._start_collecting(operation, answers)

    def _free_slot(self, _: object = None) -> None:
        if self._slots is not None:
            self._slots.release()

    def _start_collecting(self, operation: Operation[T], answers: Sequence[UntypedAPIFuture]) -> None:
        future, collect, guard = operation.future, operation.collect, self._connection.guard
        if answers:
            future.request_id = answers[0].request_id
        task = self._loop.start_task(settle(lambda: guard(collect(answers)), future))
        task.add_done_callback(self._free_slot)
        # From here on the future no longer refers to the operation, whose data may be large.
        future.when_cancelled(lambda: self._loop.cancel_soon(task))

    # Sending

    async def _send(self, operation: Operation[Any], submissions: Sequence[Submission]) -> list[UntypedAPIFuture]:
        first = self._first_number(submissions)
        in_parallel = len(submissions) > 1 and operation.in_parallel()
        sent = await (self._send_together if in_parallel else self._send_one_by_one)(submissions, first)
        answers = [each.answer for each in sent if each.answer is not None]
        errors = [each.error for each in sent if each.error is not None]
        num_taken = sum(each.number is _Number.TAKEN for each in sent)
        if _is_hole_possible([each.number for each in sent]):
            self._unconfirmed = _Unconfirmed(first, [each.fingerprint for each in submissions], errors[0])
        else:
            self._next_number = first + num_taken
        if errors and answers:
            errors[0].add_note(f"{len(answers)} of the call's {len(submissions)} chunks were accepted, and count.")
        if errors:
            raise errors[0]
        return answers

    def _first_number(self, submissions: Sequence[Submission]) -> int:
        if self._unconfirmed is None:
            return self._next_number
        first, fingerprints, error = self._unconfirmed
        if [each.fingerprint for each in submissions] != fingerprints:
            raise UnconfirmedOperationError(
                f"Operation {first} of this model was sent but never confirmed ({error}), so what the model has seen "
                "is not known. Repeat exactly that operation, or continue from a checkpoint in a new training client. "
                "The second half of a custom loss cannot be repeated, since its forward pass would come first."
            ) from error
        self._unconfirmed = None
        return first

    async def _send_one_by_one(self, submissions: Sequence[Submission], first: int) -> list[_Sent]:
        """Stops at the first failure: what was not sent has used no number."""
        sent: list[_Sent] = []
        for number, submission in enumerate(submissions, first):
            sent.append(await self._send_one(submission, number))
            if sent[-1].error is not None:
                break
        return sent

    async def _send_together(self, submissions: Sequence[Submission], first: int) -> list[_Sent]:
        """The first one last: servers start on it, and then find the others there already.

        All are sent even if one fails, because a number that never arrives would hold up the server for ever.
        """
        later = [self._send_one(each, number) for number, each in enumerate(submissions[1:], first + 1)]
        sent = await asyncio.gather(*later)
        return [await self._send_one(submissions[0], first), *sent]

    async def _send_one(self, submission: Submission, number: int) -> _Sent:
        retry = Retry(self._connection.retry_policy(), clock=self._connection.clock)
        try:
            return _Sent(_Number.TAKEN, answer=await submission.send(number, retry))
        except Exception as error:  # noqa: BLE001 - judged by the caller
            if _is_refusal(error):
                return _Sent(_Number.TAKEN, error=error)
            in_doubt = retry.in_doubt or may_have_arrived(error)
            return _Sent(_Number.UNKNOWN if in_doubt else _Number.FREE, error=error)


def _is_refusal(error: Exception) -> bool:
    """Whether the server itself refused this very request. What is not JSON comes from something in between."""
    if not isinstance(error, APIStatusError) or not isinstance(error.body, dict | list):
        return False
    was_sent = error.request is None or not error.request.url.endswith(TOKEN_PATH)
    return was_sent and 400 <= error.status_code < 500 and error.status_code not in (402, 408, 409, 429)


def _is_hole_possible(numbers: Sequence[_Number]) -> bool:
    """Whether a number may be missing at the server below one that it knows or may know."""
    num_taken = numbers.count(_Number.TAKEN)
    return _Number.UNKNOWN in numbers or _Number.TAKEN in numbers[num_taken:]
