"""A training request that cannot be read has used up a number in its client, so it uses it up here."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.server.api.running import Answer, RunningServer
from tinsmith.server.routes._broken import meant_by
from tinsmith.types import Datum, ModelInput
from tinsmith.wire import proto
from tinsmith.wire import tinker_pb2 as pb

ANNA, BORIS = "tml-anna", "tml-boris"
PROTOBUF = {"content-type": "application/x-protobuf"}
ZSTD = {**PROTOBUF, "content-encoding": "zstd"}
LIMITS = {"max_body_bytes": 20_000, "max_decompressed_bytes": 50_000, "long_poll_seconds": 0.2}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("small"), api_keys=(ANNA, BORIS), **LIMITS) as running:
        yield running


def body(model_id: str, number: int, tokens: int = 1) -> bytes:
    """With its fields in the order of their numbers, as official clients write them."""
    inputs: dict[str, Any] = {"target_tokens": [1] * tokens, "weights": [1.0] * tokens}
    prepared = proto.prepare_forward_backward([Datum(ModelInput.from_ints([1] * tokens), inputs)], "cross_entropy")
    return pb.ForwardBackwardRequest.FromString(prepared.finish(model_id, number)).SerializeToString()


def data(server: RunningServer, content: bytes, headers: dict[str, str] = PROTOBUF, key: str = ANNA) -> Answer:
    return server.post("forward_backward", content, headers=headers, key=key)


def in_pieces(server: RunningServer, content: bytes) -> Answer:
    """Without a length."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    pieces = (content[place : place + 4096] for place in range(0, len(content), 4096))
    connection.request("POST", "/api/v1/forward_backward", pieces, {**PROTOBUF, "x-api-key": ANNA})
    answer = connection.getresponse()
    found = Answer(answer.status, answer.headers, answer.read())
    connection.close()
    return found


BROKEN = {
    "cut off": (lambda server, content: data(server, content[:-5]), 10, "not a"),
    "changed": (lambda server, content: data(server, content[:-30] + b"\xff" * 30), 10, "not a"),
    "too large": (data, 6000, "at most 20,000"),
    "too large without a length": (in_pieces, 6000, "at most 20,000"),
    "too large when unpacked": (
        lambda server, content: data(server, zstandard.compress(content), ZSTD),
        9000,
        "inflates to more than 50,000",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_fails_and_the_next_operation_runs(small: RunningServer, name: str) -> None:
    send, tokens, reason = BROKEN[name]
    model_id = small.model(key=ANNA)
    broken = send(small, body(model_id, 1, tokens))
    step = small.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}}, key=ANNA)
    failed = small.result(broken, key=ANNA)
    assert failed["category"] == "user"
    assert reason in failed["error"]
    assert small.result(step, key=ANNA)["metrics"]["step"] == 1


def prepared(tokens: int, *, compress: bool, weights: Callable[[], float]) -> proto.PreparedBody:
    inputs: dict[str, Any] = {"target_tokens": [1] * tokens, "weights": [weights() for _ in range(tokens)]}
    data = [Datum(ModelInput.from_ints([1] * tokens), inputs)]
    return proto.prepare_forward_backward(data, "cross_entropy", compress=compress)


def official(plain: proto.PreparedBody, model_id: str) -> bytes:
    """Compressed as a whole: its first block is large, and says nothing until all of it is there."""
    return zstandard.compress(plain.finish(model_id, 1))


noise = random.Random(1).random
TOO_LARGE = {
    "plain": lambda model_id: prepared(6000, compress=False, weights=noise).finish(model_id, 1),
    "compressed": lambda model_id: prepared(9000, compress=True, weights=noise).finish(model_id, 1),
    "small until it is unpacked": lambda model_id: prepared(9000, compress=True, weights=lambda: 1.0).finish(
        model_id, 1
    ),
    "compressed as official clients do": lambda model_id: official(
        prepared(9000, compress=False, weights=noise), model_id
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_clients_send_too_large_fails_and_the_next_operation_runs(small: RunningServer, name: str) -> None:
    model_id = small.model(key=ANNA)
    broken = data(small, TOO_LARGE[name](model_id), PROTOBUF if name == "plain" else ZSTD)
    step = small.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}}, key=ANNA)
    assert "Send it in parts" in small.result(broken, key=ANNA)["error"]
    assert small.result(step, key=ANNA)["metrics"]["step"] == 1


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_does_not_touch_the_model_of_another(small: RunningServer, name: str) -> None:
    """And what belongs to another is answered as what never was."""
    tokens = BROKEN[name][1]
    model_id, nobodys = small.model(key=ANNA), "00000000-0000-4000-8000-000000000000:train:0"
    cut = [data(small, body(owner, 1, tokens)[:-5], key=BORIS) for owner in (model_id, nobodys)]
    assert [answer.status for answer in cut] == [404, 404]
    assert cut[0].body.replace(model_id.encode(), nobodys.encode()) == cut[1].body
    assert small.result(data(small, body(model_id, 1)), key=ANNA)["metrics"]


def test_an_operation_says_which_number_it_waits_for(small: RunningServer) -> None:
    """Where nothing can be read, nobody knows which number was meant."""
    model_id = small.model(key=ANNA)
    assert data(small, b"\xff" * 100).status == 400
    later = data(small, body(model_id, 2))
    waits = small.post("retrieve_future", {"request_id": later.json()["request_id"]}, key=ANNA)
    assert (waits.status, waits.json()["queue_state"]) == (408, "paused_capacity")
    assert "(seq_id) 1 of this model has not arrived" in waits.json()["queue_state_reason"]
    assert small.result(data(small, body(model_id, 1)), key=ANNA)["metrics"]
    assert small.result(later, key=ANNA)["metrics"]


BEGINNINGS: list[tuple[bytes, tuple[str, int] | None]] = [
    (body("s:train:0", 1), ("s:train:0", 1)),
    (body("ä" * 100, 2**31 - 1)[:211], ("ä" * 100, 2**31 - 1)),
    (b"", None),
    (b"\x0a", None),
    (b"\x0a\x05abc", None),
    (b"\x0a\x01\xff\x10\x01", None),
    (b"\x0a\x01a\x10\x00", None),
    (b"\x0a\x01a\x10" + b"\xff" * 20, None),
    (b"\x0a" + b"\xff" * 20, None),
    (b"\x0a\x01a\x18\x01", None),
    (json.dumps({"model_id": "s", "seq_id": 1}).encode(), None),
]


@pytest.mark.parametrize(("beginning", "meant"), BEGINNINGS, ids=map(str, range(len(BEGINNINGS))))
def test_the_first_bytes_tell_which_operation_was_meant(beginning: bytes, meant: tuple[str, int] | None) -> None:
    assert meant_by(beginning) == meant


def test_a_body_that_is_too_large_is_refused_while_its_sender_waits(tmp_path: Path) -> None:
    """Who sends a length only, to hear first whether it is accepted, gets the answer."""
    with RunningServer(tmp_path, **LIMITS) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        headers = {"x-api-key": "tml-x", "content-length": str(2**30), "expect": "100-continue", **PROTOBUF}
        connection.request("POST", "/api/v1/forward_backward", headers=headers)
        assert connection.getresponse().status == 413
        connection.close()
