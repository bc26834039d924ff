"""Names, paths, headers and numbers made to do harm: refused with a reason, and nothing on the disk changes."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from tests.server.api.running import KEY, MODELS, Answer, RunningServer

REFUSED = {400, 403, 404, 405, 409, 410, 413, 414, 415, 422, 431}

IN_URLS = {
    "dots": "..",
    "escaped dots": "%2e%2e",
    "way up": "..%2f..%2f..%2f..%2fetc%2fpasswd",
    "way up, escaped twice": "..%252f..%252fsecret",
    "way up for Windows": "..%5c..%5csecret",
    "root": "%2fetc%2fpasswd",
    "device": "CON",
    "device with an ending": "nul.txt",
    "stream of a file": "state:$DATA",
    "NUL": "state%00.txt",
    "line breaks": "x%0d%0aset-cookie:%20a=b%0d%0a%0d%0ainjected",
    "broken text": "%ff%fe%c0%ae%c0%ae",
    "wide dots": "%EF%BC%8E%EF%BC%8E",
    "a slash that looks like one": "a%E2%88%95b",
    "decomposed": "e%CC%81",
    "backwards": "%E2%80%AEgnp.exe",
    "hidden": ".hidden",
    "long": "a" * 5000,
    "home": "~root",
    "wild": "*",
    "question": "%3fexpires=1",
    "parameters": ";jsessionid=1",
    "markup": "%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    "quotes": "%27%20OR%201=1--",
    "format": "%25s%25n{0.__class__}",
}
"""As they are written in a URL."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("attacked"), long_poll_seconds=0.05) as running:
        model_id = running.model()
        for number, endpoint in enumerate(("save_weights", "save_weights_external"), 1):
            running.result(running.post(endpoint, {"model_id": model_id, "seq_id": number, "path": "state"}))
        yield running


def files(server: RunningServer) -> set[Path]:
    """In the state folder and beside it; the folders of other servers are theirs to change."""
    state = server.config.state
    return {path for path in (*state.rglob("*"), *state.parent.iterdir()) if "tinsmith.db" not in path.name}


def raw(server: RunningServer, method: str, target: str, body: bytes = b"{}") -> Answer:
    """Without a library that would clean the target first."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = (
            f"{method} {target} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\ncontent-type: application/json\r\n"
        )
        connection.sendall(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        answer = http.client.HTTPResponse(connection, method=method)
        answer.begin()
        return Answer(answer.status, answer.headers, answer.read())


def named_places(server: RunningServer) -> list[tuple[str, str]]:
    """Every endpoint with a name in its path, as a method and a target with one hole for each."""
    places = []
    for route in server.app.routes:
        assert isinstance(route, Route)
        holes = re.findall(r"{[^}]*}", route.path)
        for hole in holes:
            target = route.path.replace(hole, "<>")
            target = target.replace("{kind}", "external_weights").replace("{name}", "state")
            target = re.sub(r"{[^}]*}", "s:train:0", target)
            places += [(method, target) for method in route.methods or () if method != "HEAD"]
    return places


@pytest.mark.parametrize("trick", IN_URLS)
def test_a_name_in_a_url_leads_nowhere(server: RunningServer, trick: str) -> None:
    before, places = files(server), named_places(server)
    assert len(places) >= 30
    for method, target in places:
        answer = raw(server, method, target.replace("<>", IN_URLS[trick]))
        assert answer.status in REFUSED, (method, target)
        assert not {"set-cookie", "location", "content-disposition"} & {name.lower() for name in answer.headers}
        assert b"root:" not in answer.body
        assert b"Traceback" not in answer.body
        assert answer.headers["content-type"] == "application/json", "markup is not shown as a page"
    assert files(server) == before


IN_BODIES = [
    *("", ".", "..", "../x", "..\\x", "/etc/passwd", "C:\\x", "a/b", "a\\b", ".hidden", "-rf", "~", "*", "a b", "a\tb"),
    *(
        "a\0b",
        "a\r\nb",
        "a\nx-evil: 1",
        "ä",
        "e\u0301",
        "\uff0e\uff0e",
        "a\u2215b",
        "\u202egnp.exe",
        "a\u200bb",
        "\ufeffa",
    ),
    *("x" * 129, "x" * 1_000_000, "a:b", "a;b", "a%2fb", "a?b", "a#b", "'", '"', "<b>", "{0}", "\ud800"),
]


@pytest.mark.parametrize("endpoint", ["save_weights", "save_weights_for_sampler", "save_weights_external"])
def test_a_checkpoint_has_a_plain_name_or_none(server: RunningServer, endpoint: str) -> None:
    model_id, before = server.model(), files(server)
    number = 0
    for name in IN_BODIES:
        body = json.dumps({"model_id": model_id, "seq_id": number + 1, "path": name}).encode()
        answer = server.post(endpoint, body)
        if answer.status == 200:
            number += 1
            failed = server.result(answer)
            assert failed["category"] == "user"
            assert "cannot name a checkpoint" in failed["error"]
            assert len(failed["error"]) < 2000
        else:
            assert (answer.status, name) == (400, "\ud800"), "no text at all"
    assert files(server) == before
    step = server.post("optim_step", {"model_id": model_id, "seq_id": number + 1, "adam_params": {}})
    assert server.result(step)["metrics"]["step"] == 1


@pytest.mark.parametrize(
    "path",
    [
        *("", "tinker://", "tinker://a", "tinker://a/weights", "tinker://a/weights/", "tinker:///weights/a"),
        *("tinker://../weights/x", "tinker://a/../weights", "tinker://a/weights/..", "tinker://a/weights/../../x"),
        *("tinker://a/weights/x/y", "tinker://a/other/x", "TINKER://a/weights/x", "file:///etc/passwd", "/etc/passwd"),
        *(
            "http://127.0.0.1/x",
            "tinker://user:password@host/weights/x",
            "tinker://a/weights/x\0",
            "tinker://a/weights/x\r\n",
        ),
        *("tinker://a/weights/%2e%2e", "tinker://a/weights/\uff0e\uff0e", f"tinker://a/weights/{'x' * 100_000}"),
    ],
)
def test_a_path_in_a_body_leads_nowhere(server: RunningServer, path: str) -> None:
    session_id, before = server.session(), files(server)
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    for answer in (
        server.post("weights_info", {"tinker_path": path}),
        server.post("copy_weights", {"source_path": path}),
        server.post("create_sampling_session", sampler),
    ):
        assert answer.status in (404, 422)
        assert len(answer.body) < 2500
    loading = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    assert server.result(server.post("load_weights", loading))["category"] == "user"
    assert files(server) == before


def test_what_comes_back_in_a_header_cannot_break_out_of_it(server: RunningServer) -> None:
    """Nothing that a client chooses comes back in one, but for the host in download URLs, which are in bodies."""
    chosen = 'evil"\r\nx-injected: 1'
    session = {"tags": [chosen], "user_metadata": {"a": chosen}, "sdk_version": chosen, "display_name": chosen}
    answers = [
        server.post("create_session", session),
        server.get(f"training_runs/{'a%0d%0ax-injected:1'}"),
        server.post("get_info", {"model_id": chosen}),
        server.post("create_session", session, headers={"x-idempotency-key": "a b", "accept": "text/html"}),
    ]
    for answer in answers:
        names = {name.lower() for name in answer.headers}
        assert names <= {"date", "server", "content-length", "content-type", "connection"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model_id": "x", "model_id": "y", "seq_id": 1}', 404),
        (b'{"model_id": "%s", "seq_id": 1e400}', 422),
        (b'{"model_id": "%s", "seq_id": 1e2}', 422),
        (b'{"model_id": "%s", "seq_id": 1.0}', 422),
        (b'{"model_id": "%s", "seq_id": "1"}', 422),
        (b'{"model_id": "%s", "seq_id": true}', 422),
        (b'{"model_id": "%s", "seq_id": -1}', 422),
        (b'{"model_id": "%s", "seq_id": 9223372036854775808}', 422),
        (b'{"model_id": "%s", "seq_id": 1' + b"0" * 5000 + b"}", 400),
        (b'{"model_id": "%s", "seq_id": NaN}', 422),
        (b'{"model_id": "%s", "seq_id": Infinity}', 422),
        (b'{"model_id": "%s", "seq_id": 0x1}', 400),
        (b'{"model_id": "%s", "seq_id": 01}', 400),
        (b'{"model_id": "%s", "seq_id": 1} {}', 400),
        (b'{"model_id": ' + b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'\xef\xbb\xbf{"model_id": "%s", "seq_id": 1}', 400),
        ('{"model_id": "ä"}'.encode("utf-16"), 400),
        (b'{"model_id": "\xff\xfe", "seq_id": 1}', 400),
    ],
)
def test_numbers_and_texts_that_are_none_are_refused(server: RunningServer, body: bytes, status: int) -> None:
    """Twice the same key means the last one, here and in the worker."""
    model_id = server.model()
    assert server.post("optim_step", body.replace(b"%s", model_id.encode())).status == status
    step = server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    assert server.result(step)["metrics"]["step"] == 1


def test_a_key_that_comes_twice_means_the_same_at_the_door_and_in_the_worker(server: RunningServer) -> None:
    """Else the door would check one prompt, and the worker sample from the other."""
    sampler_id = server.sampler()
    body = (
        f'{{"sampling_session_id": "{sampler_id}", "seq_id": 0, "num_samples": 900, "num_samples": 2,'
        '"prompt": {"chunks": [{"type": "encoded_text", "tokens": [99999999]}]},'
        '"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}], "chunks":'
        '[{"type": "encoded_text", "tokens": [2]}]},'
        '"sampling_params": {"max_tokens": 9999999}, "sampling_params": {"max_tokens": 1}}'
    )
    accepted = server.post("asample", body.encode())
    assert len(accepted.json()["sample_sequence_ids"]) == 2
    assert len(server.result(accepted)["sequences"]) == 2


LONG = "x" * 1001


@pytest.mark.parametrize(
    "fields",
    [{"tags": [LONG]}, {"tags": ["x"] * 101}, {"sdk_version": LONG}, {"project_id": LONG}, {"display_name": LONG}],
)
def test_names_of_any_length_are_not_kept(server: RunningServer, fields: dict[str, Any]) -> None:
    refused = server.post("create_session", {"tags": [], "sdk_version": "1", **fields})
    assert (refused.status, "keep it to" in refused.json()["detail"]) == (422, True)


def test_other_texts_of_any_length_are_refused_or_shortened(server: RunningServer) -> None:
    session_id = server.session()
    assert server.call("PUT", f"/api/v1/sessions/{session_id}/project", {"project_id": LONG}).status == 422
    assert (
        server.post("copy_weights", {"source_path": "tinker://a/weights/b", "destination_project_id": LONG}).status
        == 422
    )
    end = {"reason": {"type": "errored"}, "detail": "x" * 1_000_000}
    assert server.post(f"sessions/{session_id}/finish", end).status == 204
    (found,) = server.post("sessions/search", {"session_id": session_id}).json()["sessions"]
    assert 900 < len(found["status"]["detail"]) < 1100


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd, zstd", "identity, zstd", "x"])
def test_encodings_that_nobody_sends_are_not_unpacked(server: RunningServer, encoding: str) -> None:
    body = {"session_id": "x"}
    assert server.post("session_heartbeat", body, headers={"content-encoding": encoding}).status == 415


HEAD = (
    "POST /api/v1/client/config HTTP/1.1\r\nhost: localhost\r\nx-api-key: tml-x\r\ncontent-type: application/json\r\n"
)
HIDDEN = "GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
AMBIGUOUS = {
    "two lengths": "content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths, the other way": "transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "two lengths and no chunk": "content-length: 5\r\ntransfer-encoding: chunked\r\n\r\nno chunk\r\n",
    "two contents": "content-length: 2\r\ncontent-length: 50\r\n\r\n{}",
    "plus": "content-length: +2\r\n\r\n{}",
    "hexadecimal": "content-length: 0x2\r\n\r\n{}",
    "below zero": "content-length: -1\r\n\r\n{}",
    "a space before the colon": "content-length : 2\r\n\r\n{}",
    "an unknown transfer": "transfer-encoding: xchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunked twice": "transfer-encoding: chunked, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "not quite chunked": "transfer-encoding: \x0bchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a chunk below zero": "transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "a chunk without an end": "transfer-encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
    "NUL in a header": "x-a: a\0b\r\ncontent-length: 2\r\n\r\n{}",
    "half a line break in a header": "x-a: a\rb\r\ncontent-length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_second_request_cannot_hide_in_the_body_of_the_first(
    server: RunningServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a proxy could see another end of the body than we do, the connection ends."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall((HEAD + AMBIGUOUS[name] + HIDDEN).encode("latin-1"))
        received = b""
        try:
            while piece := connection.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
    assert re.findall(rb"HTTP/1\.1 (\d+)", received) == [b"400"]
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_a_refused_upgrade_is_an_ordinary_request(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    for protocol in ("websocket", "h2c"):
        assert server.get("healthz", headers={"connection": "upgrade", "upgrade": protocol}).status == 200
    assert not caplog.records


def test_two_owners_never_share_the_place_of_a_copy(tmp_path: Path) -> None:
    """Whatever they are called, and whatever they call their copies."""
    with RunningServer(tmp_path, api_keys=("tml-first",)) as running:
        keys = [running.store.keys.create(owner, "k").plain for owner in ("ann", "ann b")]
        model_id = running.model(key=keys[0])
        saved = running.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "x"}, key=keys[0])
        path = running.result(saved, key=keys[0])["path"]
        assert running.post(f"training_runs/{model_id}/checkpoints/weights/x/publish", key=keys[0]).status == 204
        copies = [
            running.post("copy_weights", {"source_path": path}, key=key, headers={"x-idempotency-key": name}).json()
            for key, name in zip(keys, ("b c", "c"), strict=True)
        ]
        assert copies[0]["tinker_path"] != copies[1]["tinker_path"]


def test_every_base_model_of_the_server_is_named_by_its_refusal(server: RunningServer) -> None:
    """What is served is no secret, and where it lies is."""
    body: dict[str, Any] = {"session_id": server.session(), "model_seq_id": 0, "base_model": "../nowhere"}
    error = server.result(server.post("create_model", body))["error"]
    assert all(name in error for name in MODELS)
    assert "/nowhere" not in error.replace("../nowhere", "")
