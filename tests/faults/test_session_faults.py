"""Sessions when the server is dead, slow or gone, and when a script simply ends."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

import tinsmith
from tests.support.server import FOREVER, Drop, FakeServer, Hang, Reply
from tinsmith import types
from tinsmith.client import session as sessions
from tinsmith.client.config import Config


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# A dead server


def test_a_dead_server_is_told_at_once_and_given_up_within_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(base_url=f"http://127.0.0.1:{unused_port()}", api_key="tml-x", retry_budget=2.0)
    client = tinsmith.ServiceClient(config=config)
    started = time.monotonic()
    asked = client.rest.get_server_capabilities()
    while "Trying again" not in caplog.text:
        assert time.monotonic() - started < 2, "the user was left in the dark"
        time.sleep(0.01)
    with pytest.raises(tinsmith.APIConnectionError, match=r"127\.0\.0\.1"):
        asked.result(10)
    assert time.monotonic() - started < 5


def test_many_calls_to_a_dead_server_fail_together() -> None:
    config = Config(base_url=f"http://127.0.0.1:{unused_port()}", api_key="tml-x", retry_budget=1.0)
    client = tinsmith.RestClient(config=config)
    started = time.monotonic()
    for future in [client.list_sessions() for _ in range(20)]:
        with pytest.raises(tinsmith.APIConnectionError):
            future.result(10)
    assert time.monotonic() - started < 5


def test_constructors_do_no_input_or_output() -> None:
    dead = f"http://127.0.0.1:{unused_port()}"
    started = time.monotonic()
    tinsmith.ServiceClient(base_url=dead, api_key="tml-x")
    tinsmith.RestClient(base_url=dead, api_key="tml-x")
    tinsmith.AdminClient(base_url=dead, api_key="tml-x")
    assert time.monotonic() - started < 1


def test_many_who_wait_for_a_session_that_cannot_be_opened_fail_together() -> None:
    with FakeServer() as server:
        server.script("create_session", Reply(503, json={"detail": "full"}), times=FOREVER)
        config = Config(base_url=server.url, api_key="tml-x", retry_budget=0.8)
        client = tinsmith.ServiceClient(config=config)
        asked = [client.create_sampling_client(base_model="tiny/model-1") for _ in range(10)]
        for future in asked:
            with pytest.raises(tinsmith.InternalServerError):
                future.result(10)
        assert len(server.received("create_session")) < 10


# Closing


@pytest.mark.parametrize("fault", [Hang(), Reply(503, json={"detail": "away"})])
def test_closing_is_bounded_and_those_who_wait_learn_of_it_first(
    fault: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "FINISH_SECONDS", 1.0)
    with FakeServer() as server:
        server.hold("asample")
        server.script(lambda request: request.path.endswith("/finish"), fault, times=FOREVER)
        service = tinsmith.ServiceClient(config=Config(base_url=server.url, api_key="tml-x", telemetry=False))
        client = service.create_sampling_client(base_model="tiny/model-1")
        pending = client.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1))
        server.wait_for("retrieve_future")
        closing = service.close("success")
        with pytest.raises(tinsmith.ClientClosedError):
            pending.result(5)
        assert not closing.done()
        closing.result(10)
    assert "it will expire there" in caplog.text


# Scripts that just end


def run_script(server_url: str, body: str, **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    script = f"""
import sys
import tinsmith
client = tinsmith.ServiceClient(base_url={server_url!r}, api_key="tml-x")
client.create_sampling_client(base_model="tiny/model-1").result()
{body}
"""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, **options)
    return done, time.monotonic() - started


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ("pass", "success", 0),
        ("sys.exit(3)", "success", 3),
        ("raise ValueError('mine')", "errored", 1),
        ("raise KeyboardInterrupt", "interrupted", -signal.SIGINT),
    ],
)
def test_a_script_that_ends_finishes_its_session_and_keeps_its_exit_code(body: str, status: str, code: int) -> None:
    with FakeServer() as server:
        done, _ = run_script(server.url, body)
        assert done.returncode == code
        (finish,) = server.received(lambda request: request.path.endswith("/finish"))
        assert finish.json()["reason"] == {"type": status}
        assert "tinsmith" not in done.stderr.replace("import tinsmith", "")


def test_a_closed_session_is_not_finished_again_at_exit() -> None:
    with FakeServer() as server:
        run_script(server.url, "client.close('interrupted').result()")
        (finish,) = server.received(lambda request: request.path.endswith("/finish"))
        assert finish.json()["reason"] == {"type": "interrupted"}


def test_a_server_that_hangs_delays_the_exit_by_two_seconds_at_most() -> None:
    with FakeServer() as server:
        _, usual = run_script(server.url, "pass")
        server.script(lambda request: request.path.endswith("/finish"), Hang(), times=FOREVER)
        done, took = run_script(server.url, "pass")
        assert done.returncode == 0
        assert took - usual < sessions.EXIT_SECONDS + 2.0
        assert done.stderr == ""


def test_a_server_that_died_costs_one_line_at_exit() -> None:
    with FakeServer() as server:
        server.script(lambda request: request.path.endswith("/finish"), Drop(), times=FOREVER)
        done, _ = run_script(server.url, "pass")
        assert done.returncode == 0
        assert len(server.received(lambda request: request.path.endswith("/finish"))) == 1
        (line,) = done.stderr.splitlines()
        assert line.endswith("it will expire there.")


def test_a_forked_child_does_not_finish_the_session_of_its_parent() -> None:
    body = """
import os
child = os.fork()
if child == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(client.get_server_capabilities() is not None)
"""
    with FakeServer() as server:
        done, _ = run_script(server.url, body, env={**os.environ, "PYTHONWARNINGS": "ignore"})
        assert done.stdout.split() == ["5", "True"], done.stderr
        assert len(server.received(lambda request: request.path.endswith("/finish"))) == 1


def test_the_log_is_quiet_while_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        FakeServer() as server,
        tinsmith.ServiceClient(base_url=server.url, api_key="tml-x") as service,
    ):
        client = service.create_sampling_client(base_model="tiny/model-1")
        client.compute_logprobs(types.ModelInput.from_ints([1, 2])).result(10)
    assert caplog.text == ""
