"""What comes over the wire is bounded before it costs anything, and an unreadable body is refused in words."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard

from tests.server.api.running import KEY, Answer, RunningServer
from tinsmith.server.routes import _call
from tinsmith.types import Datum, ModelInput
from tinsmith.wire import proto

PROTOBUF = {"content-type": "application/x-protobuf"}
ZSTD = {**PROTOBUF, "content-encoding": "zstd"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that takes little."""
    limits = {"max_body_bytes": 50_000, "max_decompressed_bytes": 100_000, "max_json_bytes": 20_000}
    with RunningServer(tmp_path_factory.mktemp("small"), **limits) as running:
        yield running


def request(model_id: str, number: int, tokens: int = 4, compress: bool = False) -> bytes:
    inputs = {"target_tokens": [1] * tokens, "weights": [1.0] * tokens}
    datum = Datum(ModelInput.from_ints([1] * tokens), inputs)
    return proto.prepare_forward_backward([datum], "cross_entropy", compress=compress).finish(model_id, number)


def test_protobuf_is_taken_raw_and_compressed(server: RunningServer) -> None:
    model_id = server.model()
    raw = server.post("forward_backward", request(model_id, 1), headers=PROTOBUF)
    compressed = server.post("forward_backward", request(model_id, 2, compress=True), headers=ZSTD)
    assert [server.result(one)["metrics"]["loss:sum"] for one in (raw, compressed)] != []


@pytest.mark.parametrize("text", [b"\\ud800", b"\xff", b"\xed\xa0\x80"], ids=["half a character", "no UTF-8", "both"])
def test_text_that_is_none_is_not_json(server: RunningServer, text: bytes) -> None:
    model_id = server.model()
    body = b'{"model_id": "%s", "seq_id": 1, "path": "a", "user_metadata": {"a": "%s"}}' % (model_id.encode(), text)
    answer = server.post("save_weights", body)
    assert answer.status == 400
    assert "not JSON" in answer.json()["detail"]
    assert server.post("retrieve_future", b'{"request_id": "%s"}' % text).status == 400


def test_a_body_that_says_it_is_too_large_is_refused_unread(small: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=10)
    headers = {"x-api-key": KEY, "content-length": str(2**30), **PROTOBUF}
    connection.request("POST", "/api/v1/forward_backward", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 413
    assert "at most 50,000" in json.load(answer)["detail"]
    connection.close()


def test_a_body_that_stops_on_its_way_is_not_waited_for(small: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_call, "_SILENCE_SECONDS", 0.05)
    connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=10)
    headers = {"x-api-key": KEY, "content-length": "1000", **PROTOBUF}
    connection.request("POST", "/api/v1/forward_backward", b"the first half", headers)
    answer = connection.getresponse()
    assert (
        answer.status,
        json.load(answer)["detail"].startswith("The body stopped, or came too slowly, after 14 bytes"),
    ) == (408, True)
    connection.close()


def test_a_body_without_a_length_is_refused_when_it_gets_too_large(small: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=10)
    pieces = (b"x" * 1000 for _ in range(100))
    connection.request("POST", "/api/v1/forward_backward", pieces, {"x-api-key": KEY, **PROTOBUF}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_compressed_bomb_is_defused(small: RunningServer) -> None:
    bomb = zstandard.compress(bytes(500_000_000))
    assert len(bomb) < 50_000
    refused = small.post("forward_backward", bomb, headers=ZSTD)
    assert (refused.status, refused.json()["detail"]) == (
        413,
        "The body inflates to more than 100,000 bytes. Send it in parts.",
    )


def test_a_frame_that_wants_a_huge_window_is_refused(small: RunningServer) -> None:
    settings = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=0)
    frame = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    body = frame.compress(b"x" * 1000) + frame.flush()
    assert small.post("forward_backward", body, headers=ZSTD).status == 400


def test_json_is_bounded_more_tightly(small: RunningServer) -> None:
    assert small.post("asample", {"prompt": [1] * 20_000}).status == 413


UNREADABLE: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "garbage protobuf": (400, b"\xff\xfe\xfd not protobuf", PROTOBUF),
    "empty protobuf": (422, b"", PROTOBUF),
    "protobuf that names no model": (422, b"\x10\x01", PROTOBUF),
    "garbage zstd": (400, b"not zstd", ZSTD),
    "a cut frame": (400, zstandard.compress(b"x" * 1000)[:-9], ZSTD),
    "more than a frame": (400, zstandard.compress(b"") + b"x", ZSTD),
    "another encoding": (415, b"x", {**PROTOBUF, "content-encoding": "br"}),
    "another type": (415, b"x", {"content-type": "text/plain"}),
    "broken JSON": (400, b'{"model_id":', {}),
    "JSON that is no object": (400, b"[1]", {}),
    "JSON without a model": (422, b"{}", {}),
    "JSON without a number": (422, b'{"model_id": "m"}', {}),
    "a number that is none": (422, b'{"model_id": "m", "seq_id": true}', {}),
    "deep JSON": (400, b"[" * 100_000, {}),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_body_is_refused(server: RunningServer, name: str) -> None:
    status, body, headers = UNREADABLE[name]
    refused = server.post("forward_backward", body, headers=headers)
    assert_refused(refused, status)


def test_values_nested_too_deeply_are_refused(server: RunningServer) -> None:
    nested = '{"a":' * 900 + "1" + "}" * 900
    body = f'{{"tags": [], "sdk_version": "1", "user_metadata": {nested}}}'.encode()
    assert server.post("create_session", body).status in (400, 422)


def test_every_refusal_has_a_length_and_a_reason(server: RunningServer) -> None:
    assert_refused(server.call("GET", "/no/such/path"), 404)
    assert_refused(server.call("GET", "/api/v1/asample"), 405)
    assert_refused(server.call("GET", "/api/v1/healthz/"), 404)
    assert_refused(server.get("training_runs", key=None), 401)
    assert_refused(server.get("training_runs?limit=-1"), 422)


def assert_refused(refused: Answer, status: int) -> None:
    """The official client takes a 400 without a length for a broken proxy and tries again for minutes."""
    assert refused.status == status, refused
    assert int(refused.headers["content-length"]) == len(refused.body) > 0
    assert "content-encoding" not in refused.headers
    assert isinstance(refused.json()["detail"], str)


def test_a_failure_of_the_server_is_a_500_that_tells_nothing_of_its_inside(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("secret of the inside")

    monkeypatch.setattr(server.store.sessions, "create", broken)
    failed = server.post("create_session", {"tags": [], "sdk_version": "1"})
    assert failed.status == 500
    assert b"inside" not in failed.body


def test_telemetry_is_accepted_whatever_it_holds(server: RunningServer) -> None:
    assert server.post("telemetry", {"events": [{"any": "thing"}]}).json() == {"status": "accepted"}


def test_a_large_body_is_decoded_beside_the_loop(server: RunningServer) -> None:
    model_id = server.model()
    body = request(model_id, 1, tokens=512)
    many = proto.prepare_forward_backward(
        [Datum(ModelInput.from_ints([1] * 512), {"target_tokens": [1] * 512, "weights": [1.0] * 512})] * 40,
        "cross_entropy",
    ).finish(model_id, 2)
    assert len(many) > 64 * 1024
    first = server.post("forward_backward", body, headers=PROTOBUF)
    second = server.post("forward_backward", many, headers=PROTOBUF)
    assert len(server.result(second)["loss_fn_outputs"]) == 40
    assert len(server.result(first)["loss_fn_outputs"]) == 1
