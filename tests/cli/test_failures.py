"""Commands that fail say why and what to do next, on standard error and with an exit code that means it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Stock
from tests.cli.program import COMMAND, KEY, ROOT, InProcess, Program, environment, variables_of
from tests.cli.test_listings import a_page
from tests.support.server import FOREVER, Drop, FakeServer, HalfBody, Hang, Html, Reply


@pytest.fixture
def dead_url() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


# What the server answers


@pytest.mark.parametrize(
    ("answer", "headline", "remedy"),
    [
        (Reply(400, json={"detail": "bad"}), "Invalid request", "Check the arguments"),
        (Reply(401, json={"detail": "unknown key"}), "Authentication failed", "tinsmith auth login"),
        (Reply(403, json={"detail": "not yours"}), "Permission denied", "who owns"),
        (Reply(404, json={"detail": "no such run"}), "Resource not found", "Check the id or path"),
        (Reply(422, json={"detail": [{"loc": ["query", "limit"]}]}), "Invalid data provided", "Check the arguments"),
        (Reply(418, json={"detail": "teapot"}), "API error (status 418)", "Check the arguments"),
        (Reply(429, headers={"retry-after": "60"}), "Rate limit exceeded", "Wait a little"),
        (Reply(500, json={"detail": "broken"}), "Internal server error", "the log of the server"),
        (Html(502), "Internal server error", "the log of the server"),
        (Drop(), "Connection failed", "--base-url"),
        (HalfBody(), "Connection failed", "--base-url"),
        (Hang(), "Request timeout", "--timeout"),
        (Reply(json={"training_runs": "none"}), "API error occurred", "--base-url"),
    ],
    ids=lambda value: str(getattr(value, "status", type(value).__name__)),
)
def test_an_error_has_a_headline_the_reason_and_a_remedy(
    cli: InProcess, server: FakeServer, answer: Any, headline: str, remedy: str
) -> None:
    server.script("training_runs", answer, times=FOREVER)
    done = cli("--timeout", "0.5", "run", "list")
    assert (done.code, done.out) == (1, "")
    lines = [line for line in done.err.splitlines() if "Trying again" not in line]
    assert lines[0] == f"Error: {headline}"
    assert remedy in lines[-1]
    assert "Traceback" not in done.err


@pytest.mark.parametrize("fault", [Drop(), HalfBody(), Html(502), Reply(429, headers={"retry-after": "0.1"})])
def test_a_fault_that_passes_is_waited_for(cli: InProcess, server: FakeServer, stock: Stock, fault: Any) -> None:
    server.script("training_runs", fault)
    assert cli("-f", "json", "run", "list").json()["shown"] == 1


def test_a_server_without_billing_is_named(cli: InProcess, server: FakeServer) -> None:
    server.script("current", Reply(404, json={"detail": "Not Found"}), times=FOREVER)
    server.script("events", Reply(404, json={"detail": "Not Found"}), times=FOREVER)
    for arguments in (("checkpoint-storage",), ("usage", "2030-01-01", "2030-01-02")):
        done = cli("billing", *arguments)
        assert done.code == 1
        assert f"Error: The server at {server.url} has no billing." in done.err


# No server


def test_a_dead_server_is_told_at_once_and_given_up_in_time(home: Path, dead_url: str) -> None:
    program = Program(home, **variables_of(dead_url))
    with program.start("run", "list") as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert process.poll() is None, "the first line came only in the end"
        out, err = process.communicate(timeout=60)  # scripts would wait for five minutes
    assert (process.returncode, out) == (1, "")
    assert "Connection refused" in first
    assert f"Waiting for {dead_url} ...\n" in err
    assert "Error: Connection failed\n" in err


def test_a_server_that_says_nothing_is_told_before_it_is_given_up(cli: InProcess, server: FakeServer) -> None:
    server.script("client/config", Hang(), times=FOREVER)
    done = cli("--timeout", "2", "run", "list")
    assert done.code == 1
    assert done.err.startswith(f"Waiting for {server.url} ...\nError: Request timeout\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("checkpoint", "download", "tinker://r/weights/a"),
        ("checkpoint", "delete", "tinker://r/weights/a", "--yes"),
        ("sample", "Hello", "--model", "tiny/model-1"),
        ("model", "list"),
    ],
    ids=" ".join,
)
def test_other_commands_do_not_wait_longer(cli: InProcess, dead_url: str, arguments: tuple[str, ...]) -> None:
    done = cli("--base-url", dead_url, "--timeout", "0.5", *arguments)
    assert done.code == 1
    assert "Connection failed" in done.err


# Credentials


def test_a_missing_key_is_no_matter_of_the_network(cli: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, "TINKER_API_KEY")
    done = cli("run", "list")
    assert done.code == 1
    assert done.err.startswith("Error: No API key\n")
    assert "--api-key" in done.err
    assert "tinsmith auth login" in done.err


def test_options_go_before_the_environment(cli: InProcess, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TINKER_BASE_URL", "http://127.0.0.1:9")
    assert cli("--base-url", server.url, "--api-key", "tml-of-the-option", "run", "list").code == 0
    assert {request.headers["x-api-key"] for request in server.requests} == {"tml-of-the-option"}


def test_a_key_is_in_no_message(cli: InProcess, server: FakeServer) -> None:
    server.script("training_runs", Reply(401, json={"detail": f"{KEY} is unknown"}))
    assert KEY not in "".join(cli("run", "list")[1:])
    done = cli("auth", "login", KEY)
    assert done.code == 2
    assert KEY not in done.err


def test_a_fault_of_our_own_is_called_so(cli: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.cli.shown.yes_no", lambda value: 1 / 0)
    done = cli("model", "list")
    assert done.code == 1
    assert done.err.startswith("Error: Unexpected error occurred\nZeroDivisionError: division by zero\n")
    assert "TINKER_LOG=debug" in done.err


def test_a_missing_package_is_named(cli: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    done = cli("model", "list")
    assert done.code == 1
    assert "pip install 'tinsmith[cli]'" in done.err


def test_the_traceback_is_for_those_who_ask_for_it(server: FakeServer, home: Path) -> None:
    done = Program(home, TINKER_LOG="debug", **variables_of(server.url))("run", "info", "nix")
    assert done.code == 1
    assert "Traceback (most recent call last)" in done.err
    assert "Error: Resource not found" in done.err
    assert KEY not in done.err


# Output that goes nowhere


def test_a_closed_pipe_ends_the_command_quietly(server: FakeServer, home: Path) -> None:
    server.script("training_runs", a_page(0, 1000, 1000))
    line = f"{shlex.quote(str(COMMAND))} --format json run list --limit 1000 | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line],
        env=environment(home, **variables_of(server.url)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("{\n141\n", "")


def test_a_full_disk_under_the_output_is_an_error(program: Program) -> None:
    with Path("/dev/full").open("w") as full:
        for arguments in (("model", "list"), ("--help",)):
            done = program(*arguments, stdout=full)
            assert done.code == 1
            assert "No space left on device" in done.err
            assert "Exception ignored" not in done.err


def test_ctrl_c_while_waiting_is_130(program: Program, server: FakeServer) -> None:
    server.script("training_runs", Hang(), times=FOREVER)
    with program.start("run", "list") as process:
        server.wait_for("training_runs", timeout=60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def test_ctrl_c_ends_an_example_with_a_word_and_130() -> None:
    code = "import signal, _show; _show.run(lambda: (print('ready', flush=True), signal.pause()))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT / "examples", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "\nInterrupted.\n")


# Usage


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "list", "--limit", "-1"),
        ("run", "list", "--limt", "1"),
        ("run", "info"),
        ("walk",),
        ("--format", "yaml", "version"),
        ("--timeout", "0", "version"),
        ("--timeout", "nan", "version"),
        ("serve", "--model", "m", "--storage-cache-gib", "inf"),
        ("serve", "--model", "m", "--idle-sample-worker", "nan"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_and_points_to_the_help(
    cli: InProcess, server: FakeServer, arguments: tuple[str, ...]
) -> None:
    done = cli(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "for help" in done.err
    assert server.requests == []


def test_version_and_its_json(cli: InProcess) -> None:
    import tinsmith

    assert cli("version") == (0, f"tinsmith {tinsmith.__version__}\n", "")
    assert json.loads(cli("-f", "json", "version").out) == {"name": "tinsmith", "version": tinsmith.__version__}
