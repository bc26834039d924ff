"""The stored key: written for its owner alone, never shown, and used by everything else."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.cli.program import KEY, InProcess, Program
from tests.support.server import FakeServer, Reply

PASTED = "tml-pasted-by-a-person"


@pytest.fixture
def credentials(home: Path) -> Path:
    return home / ".tinker" / "credentials.json"


@pytest.fixture
def newcomer(server: FakeServer, home: Path) -> Program:
    """Somebody without a key."""
    return Program(home, TINKER_BASE_URL=server.url)


def test_a_pasted_key_is_checked_stored_and_used(newcomer: Program, server: FakeServer, credentials: Path) -> None:
    done = newcomer("auth", "login", input=f"{PASTED}\n")
    assert (done.code, done.out) == (0, "")
    assert PASTED not in done.err
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    assert stat.S_IMODE(credentials.parent.stat().st_mode) == 0o700
    assert newcomer("run", "list").code == 0
    assert {request.headers["x-api-key"] for request in server.requests} == {PASTED}


def test_at_a_terminal_the_key_is_asked_for_without_an_echo(newcomer: Program, credentials: Path) -> None:
    with newcomer.at_a_terminal("auth", "login") as terminal:
        terminal.wait_for("API key")
        terminal.type_unseen(f"{PASTED}\n")
        done = terminal.end()
    assert done.code == 0
    assert PASTED not in done.err
    assert "tinsmith keys create tinker-cli-" in done.err
    assert PASTED in credentials.read_text()


def test_a_key_the_server_refuses_is_not_stored(cli: InProcess, server: FakeServer, credentials: Path) -> None:
    server.script("get_server_capabilities", Reply(401, json={"detail": "unknown"}))
    done = cli("--api-key", PASTED, "auth", "login")
    assert done.code == 1
    assert done.err.startswith("Error: Authentication failed\n")
    assert not credentials.exists()


def test_what_cannot_be_a_key_is_not_even_sent(cli: InProcess, server: FakeServer, credentials: Path) -> None:
    done = cli("--api-key", "password", "auth", "login")
    assert done.code == 1
    assert "does not start with 'tml-'" in done.err
    assert server.requests == []
    assert not credentials.exists()


def test_logging_in_twice_is_an_error_and_logging_out_twice_is_none(cli: InProcess, credentials: Path) -> None:
    assert cli("--api-key", PASTED, "auth", "login").code == 0
    again = cli("--api-key", PASTED, "auth", "login")
    assert again.code == 1
    assert "tinsmith auth logout" in again.err
    first, second = cli("auth", "logout"), cli("auth", "logout")
    assert (first.code, second.code) == (0, 0)
    assert "The server still takes it" in first.err
    assert "You are not logged in" in second.err
    assert PASTED not in credentials.read_text()


def test_other_keys_in_the_file_are_left_alone(cli: InProcess, credentials: Path) -> None:
    credentials.parent.mkdir()
    other = {"type": "manual", "key": "tml-other", "name": "other", "note": "keep"}
    credentials.write_text(json.dumps({"version": 1, "keys": {"other": other}}))
    cli("--api-key", PASTED, "auth", "login")
    document = json.loads(credentials.read_text())
    assert document["keys"]["other"] == other
    assert document["keys"][document["default"]]["key"] == PASTED
    cli("auth", "logout")
    assert json.loads(credentials.read_text()) == {"version": 1, "keys": {"other": other}}


def test_a_file_that_cannot_be_read_is_not_overwritten(cli: InProcess, credentials: Path) -> None:
    credentials.parent.mkdir()
    credentials.write_text("not json")
    done = cli("--api-key", PASTED, "auth", "login")
    assert done.code == 1
    assert "Repair it or remove it" in done.err
    assert credentials.read_text() == "not json"


def test_the_status_tells_of_key_and_server(cli: InProcess, server: FakeServer) -> None:
    assert cli("auth", "status") == (0, "Credentials available: yes\nTinker accessible: yes\n", "")
    server.script("get_server_capabilities", Reply(401, json={"detail": "unknown"}), times=2)
    refused = cli("auth", "status")
    assert (refused.code, refused.out) == (1, "Credentials available: yes\nTinker accessible: no\n")
    assert "Authentication failed" in refused.err
    as_json = cli("-f", "json", "auth", "status")
    assert as_json.code == 1
    assert json.loads(as_json.out)["tinker_accessible"] is False


def test_without_a_key_the_status_says_so(cli: InProcess, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, "TINKER_API_KEY")
    done = cli("auth", "status")
    assert (done.code, done.out) == (1, "Credentials available: no\nTinker accessible: no\n")
    assert server.requests == []


def test_whoami_reads_the_token(cli: InProcess, server: FakeServer) -> None:
    server.flags["pjwt_auth_enabled"] = True
    assert cli("-f", "json", "auth", "whoami").json() == {
        "user_urn": "tml:organization_user:u-1",
        "org_urn": "tml:organization:o-1",
        "email": "dev@example.com",
    }
    assert "Organization" in cli("auth", "whoami").out


def test_on_a_server_of_plain_keys_whoami_says_that_they_do_not_tell(cli: InProcess) -> None:
    done = cli("auth", "whoami")
    assert done.code == 1
    assert "do not say whose they are" in done.err
    assert KEY not in done.err
