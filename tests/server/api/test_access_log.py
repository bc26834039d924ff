"""One line for each request: loud enough to notice, and silent about what was sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.api.running import RunningServer
from tests.server.log_lines import logged

WORD = "quetzalcoatl"


def lines_of(server: RunningServer, act: Callable[[], object]) -> list[dict[str, Any]]:
    with logged("json") as stream:
        act()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_request_has_a_line_at_the_level_of_its_weight(server: RunningServer) -> None:
    run = server.model()
    body = {"model_id": run, "seq_id": 1, "adam_params": {}}
    (step,) = lines_of(server, lambda: server.post("optim_step", body))
    assert (step["level"], step["status"], step["request_id"], step["model_id"]) == ("debug", 200, f"{run}:1", run)
    (poll,) = lines_of(server, lambda: server.post("retrieve_future", {"request_id": f"{run}:1"}))
    assert (poll["level"], poll["request_id"]) == ("debug", f"{run}:1")
    (shown,) = lines_of(server, lambda: server.get(f"training_runs/{run}"))
    assert (shown["level"], shown["route"], shown["model_id"]) == ("info", "/api/v1/training_runs/{run_id}", run)
    (refused,) = lines_of(server, lambda: server.post("optim_step", {"model_id": "nothing", "seq_id": 1}))
    assert (refused["level"], refused["status"], refused["model_id"]) == ("info", 404, "nothing")
    assert refused["reason"] == "There is no model"
    (unknown,) = lines_of(server, lambda: server.get(f"{WORD}?key={WORD}"))
    assert (unknown["level"], unknown["message"]) == ("info", "no such route: 404")


def test_who_is_turned_away_has_a_line_that_says_why(server: RunningServer) -> None:
    (keyless,) = lines_of(server, lambda: server.get("sessions", key=None))
    assert (keyless["status"], keyless["reason"]) == (
        401,
        "There is no API key in the header X-API-Key, nor as a bearer token",
    )
    (wrong,) = lines_of(server, lambda: server.get(f"sessions?limit={WORD}"))
    assert (wrong["status"], wrong["reason"]) == (422, "UnprocessableEntityError")
    assert WORD not in str(wrong)


def test_a_server_that_is_not_ready_has_a_line_that_says_why(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.workers, "ready", False)
    (loading,) = lines_of(server, lambda: server.call("GET", "/readyz", key=None))
    assert loading["reason"].startswith("The base model 'tiny/model-1' is still being loaded.")


def test_an_operation_that_is_refused_is_a_warning_that_names_the_field_alone(server: RunningServer) -> None:
    run = server.model()
    body = {"model_id": run, "seq_id": 1, "path": f"../{WORD}"}
    warning, _ = lines_of(server, lambda: server.post("save_weights", body))
    assert (warning["level"], warning["message"]) == ("warning", "save_weights was refused (user)")
    assert (warning["request_id"], warning["reason"]) == (f"{run}:1", "InvalidInputError: path")
    assert WORD not in str(warning)


def test_a_failure_says_where_and_about_what_but_not_what_was_sent(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError(f"invalid literal: {WORD}")

    monkeypatch.setattr(server.store.samplers, "create", fail)
    session_id = server.session()
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny/model-1"}
    failure, access = lines_of(server, lambda: server.post("create_sampling_session", body))
    assert (failure["level"], failure["session_id"], failure["owner"]) == ("error", session_id, "local")
    assert failure["traceback"][-1].startswith("ValueError (its text")
    assert (access["level"], access["status"]) == ("warning", 500)
    assert WORD not in str([failure, access])


def test_a_name_from_outside_cannot_end_its_line(server: RunningServer) -> None:
    path = "/api/v1/training_runs/a%0A2026-01-01T00:00:00.000Z%20tinsmith%20CRITICAL%20lost%1B%5B31m"
    with logged("text") as stream:
        server.call("GET", path)
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert 'model_id="a\\\\n2026' in line
