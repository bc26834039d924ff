"""Bad input of every kind, over HTTP, while another model trains: each is refused with a reason, and nobody notices."""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import pytest
import zstandard

import tinsmith
from tests.end_to_end.scripts import sentence, train
from tests.end_to_end.serving import KEY, OTHER_KEY, Answer, ServerProcess
from tinsmith.types import Datum, ModelInput
from tinsmith.wire import proto

MODEL = "tiny/model-1"
PROTOBUF = {"content-type": "application/x-protobuf"}
NOT_A_NUMBER = b"\x00\x00\xc0\x7f"


class Visitor:
    """Somebody with a model, a sampler and bad manners."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self._models, self._samplers, self.steps, self._samples = count(), count(), count(1), count()
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        self.session = self.post("create_session", session).json()["session_id"]
        self.model_id = server.result(self.create_model(), key=OTHER_KEY)["model_id"]
        self.sampler_id = self.create_sampler(base_model=MODEL).json()["sampling_session_id"]

    def post(self, endpoint: str, body: Any, **headers: str) -> Answer:
        return self.server.post(endpoint, body, key=OTHER_KEY, headers=headers)

    def create_model(self, **fields: Any) -> Answer:
        body = {"session_id": self.session, "model_seq_id": next(self._models), "base_model": MODEL}
        return self.post("create_model", {**body, "lora_config": {"rank": 4}, **fields})

    def create_sampler(self, **fields: Any) -> Answer:
        body = {"session_id": self.session, "sampling_session_seq_id": next(self._samplers)}
        return self.post("create_sampling_session", {**body, **fields})

    def operation(self, endpoint: str, **fields: Any) -> Answer:
        return self.post(endpoint, {"model_id": self.model_id, "seq_id": next(self.steps), **fields})

    def data(self, *data: Datum, loss: str = "cross_entropy", config: Any = None) -> Answer:
        body = proto.prepare_forward_backward(list(data), loss, config)  # type: ignore[arg-type]
        return self.post("forward_backward", body.finish(self.model_id, next(self.steps)), **PROTOBUF)

    def json_data(self, tokens: Any, loss: str = "cross_entropy", **inputs: Any) -> Answer:
        tensors = {name: {"data": data, "dtype": dtype} for name, (data, dtype) in inputs.items()}
        datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}, "loss_fn_inputs": tensors}
        asked = {"data": [datum], "loss_fn": loss}
        return self.operation("forward_backward", forward_backward_input=asked)

    def sample(self, prompt: Any = (1, 2, 3), **params: Any) -> Answer:
        chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
        body = {"sampling_session_id": self.sampler_id, "seq_id": next(self._samples), "prompt": {"chunks": chunks}}
        return self.post("asample", {**body, "num_samples": 1, "sampling_params": params})


def datum(tokens: list[int], targets: list[int], weights: list[float]) -> Datum:
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": targets, "weights": weights})


FAILED: dict[str, tuple[Callable[[Visitor], Answer], str]] = {
    "an unknown model": (lambda visitor: visitor.create_model(base_model="no/such"), "tiny/model-1"),
    "rank 0": (lambda visitor: visitor.create_model(lora_config={"rank": 0}), "rank"),
    "a rank too large": (lambda visitor: visitor.create_model(lora_config={"rank": 257}), "256"),
    "an unknown path": (
        lambda visitor: visitor.operation("load_weights", path="tinker://no/weights/no", optimizer=False),
        "There is no checkpoint",
    ),
    "a path of the file system": (
        lambda visitor: visitor.operation("load_weights", path="/etc/passwd", optimizer=False),
        "not a checkpoint path",
    ),
    "a path that climbs": (
        lambda visitor: visitor.operation("load_weights", path="tinker://../weights/../x", optimizer=False),
        "",
    ),
    "a name that climbs": (lambda visitor: visitor.operation("save_weights", path="../../x"), "cannot name"),
    "no data": (lambda visitor: visitor.data(), "empty"),
    "an empty datum": (lambda visitor: visitor.data(datum([], [], [])), "empty"),
    "weights too short": (lambda visitor: visitor.data(datum([1, 2, 3], [2, 3, 4], [1.0])), "shape"),
    "targets too short": (lambda visitor: visitor.data(datum([1, 2, 3], [2], [1.0])), "shape"),
    "a token outside the vocabulary": (lambda visitor: visitor.data(datum([1, 99999], [2, 3], [1.0, 1.0])), "99999"),
    "a target outside it": (lambda visitor: visitor.data(datum([1, 2], [2, 99999], [1.0, 1.0])), "99999"),
    "a negative target": (lambda visitor: visitor.data(datum([1, 2], [2, -1], [1.0, 1.0])), "-1"),
    "more tokens than the context": (lambda visitor: visitor.data(datum([1] * 513, [1] * 513, [1.0] * 513)), "512"),
    "targets that are no integers": (
        lambda visitor: visitor.json_data([1], target_tokens=([1.5], "float32"), weights=([1.0], "float32")),
        "int64",
    ),
    "an unknown loss": (lambda visitor: visitor.json_data([1], loss="no_such_loss"), "no_such_loss"),
    "a loss without a formula": (lambda visitor: visitor.data(datum([1], [2], [1.0]), loss="stable_reinforce"), ""),
    "a long prompt": (lambda visitor: visitor.sample([1] * 513), "512"),
    "an unknown token in a prompt": (lambda visitor: visitor.sample([99999]), "99999"),
    "an empty prompt": (lambda visitor: visitor.sample([]), "empty"),
    "a negative temperature": (lambda visitor: visitor.sample(temperature=-1.0), "temperature"),
    "more than fits the context": (lambda visitor: visitor.sample(max_tokens=600), "max_tokens"),
    "a negative rate": (lambda visitor: visitor.operation("optim_step", adam_params={"learning_rate": -1}), "rate"),
}
"""Accepted, because the model and the number can be read, and failed with a reason in which this text appears."""

REFUSED: dict[str, tuple[Callable[[Visitor], Answer], int]] = {
    "garbage for protobuf": (lambda visitor: visitor.post("forward_backward", b"\xff\xfe garbage", **PROTOBUF), 400),
    "garbage for JSON": (lambda visitor: visitor.post("optim_step", b"{not json"), 400),
    "the wrong content type": (
        lambda visitor: visitor.post("forward_backward", b"<xml/>", **{"content-type": "text/xml"}),
        415,
    ),
    "a zstd bomb": (
        lambda visitor: visitor.post(
            "forward_backward", zstandard.compress(bytes(2**29)), **PROTOBUF, **{"content-encoding": "zstd"}
        ),
        413,
    ),
    "garbage for zstd": (
        lambda visitor: visitor.post("forward_backward", b"garbage", **PROTOBUF, **{"content-encoding": "zstd"}),
        400,
    ),
    "a model that does not exist": (
        lambda visitor: visitor.post("optim_step", {"model_id": "no", "seq_id": 1, "adam_params": {}}),
        404,
    ),
    "a sampler of a path that does not exist": (
        lambda visitor: visitor.create_sampler(model_path="tinker://no/sampler_weights/no"),
        404,
    ),
    "a sampler of a file": (lambda visitor: visitor.create_sampler(model_path="../../etc/passwd"), 422),
    "NaN in JSON": (lambda visitor: visitor.post("optim_step", b'{"model_id": NaN}'), 422),
    "no object": (lambda visitor: visitor.post("optim_step", [1, 2]), 400),
}


@pytest.fixture(scope="module")
def visitor(server: ServerProcess) -> Visitor:
    return Visitor(server)


@pytest.mark.parametrize("name", FAILED)
def test_it_fails_with_a_reason(visitor: Visitor, name: str) -> None:
    send, reason = FAILED[name]
    answer = visitor.server.result(send(visitor), key=OTHER_KEY)
    assert answer.get("category") == "user", answer
    assert reason in answer["error"]


def test_numbers_that_are_none_fail_with_a_reason(visitor: Visitor) -> None:
    good = proto.prepare_forward_backward([datum([1], [2], [0.75])], "cross_entropy", None)
    body = good.finish(visitor.model_id, next(visitor.steps))
    weight = b"\x00\x00\x40\x3f"
    assert body.count(weight) == 1
    answer = visitor.post("forward_backward", body.replace(weight, NOT_A_NUMBER), **PROTOBUF)
    assert "NaN" in visitor.server.result(answer, key=OTHER_KEY)["error"]


def test_data_whose_gradient_overflows_fail_and_leave_nothing_behind(visitor: Visitor) -> None:
    overflowing = visitor.data(datum([1, 2], [2, 3], [3e38, 3e38]))
    step = visitor.operation("optim_step", adam_params={"learning_rate": 1e-3})
    failed = visitor.server.result(overflowing, key=OTHER_KEY)
    assert failed["category"] == "user"
    assert "not finite" in failed["error"]
    assert visitor.server.result(step, key=OTHER_KEY)["metrics"]["grad_norm"] == 0.0


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_at_the_door(visitor: Visitor, name: str) -> None:
    send, status = REFUSED[name]
    answer = send(visitor)
    assert answer.status == status, answer
    assert answer.json()["detail"]


def test_a_gigabyte_is_refused_before_it_arrives(server: ServerProcess) -> None:
    address = urlsplit(server.url)
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: {address.netloc}\r\nX-API-Key: {KEY}\r\n"
    head += f"Content-Type: application/x-protobuf\r\nContent-Length: {2**30}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")


def test_nobody_notices_and_the_worker_survives(server: ServerProcess, visitor: Visitor) -> None:
    """Everything again, all at once, in the midst of a training run."""

    def run(between: Callable[[], None]) -> list[float]:
        with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client:
            model = client.create_lora_training_client(MODEL, rank=4, seed=1)
            losses = train(tinsmith, model, range(3))
            future = model.forward_backward([sentence(tinsmith, 3)], "cross_entropy")
            between()
            return [*losses, future.result(timeout=60).metrics["loss:sum"], *train(tinsmith, model, range(4, 7))]

    def misbehave() -> None:
        for send, _ in FAILED.values():
            send(visitor)

    calm = run(lambda: None)
    workers = server.workers()
    assert run(misbehave) == pytest.approx(calm, rel=1e-5)
    step = visitor.operation("optim_step", adam_params={"learning_rate": 1e-3})
    assert "metrics" in server.result(step, key=OTHER_KEY)
    assert server.workers() == workers
