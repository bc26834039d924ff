"""Operations leave in call order with consecutive numbers, and what happens to one never holds up the next."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import pytest

from tests.support.training import KEY, PATIENCE, VirtualClock
from tinsmith.client.config import Config
from tinsmith.client.connection import Connection
from tinsmith.client.futures import APIFuture, run
from tinsmith.client.retry import Retry
from tinsmith.client.turns import Operation, TurnQueue
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    ClientClosedError,
    RateLimitError,
    ResponseSummary,
    UnconfirmedOperationError,
    WouldDeadlockError,
    status_error_class,
)
from tinsmith.types import UntypedAPIFuture


def status_error(status: int, body: object = None) -> APIStatusError:
    body = {"detail": "scripted"} if body is None else body
    return status_error_class(status)(f"Error code: {status}", ResponseSummary(status, {}), body)


def lost() -> APIConnectionError:
    return APIConnectionError(message="the answer was lost")


def never_connected() -> APIConnectionError:
    error = APIConnectionError(message="connection refused")
    error.__cause__ = ConnectionError()
    return error


class Wire:
    """Takes what the queue sends. `errors` is what it raises by content; `gates` what must be set before it answers."""

    def __init__(self) -> None:
        self.arrived: list[tuple[int, str]] = []
        self.errors: dict[str, list[Exception]] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self._arrival = threading.Condition()

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.arrived]

    def take(self, number: int, content: str) -> None:
        with self._arrival:
            self.arrived.append((number, content))
            self._arrival.notify_all()

    def wait_for(self, content: str) -> None:
        with self._arrival:
            assert self._arrival.wait_for(lambda: any(content == each for _, each in self.arrived), PATIENCE)


class Parcel:
    def __init__(self, wire: Wire, content: str) -> None:
        self._wire = wire
        self._content = content

    @property
    def fingerprint(self) -> object:
        return self._content

    async def send(self, seq_id: int, retry: Retry) -> UntypedAPIFuture:
        self._wire.take(seq_id, self._content)
        if self._content in self._wire.gates:
            await self._wire.gates[self._content].wait()
        errors = self._wire.errors.get(self._content)
        if errors:
            raise errors.pop(0)
        return UntypedAPIFuture(request_id=f"{seq_id}:{self._content}")


async def num_before() -> int:
    return 0


class Bench:
    """A queue and the wire behind it."""

    def __init__(self, connection: Connection, max_inflight: int | None = None) -> None:
        self.connection = connection
        self.wire = Wire()
        self.queue = TurnQueue(connection, max_inflight, num_before)

    def operation(self, *contents: str, in_parallel: bool = False, byte_cost: int = 0) -> Operation[list[str]]:
        async def prepare() -> Sequence[Parcel]:
            return [Parcel(self.wire, content) for content in contents]

        async def collect(answers: Sequence[UntypedAPIFuture]) -> list[str]:
            return [answer.request_id for answer in answers]

        return Operation(prepare=prepare, collect=collect, byte_cost=byte_cost, in_parallel=lambda: in_parallel)

    def add(self, *contents: str, in_parallel: bool = False) -> APIFuture[list[str]]:
        return self.queue.add(self.operation(*contents, in_parallel=in_parallel))

    def on_loop(self, function: Any, *args: Any) -> Any:
        async def call() -> Any:
            return function(*args)

        return run(call).result(PATIENCE)

    def gate(self, content: str) -> asyncio.Event:
        event = self.wire.gates[content] = asyncio.Event()
        return event

    def open(self, gate: asyncio.Event) -> None:
        self.on_loop(gate.set)


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    monkeypatch.setattr(Connection, "clock", VirtualClock())
    connection = Connection(Config(base_url="http://127.0.0.1:1", api_key=KEY, telemetry=False))
    yield connection
    run(connection.close).result(PATIENCE)


@pytest.fixture
def bench(connection: Connection) -> Bench:
    return Bench(connection)


# --- order -----------------------------------------------------------------------------------------------------------


def test_operations_of_many_threads_get_consecutive_numbers_in_the_order_of_their_calls(bench: Bench) -> None:
    futures: list[APIFuture[list[str]]] = []
    order = threading.Lock()

    def call(thread: int) -> None:
        for index in range(50):
            with order:
                futures.append(bench.add(f"{thread}-{index}"))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = [future.result(PATIENCE)[0] for future in futures]
    assert [int(result.partition(":")[0]) for result in results] == list(range(1, 401))
    assert bench.wire.numbers == list(range(1, 401))


def test_the_chunks_of_one_call_have_consecutive_numbers_whatever_other_threads_do(bench: Bench) -> None:
    def call(thread: int) -> list[APIFuture[list[str]]]:
        return [bench.add(*(f"{thread}-{index}-{chunk}" for chunk in range(3))) for index in range(20)]

    made: list[list[APIFuture[list[str]]]] = []
    threads = [threading.Thread(target=lambda number=number: made.append(call(number))) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for future in [future for futures in made for future in futures]:
        numbers = [int(part.partition(":")[0]) for part in future.result(PATIENCE)]
        assert numbers == list(range(numbers[0], numbers[0] + 3))


def test_a_slow_preparation_keeps_its_place_and_later_ones_are_prepared_meanwhile(bench: Bench) -> None:
    first_may_go = asyncio.Event()
    prepared: list[str] = []

    async def slow() -> Sequence[Parcel]:
        await first_may_go.wait()
        return [Parcel(bench.wire, "slow")]

    async def quick() -> Sequence[Parcel]:
        prepared.append("quick")
        return [Parcel(bench.wire, "quick")]

    slow_operation, quick_operation = bench.operation(), bench.operation()
    slow_operation.prepare, quick_operation.prepare = slow, quick
    futures = [bench.queue.add(slow_operation), bench.queue.add(quick_operation)]
    bench.on_loop(lambda: None)
    assert (prepared, bench.wire.arrived) == (["quick"], [])
    bench.open(first_may_go)
    assert [future.result(PATIENCE) for future in futures] == [["1:slow"], ["2:quick"]]


def test_two_operations_added_together_have_nothing_in_between(bench: Bench) -> None:
    stop = threading.Event()

    def intrude() -> None:
        while not stop.is_set():
            bench.add("intruder").result(PATIENCE)

    intruder = threading.Thread(target=intrude)
    intruder.start()
    for index in range(50):
        bench.queue.add(bench.operation(f"second-{index}"), after=bench.operation(f"first-{index}")).result(PATIENCE)
    stop.set()
    intruder.join()
    contents = [content for _, content in bench.wire.arrived]
    for index in range(50):
        assert contents.index(f"second-{index}") == contents.index(f"first-{index}") + 1


def test_chunks_sent_together_leave_the_first_one_to_the_end(bench: Bench) -> None:
    assert bench.add("a", "b", "c", in_parallel=True).result(PATIENCE) == ["1:a", "2:b", "3:c"]
    assert sorted(bench.wire.arrived[:2]) == [(2, "b"), (3, "c")]
    assert bench.wire.arrived[2] == (1, "a")


def test_chunks_sent_one_by_one_wait_for_each_answer(bench: Bench) -> None:
    gate = bench.gate("a")
    future = bench.add("a", "b")
    bench.wire.wait_for("a")
    assert bench.wire.arrived == [(1, "a")]
    bench.open(gate)
    assert future.result(PATIENCE) == ["1:a", "2:b"]


def test_later_operations_are_sent_before_the_first_result_is_there(bench: Bench) -> None:
    never = asyncio.Event()
    first = bench.operation("a")

    async def collect(answers: Sequence[UntypedAPIFuture]) -> list[str]:
        await never.wait()
        return []

    first.collect = collect
    pending = bench.queue.add(first)
    assert bench.add("b").result(PATIENCE) == ["2:b"]
    assert not pending.done()
    pending.cancel()


def test_with_one_in_flight_each_result_is_waited_for(connection: Connection) -> None:
    bench = Bench(connection, max_inflight=1)
    done = asyncio.Event()
    first = bench.operation("a")

    async def collect(answers: Sequence[UntypedAPIFuture]) -> list[str]:
        await done.wait()
        return ["first"]

    first.collect = collect
    one, two = bench.queue.add(first), bench.add("b")
    bench.wire.wait_for("a")
    bench.on_loop(lambda: None)
    assert bench.wire.arrived == [(1, "a")]
    bench.open(done)
    assert (one.result(PATIENCE), two.result(PATIENCE)) == (["first"], ["2:b"])


def test_with_one_in_flight_a_failure_or_a_cancellation_frees_the_place(connection: Connection) -> None:
    bench = Bench(connection, max_inflight=1)
    bench.wire.errors["refused"] = [status_error(400)]
    hopeless = bench.operation("hopeless")

    async def collect(answers: Sequence[UntypedAPIFuture]) -> list[str]:
        await asyncio.Event().wait()
        return []

    hopeless.collect = collect
    refused, waiting, never_sent = bench.add("refused"), bench.queue.add(hopeless), bench.add("never sent")
    with pytest.raises(APIStatusError):
        refused.result(PATIENCE)
    never_sent.cancel()
    bench.wire.wait_for("hopeless")
    waiting.cancel()
    assert bench.add("next").result(PATIENCE) == ["3:next"]


# --- cancelling ------------------------------------------------------------------------------------------------------


def test_cancelled_before_its_turn_it_is_not_sent_and_leaves_no_hole(bench: Bench) -> None:
    gate = bench.gate("a")
    futures = [bench.add("a"), bench.add("b"), bench.add("c")]
    bench.wire.wait_for("a")
    assert futures[1].cancel()
    bench.open(gate)
    assert futures[2].result(PATIENCE) == ["2:c"]
    assert bench.wire.arrived == [(1, "a"), (2, "c")]


def test_cancelled_at_once_it_is_not_even_prepared(bench: Bench) -> None:
    prepared = []

    async def prepare() -> Sequence[Parcel]:
        prepared.append(True)
        return [Parcel(bench.wire, "a")]

    async def cancel_right_away() -> APIFuture[list[str]]:
        operation = bench.operation()
        operation.prepare = prepare
        future = bench.queue.add(operation)
        future.cancel()
        return future

    future = run(cancel_right_away).result(PATIENCE)
    assert future.cancelled()
    assert bench.add("next").result(PATIENCE) == ["1:next"]


def test_cancelled_while_it_is_prepared_it_is_interrupted(bench: Bench) -> None:
    began, interrupted = threading.Event(), threading.Event()

    async def prepare() -> Sequence[Parcel]:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            interrupted.set()
        return []

    operation = bench.operation()
    operation.prepare = prepare
    future = bench.queue.add(operation)
    assert began.wait(PATIENCE)
    future.cancel()
    assert bench.add("next").result(PATIENCE) == ["1:next"]
    assert interrupted.wait(PATIENCE)


def test_cancelled_while_it_is_sent_it_goes_on_to_be_sent_and_the_next_follows(bench: Bench) -> None:
    gate = bench.gate("a")
    future = bench.add("a", "b")
    bench.wire.wait_for("a")
    future.cancel()
    following = bench.add("c")
    bench.open(gate)
    assert following.result(PATIENCE) == ["3:c"]
    assert bench.wire.arrived == [(1, "a"), (2, "b"), (3, "c")]


def test_a_cancelled_operation_gives_back_its_bytes(bench: Bench) -> None:
    budget = bench.connection.account.training_bytes
    before = budget._balance
    gate = bench.gate("a")
    futures = [bench.add("a"), *(bench.queue.add(bench.operation("x", byte_cost=10)) for _ in range(3))]
    bench.wire.wait_for("a")
    for future in futures[1:]:
        future.cancel()
    bench.open(gate)
    bench.add("last").result(PATIENCE)
    assert budget._balance == before


# --- failures and numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("bad datum"), SystemExit(3), asyncio.CancelledError()])
def test_what_fails_in_preparation_uses_no_number_and_is_known_at_once(bench: Bench, error: BaseException) -> None:
    async def prepare() -> Sequence[Parcel]:
        raise error

    gate = bench.gate("a")
    first = bench.add("a")
    operation = bench.operation()
    operation.prepare = prepare
    failed = bench.queue.add(operation)
    with pytest.raises((type(error), CancelledError)):
        failed.result(PATIENCE)
    assert not first.done()  # it did not have to wait for its turn to fail
    bench.open(gate)
    assert bench.add("next").result(PATIENCE) == ["2:next"]


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
def test_what_fails_in_collection_reaches_its_future_alone(bench: Bench, error: BaseException) -> None:
    async def collect(answers: Sequence[UntypedAPIFuture]) -> list[str]:
        raise error

    operation = bench.operation("a")
    operation.collect = collect
    failed, following = bench.queue.add(operation), bench.add("b")
    with pytest.raises(type(error)):
        failed.result(PATIENCE)
    assert following.result(PATIENCE) == ["2:b"]


def test_what_fails_in_the_turn_itself_reaches_its_future_alone(bench: Bench) -> None:
    def broken() -> bool:
        raise ZeroDivisionError

    operation = bench.operation("a", "b")
    operation.in_parallel = broken
    failed, following = bench.queue.add(operation), bench.add("c")
    with pytest.raises(ZeroDivisionError):
        failed.result(PATIENCE)
    assert following.result(PATIENCE) == ["1:c"]


@pytest.mark.parametrize(
    ("error", "next_number"),
    [
        (status_error(400), 2),
        (status_error(422), 2),
        (status_error(404), 2),
        (status_error(401), 2),
        (status_error(402), 1),
        (status_error(429), 1),
        (status_error(413, "<html>too large</html>"), 1),
        (status_error(302, "<html>elsewhere</html>"), 1),
        (never_connected(), 1),
        (ClientClosedError("closed"), 1),
    ],
    ids=lambda value: getattr(value, "args", [value])[0],
)
def test_a_number_is_used_up_by_a_refusal_of_the_server_and_by_nothing_less(
    bench: Bench, error: Exception, next_number: int
) -> None:
    bench.wire.errors["a"] = [error]
    with pytest.raises(type(error)):
        bench.add("a").result(PATIENCE)
    assert bench.add("b").result(PATIENCE) == [f"{next_number}:b"]


@pytest.mark.parametrize(
    "error",
    [
        lost(),
        status_error(503),
        status_error(409),
        status_error(408),
        APIResponseValidationError(ResponseSummary(200, {}), "<html>"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_after_a_lost_answer_the_same_operation_heals_and_another_fails_at_once(bench: Bench, error: APIError) -> None:
    bench.wire.errors["a"] = [error, error]
    with pytest.raises(type(error)):
        bench.add("a").result(PATIENCE)
    with pytest.raises(UnconfirmedOperationError, match=r"Operation 1 .* Repeat exactly that operation"):
        bench.add("b").result(PATIENCE)
    with pytest.raises(type(error)):  # lost again: still nothing else may be sent
        bench.add("a").result(PATIENCE)
    with pytest.raises(UnconfirmedOperationError):
        bench.add("a", "b").result(PATIENCE)
    assert bench.add("a").result(PATIENCE) == ["1:a"]
    assert bench.add("b").result(PATIENCE) == ["2:b"]
    assert bench.wire.arrived == [(1, "a"), (1, "a"), (1, "a"), (2, "b")]


def test_an_earlier_try_that_may_have_arrived_is_not_forgotten(bench: Bench) -> None:
    class Doubtful(Parcel):
        async def send(self, seq_id: int, retry: Retry) -> UntypedAPIFuture:
            retry.pause_after(lost())
            raise status_error(429)

    async def prepare() -> Sequence[Parcel]:
        return [Doubtful(bench.wire, "a")]

    operation = bench.operation()
    operation.prepare = prepare
    with pytest.raises(RateLimitError):
        bench.queue.add(operation).result(PATIENCE)
    with pytest.raises(UnconfirmedOperationError):
        bench.add("b").result(PATIENCE)


@pytest.mark.parametrize(("in_parallel", "next_number"), [(True, 4), (False, 3)])
def test_one_refused_chunk_of_three_fails_the_call_and_the_next_goes_on(
    bench: Bench, in_parallel: bool, next_number: int
) -> None:
    bench.wire.errors["b"] = [status_error(400)]
    with pytest.raises(APIStatusError) as caught:
        bench.add("a", "b", "c", in_parallel=in_parallel).result(PATIENCE)
    assert "of the call's 3 chunks were accepted" in caught.value.__notes__[0]
    assert bench.add("next").result(PATIENCE) == [f"{next_number}:next"]


def test_a_chunk_that_was_not_accepted_leaves_a_hole_that_only_the_same_call_fills(bench: Bench) -> None:
    bench.wire.errors["b"] = [status_error(429)]
    with pytest.raises(RateLimitError):
        bench.add("a", "b", "c", in_parallel=True).result(PATIENCE)
    with pytest.raises(UnconfirmedOperationError):
        bench.add("next").result(PATIENCE)
    assert bench.add("a", "b", "c", in_parallel=True).result(PATIENCE) == ["1:a", "2:b", "3:c"]
    assert bench.add("next").result(PATIENCE) == ["4:next"]


def test_one_by_one_a_chunk_that_was_not_accepted_leaves_its_number_to_the_next(bench: Bench) -> None:
    bench.wire.errors["b"] = [status_error(429)]
    with pytest.raises(RateLimitError):
        bench.add("a", "b", "c").result(PATIENCE)
    assert bench.add("next").result(PATIENCE) == ["2:next"]


def test_an_operation_without_requests_uses_no_number(bench: Bench) -> None:
    assert bench.add().result(PATIENCE) == []
    assert bench.add("a").result(PATIENCE) == ["1:a"]


# --- user code, memory, closing --------------------------------------------------------------------------------------


def test_user_code_that_would_wait_for_its_own_queue_is_told_so(bench: Bench) -> None:
    with bench.queue.user_code(), pytest.raises(WouldDeadlockError, match="custom loss"):
        bench.add("a")
    assert bench.add("a").result(PATIENCE) == ["1:a"]


def test_bodies_that_wait_are_bounded_and_those_behind_are_admitted_when_they_are_sent(bench: Bench) -> None:
    budget = bench.connection.account.training_bytes
    bench.on_loop(budget.resize, 100)
    gate = bench.gate("a")
    futures = [bench.queue.add(bench.operation(name, byte_cost=80)) for name in "abcd"]
    bench.wire.wait_for("a")
    end = time.monotonic() + PATIENCE
    while budget._balance == 100 - 80 and time.monotonic() < end:  # "b" may be on its way
        time.sleep(0.001)
    assert budget._balance == 100 - 80 - 80  # one more may overdraw; the others have not been encoded
    bench.open(gate)
    assert [future.result(PATIENCE)[0] for future in futures] == ["1:a", "2:b", "3:c", "4:d"]
    assert budget._balance == 100


def test_while_its_result_is_awaited_an_operation_no_longer_holds_its_data(bench: Bench) -> None:
    class Data: ...

    def start() -> tuple[weakref.ref[Data], APIFuture[list[str]]]:
        data = Data()

        async def prepare() -> Sequence[Parcel]:
            assert data is not None
            return [Parcel(bench.wire, "a")]

        async def collect(answers: Sequence[UntypedAPIFuture]) -> list[str]:
            await asyncio.Event().wait()
            return []

        return weakref.ref(data), bench.queue.add(Operation(prepare=prepare, collect=collect))

    reference, future = start()
    bench.add("b").result(PATIENCE)
    gc.collect()
    assert reference() is None
    future.cancel()


@pytest.mark.parametrize("max_inflight", [None, 1])
def test_closing_fails_operations_in_every_stage_and_gives_back_their_bytes(
    connection: Connection, max_inflight: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(connection, max_inflight)
    budget = connection.account.training_bytes
    before = budget._balance

    async def for_ever(*_: object) -> Any:
        await asyncio.Event().wait()

    collecting, sending, preparing = (bench.operation(name, byte_cost=7) for name in ("c", "s", "p"))
    collecting.collect = for_ever
    preparing.prepare = for_ever
    bench.gate("s")
    operations = [collecting, sending, preparing, bench.operation("w", byte_cost=7)]
    futures = [bench.queue.add(operation) for operation in operations]
    bench.wire.wait_for("c" if max_inflight else "s")
    bench.on_loop(lambda: None)
    run(connection.close).result(PATIENCE)
    for future in futures:
        with pytest.raises(ClientClosedError):
            future.result(PATIENCE)
    with pytest.raises(ClientClosedError):
        bench.add("late")
    assert budget._balance == before
    gc.collect()
    bench.on_loop(lambda: None)
    assert not caplog.records
