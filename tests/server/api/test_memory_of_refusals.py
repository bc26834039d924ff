"""What was sent with a request that is refused is gone with the answer, and does not wait for the garbage collector."""

from __future__ import annotations

import gc
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.api.running import Answer, RunningServer
from tinsmith.server.routes._call import forget_way
from tinsmith.server.store import StoreUnavailableError
from tinsmith.types import Datum, EncodedTextChunk, ModelInput, TensorData
from tinsmith.wire import proto

SIZE = 400_000
TIMES = 2
LONG = [1] * (SIZE // 3)
NOT_DATA = [[1]] * (SIZE // 5)
NOBODY = "nobody:train:0"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with RunningServer(tmp_path) as running:
        yield running


def trained(model_id: str, number: int, data: Any = NOT_DATA) -> bytes:
    examples = {"data": data, "loss_fn": "cross_entropy"}
    return json.dumps({"model_id": model_id, "seq_id": number, "forward_backward_input": examples}).encode()


def json_of_nobody(server: RunningServer) -> Callable[[int], Answer]:
    return lambda number: server.post("forward_backward", trained(NOBODY, number))


def json_of_a_model(server: RunningServer) -> Callable[[int], Answer]:
    model_id = server.model()
    return lambda number: server.post("forward_backward", trained(model_id, number))


def protobuf(server: RunningServer) -> Callable[[int], Answer]:
    """Longer than the context of the model."""
    model_id = server.model()
    weights = TensorData(data=[1.0] * len(LONG), dtype="float32")
    inputs = {"target_tokens": TensorData(data=LONG, dtype="int64"), "weights": weights}
    datum = Datum(model_input=ModelInput(chunks=[EncodedTextChunk(tokens=LONG)]), loss_fn_inputs=inputs)
    prepared = proto.prepare_forward_backward([datum], "cross_entropy", None, forward_only=False)
    headers = {"content-type": "application/x-protobuf"}
    return lambda number: server.post("forward_backward", prepared.finish(model_id, number), headers=headers)


def half_of_a_protobuf(server: RunningServer) -> Callable[[int], Answer]:
    headers = {"content-type": "application/x-protobuf"}
    return lambda number: server.post("forward_backward", b"\x1a\xff\xff\xff\x7f" + bytes(SIZE), headers=headers)


def sample(server: RunningServer) -> Callable[[int], Answer]:
    fields = {"sampling_session_id": server.sampler(), "num_samples": 1, "prompt": {"chunks": NOT_DATA}}
    return lambda number: server.post("asample", {**fields, "sampling_params": {}, "seq_id": number})


def sample_that_is_too_long(server: RunningServer) -> Callable[[int], Answer]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": LONG}]}
    fields = {"sampling_session_id": server.sampler(), "num_samples": 1, "prompt": prompt, "sampling_params": {}}
    return lambda number: server.post("asample", {**fields, "seq_id": number})


def text_that_is_too_long(server: RunningServer) -> Callable[[int], Answer]:
    return lambda number: server.call("POST", "/v1/completions", {"model": "tiny/model-1", "prompt": LONG})


def no_json(server: RunningServer) -> Callable[[int], Answer]:
    return lambda number: server.post("forward_backward", trained(NOBODY, number)[:-1])


def database_away(server: RunningServer) -> Callable[[int], Answer]:
    model_id = server.model()
    tensor = {"data": [1] * 6, "dtype": "int64"}
    inputs = {"target_tokens": tensor, "weights": {"data": [1.0] * 6, "dtype": "float32"}}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1] * 6}]}, "loss_fn_inputs": inputs}

    def away(*args: Any, **options: Any) -> Any:
        raise StoreUnavailableError(None, None, Exception("away"))

    server.store.jobs._database.write = away  # type: ignore[method-assign]
    return lambda number: server.post("forward_backward", trained(model_id, number, [datum] * (SIZE // 150)))


KINDS = [
    json_of_nobody,
    json_of_a_model,
    protobuf,
    half_of_a_protobuf,
    sample,
    sample_that_is_too_long,
    text_that_is_too_long,
    no_json,
    database_away,
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_sent_is_gone_with_the_answer(
    server: RunningServer, kind: Callable[[RunningServer], Callable[[int], Answer]]
) -> None:
    send = kind(server)
    first = send(1)
    assert first.status >= 400 or "error" in server.result(first), first
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(2, 2 + TIMES):
            send(number)
        threading.Event().wait(0.1)  # for threads and tasks that were told last
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        gc.enable()
    assert grown < SIZE, f"{grown:,} bytes are left of {TIMES} requests"


def test_errors_that_are_the_causes_of_each_other_are_forgotten_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    for error in (first, second):
        try:
            raise error
        except ValueError:
            pass
    first.__cause__, second.__context__ = second, first
    assert forget_way(first) is first
    assert first.__traceback__ is second.__traceback__ is None
