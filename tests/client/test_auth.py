"""Looking for a credential, and asking whether the server takes it."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinsmith
from tests.support.server import FakeServer, Reply
from tinsmith import auth
from tinsmith.client import credentials


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("TINKER_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(credentials, "CREDENTIALS_FILE", tmp_path / "credentials.json")


def test_without_anything_there_is_no_credential() -> None:
    assert auth.get_tinker_token() is None
    assert auth.tinker_has_credentials() is False
    with pytest.raises(tinsmith.TinkerError, match="No API key"):
        auth.raise_if_tinker_not_accessible()


def test_a_key_of_the_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    assert auth.get_tinker_token() == "tml-x"
    assert auth.tinker_has_credentials() is True


def test_a_stored_key_is_found(tmp_path: Path) -> None:
    (tmp_path / "credentials.json").write_text('{"version": 1, "default": "a", "keys": {"a": {"key": "tml-stored"}}}')
    assert auth.get_tinker_token() == "tml-stored"


def test_a_command_counts_as_a_credential_and_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"touch {trace}")
    assert auth.tinker_has_credentials() is True
    assert auth.get_tinker_token() is None
    assert not trace.exists()


def test_what_cannot_be_a_key_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "malformed")
    assert auth.get_tinker_token() is None
    assert auth.tinker_has_credentials() is False


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer() as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-x")
        yield server


def test_a_server_that_takes_the_key_is_accessible(server: FakeServer) -> None:
    auth.raise_if_tinker_not_accessible()
    assert server.paths() == ["/api/v1/client/config", "/api/v1/get_server_capabilities"]


def test_a_refused_key_is_told(server: FakeServer) -> None:
    server.script("get_server_capabilities", Reply(401, json={"detail": "no such key"}))
    with pytest.raises(tinsmith.AuthenticationError, match="no such key"):
        auth.raise_if_tinker_not_accessible()


@pytest.mark.parametrize("endpoint", ["client/config", "get_server_capabilities"])
def test_a_failing_server_is_asked_once(server: FakeServer, endpoint: str) -> None:
    server.script(endpoint, Reply(503, json={"detail": "away"}), times=None)
    with pytest.raises(tinsmith.InternalServerError):
        auth.raise_if_tinker_not_accessible()
    assert len(server.received(endpoint)) == 1


def test_a_dead_server_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{unused_port()}")
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    started = time.monotonic()
    with pytest.raises(tinsmith.APIConnectionError):
        auth.raise_if_tinker_not_accessible()
    assert time.monotonic() - started < 10


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
