"""Clients without manners: they speak HTTP by hand, break off, and never say goodbye."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.programs import MODEL
from tests.end_to_end.serving import KEY

QUEUED = 20
_SILENT: list[socket.socket] = []
_MOST_SILENT = 10


def half_a_body(url: str) -> None:
    with _connected(url) as connection:
        head = f"POST /api/v1/asample HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\ncontent-length: 1000\r\n\r\n{{"
        connection.sendall(head.encode())


def silence(url: str) -> None:
    """Connections on which nothing is ever said."""
    _SILENT.append(_connected(url))
    if len(_SILENT) > _MOST_SILENT:
        _SILENT.pop(0).close()


def nonsense(url: str) -> None:
    for path, body, key in [
        ("asample", b"{", KEY),
        ("create_session", b"{}", "tml-nobody"),
        ("no/such/path", b"{}", KEY),
        ("forward_backward", b"\xff" * 50, KEY),
        ("retrieve_future", b'{"request_id": "nobody:train:0:1"}', KEY),
    ]:
        status, _ = _posted(url, path, body, key)
        assert 400 <= status < 500, (path, status)


def hung_up_polls(url: str) -> None:
    """Whoever waits for a result that cannot come yet hangs up."""
    model_id = _model(url, _session(url))
    request_id = _post(url, "optim_step", {"model_id": model_id, "seq_id": 5, "adam_params": {}})["request_id"]
    for _ in range(3):
        connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
        body = json.dumps({"request_id": request_id})
        connection.request("POST", "/api/v1/retrieve_future", body, {"x-api-key": KEY})
        connection.close()


def abandoned_session(url: str) -> None:
    """A model, a loss that is used by nobody, and samples that wait."""
    session_id = _session(url)
    _model(url, session_id)
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler_id = _post(url, "create_sampling_session", sampler)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    for seq_id in range(QUEUED):
        asked = {"prompt": prompt, "sampling_params": {"max_tokens": 100}, "num_samples": 1}
        _post(url, "asample", {**asked, "sampling_session_id": sampler_id, "seq_id": seq_id})


ROUGH_PROGRAMS: list[Callable[[str], None]] = [half_a_body, silence, nonsense, hung_up_polls, abandoned_session]


def _connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def _session(url: str) -> str:
    made = _post(url, "create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"})
    return str(made["session_id"])


def _model(url: str, session_id: str) -> str:
    asked = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    request_id = _post(url, "create_model", asked)["request_id"]
    while True:
        status, answer = _posted(url, "retrieve_future", json.dumps({"request_id": request_id}).encode(), KEY)
        if status != 408:
            return str(json.loads(answer)["model_id"])


def _post(url: str, endpoint: str, body: Any) -> Any:
    status, answer = _posted(url, endpoint, json.dumps(body).encode(), KEY)
    assert status == 200, (endpoint, status, answer)
    return json.loads(answer)


def _posted(url: str, endpoint: str, body: bytes, key: str) -> tuple[int, bytes]:
    headers = {"content-type": "application/json", "x-api-key": key}
    request = urllib.request.Request(f"{url}/api/v1/{endpoint}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
