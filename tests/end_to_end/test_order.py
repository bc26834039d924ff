"""The order of a model's operations, as a recorded history: they are sent by several threads in any order, some twice,
some with another body, some late, and what comes of it is what the same operations give one after the other."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from tests.end_to_end.serving import Answer, ServerProcess
from tinsmith.types import Datum, ModelInput
from tinsmith.wire import proto

MODEL = "tiny/model-1"
WAIT_SECONDS = 60.0
_PROTOBUF = {"content-type": "application/x-protobuf"}


class Data(NamedTuple):
    """A forward and backward pass over tokens from `first` on."""

    first: int


class Step(NamedTuple):
    rate: float


class Refused(NamedTuple):
    """A pass over a token that does not exist: it is refused, and its number is used up."""


Operation: TypeAlias = Data | Step | Refused


class Sent(NamedTuple):
    """One line of the schedule: which operation, by which thread, and as what."""

    number: int
    thread: int
    as_what: Literal["first", "repeated", "another body"]


class Schedule(NamedTuple):
    operations: tuple[Operation, ...]
    sent: tuple[Sent, ...]


OPERATIONS = st.one_of(
    st.builds(Data, st.integers(1, 20)),
    st.builds(Step, st.sampled_from([0.001, 0.01])),
    st.just(Refused()),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    operations = tuple(draw(st.lists(OPERATIONS, min_size=2, max_size=8)))
    numbers = st.sampled_from(range(1, len(operations) + 1))
    again = draw(st.lists(st.tuples(numbers, st.sampled_from(["repeated", "another body"])), max_size=5))
    lines = [(number, "first") for number in range(1, len(operations) + 1)] + again
    threads = st.integers(0, 2)
    return Schedule(
        operations,
        tuple(Sent(number, draw(threads), as_what) for number, as_what in draw(st.permutations(lines))),  # type: ignore[arg-type]
    )


class Outcome(NamedTuple):
    """What a client can see of a model: its results by number, and its weights in the end."""

    results: dict[int, Any]
    weights: bytes


class Trained:
    """A model on the server, and the history of what was sent to it."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        session = server.post("create_session", {"tags": [], "sdk_version": "1"}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 2, "seed": 7}}
        self.model_id: str = server.result(server.post("create_model", body))["model_id"]
        self.history: list[tuple[Sent, Answer]] = []
        self._arrived: defaultdict[int, threading.Event] = defaultdict(threading.Event)

    def play(self, schedule: Schedule) -> Outcome:
        """Send everything, each thread its lines in their order, and wait for all results."""
        for number in range(1, len(schedule.operations) + 1):
            _ = self._arrived[number]
        threads = [threading.Thread(target=self._send_all, args=(schedule, thread)) for thread in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), "a submission was not answered"
        return self._outcome(len(schedule.operations))

    def play_in_order(self, operations: Sequence[Operation]) -> Outcome:
        """One by one: each is sent when the result of the one before is there."""
        for number, operation in enumerate(operations, start=1):
            self._server.result(self.submit(number, operation))
        return self._outcome(len(operations))

    def _send_all(self, schedule: Schedule, thread: int) -> None:
        mine = [line for line in schedule.sent if line.thread == thread]
        # Another body must not come first; where its first would be sent by this thread later, it waits for that.
        for line in sorted(mine, key=lambda line: line.as_what == "another body"):
            self._send(line, schedule.operations[line.number - 1])

    def _send(self, line: Sent, operation: Operation) -> None:
        if line.as_what == "another body":
            assert self._arrived[line.number].wait(WAIT_SECONDS)
            operation = _altered(operation)
        self.history.append((line, self.submit(line.number, operation)))
        if line.as_what == "first":
            self._arrived[line.number].set()

    def submit(self, number: int, operation: Operation) -> Answer:
        if isinstance(operation, Step):
            # With the usual eps the sign of a rounding error would be worth a full step.
            params = {"learning_rate": operation.rate, "eps": 1e-6}
            body = {"model_id": self.model_id, "seq_id": number, "adam_params": params}
            return self._server.post("optim_step", body)
        first = operation.first if isinstance(operation, Data) else 10**6
        tokens = list(range(first, first + 5))
        inputs: dict[str, Any] = {"target_tokens": tokens, "weights": [1.0] * 5}
        prepared = proto.prepare_forward_backward([Datum(ModelInput.from_ints(tokens), inputs)], "cross_entropy", None)
        return self._server.post("forward_backward", prepared.finish(self.model_id, number), headers=_PROTOBUF)

    def _outcome(self, operations: int) -> Outcome:
        results = {number: self.result(number) for number in range(1, operations + 1)}
        return Outcome(results, self._weights(operations + 1))

    def result(self, number: int) -> Any:
        return self._server.result(Answer(200, json.dumps({"request_id": f"{self.model_id}:{number}"}).encode()))

    def _weights(self, number: int) -> bytes:
        body = {"model_id": self.model_id, "seq_id": number, "path": "end"}
        assert "path" in self._server.result(self._server.post("save_weights_external", body))
        place = f"/api/v1/training_runs/{self.model_id}/checkpoints/external_weights/end/external_weights_urls"
        urls = self._server.call("GET", place).json()["urls"]
        with urllib.request.urlopen(urls["adapter_model.safetensors"], timeout=WAIT_SECONDS) as response:
            content: bytes = response.read()
            return content


def assert_alike(ours: Outcome, theirs: Outcome) -> None:
    """But for the last digits: passes that arrive together are computed together, and their sums rounded otherwise.

    Operations in another order, one too many or one too few change a thousand times as much.
    """
    assert ours.results.keys() == theirs.results.keys()
    for number, result in ours.results.items():
        assert _numbers(result) == pytest.approx(_numbers(theirs.results[number]), rel=1e-4, abs=1e-6)
        assert _without_numbers(result) == _without_numbers(theirs.results[number])
    found, expected = load(ours.weights), load(theirs.weights)
    assert found.keys() == expected.keys()
    for name, weights in found.items():
        np.testing.assert_allclose(weights, expected[name], rtol=0, atol=1e-6, err_msg=name)


def _numbers(result: Any) -> list[float]:
    if isinstance(result, dict):
        return [number for _, value in sorted(result.items()) for number in _numbers(value)]
    if isinstance(result, list):
        return [number for value in result for number in _numbers(value)]
    return [result] if isinstance(result, float) else []


def _without_numbers(result: Any) -> Any:
    if isinstance(result, dict):
        return {key: _without_numbers(value) for key, value in result.items()}
    if isinstance(result, list):
        return [_without_numbers(value) for value in result]
    return None if isinstance(result, float) else result


def _altered(operation: Operation) -> Operation:
    """The same kind of operation with another body."""
    return Step(operation.rate * 3) if isinstance(operation, Step) else Data(30)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=schedules())
def test_any_interleaving_gives_the_sequential_result(server: ServerProcess, schedule: Schedule) -> None:
    expected = Trained(server).play_in_order(schedule.operations)
    trained = Trained(server)
    assert_alike(trained.play(schedule), expected)
    assert len(trained.history) == len(schedule.sent)
    for line, answer in trained.history:
        assert (answer.status, answer.json()["request_id"]) == (200, f"{trained.model_id}:{line.number}"), line


def test_a_number_that_is_another_kind_of_operation_already_is_refused(server: ServerProcess) -> None:
    trained = Trained(server)
    first = trained.play_in_order([Data(1), Step(0.01)])
    refused = trained.submit(1, Step(0.01))
    assert refused.status == 422
    assert "is a forward_backward already" in refused.json()["detail"]
    assert {number: trained.result(number) for number in first.results} == first.results
