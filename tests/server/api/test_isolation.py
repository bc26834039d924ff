"""What belongs to one key does not exist for another, unless it was published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.api.running import RunningServer

ANNA, BORIS = "tml-anna", "tml-boris"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("shared"), api_keys=(ANNA, BORIS)) as running:
        yield running


@pytest.fixture(scope="module")
def things(shared: RunningServer) -> dict[str, str]:
    """Anna's."""
    body = {"tags": [], "user_metadata": {}, "sdk_version": "1", "display_name": "Anna's secret"}
    session_id = shared.post("create_session", body, key=ANNA).json()["session_id"]
    model_id = shared.model(session_id, key=ANNA)
    saved = shared.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "state"}, key=ANNA)
    exported = shared.post("save_weights_external", {"model_id": model_id, "seq_id": 2, "path": "out"}, key=ANNA)
    shared.result(exported, key=ANNA)
    return {
        "session": session_id,
        "model": model_id,
        "sampler": shared.sampler(session_id, key=ANNA),
        "request": saved.json()["request_id"],
        "path": shared.result(saved, key=ANNA)["path"],
    }


CALLS: dict[str, tuple[str, str, Any]] = {
    "heartbeat": ("POST", "session_heartbeat", {"session_id": "{session}"}),
    "finish": ("POST", "sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}),
    "session": ("GET", "sessions/{session}", None),
    "project": ("PUT", "sessions/{session}/project", {"project_id": "mine"}),
    "trace": ("GET", "sessions/{session}/trace_export", None),
    "create_model": ("POST", "create_model", {"session_id": "{session}", "model_seq_id": 5, "base_model": "x"}),
    "get_info": ("POST", "get_info", {"model_id": "{model}"}),
    "optim_step": ("POST", "optim_step", {"model_id": "{model}", "seq_id": 9, "adam_params": {}}),
    "unload": ("POST", "unload_model", {"model_id": "{model}"}),
    "future": ("POST", "retrieve_future", {"request_id": "{request}"}),
    "cancel": ("POST", "cancel_future", {"request_id": "{request}"}),
    "sampler": ("GET", "samplers/{sampler}", None),
    "join": ("POST", "join_sampling_session", {"sampling_session_id": "{sampler}"}),
    "asample": ("POST", "asample", {"sampling_session_id": "{sampler}", "seq_id": 0}),
    "run": ("GET", "training_runs/{model}", None),
    "checkpoints": ("GET", "training_runs/{model}/checkpoints", None),
    "weights_info": ("POST", "weights_info", {"tinker_path": "{path}"}),
    "copy": ("POST", "copy_weights", {"source_path": "{path}"}),
    "publish": ("POST", "training_runs/{model}/checkpoints/weights/state/publish", None),
    "unpublish": ("DELETE", "training_runs/{model}/checkpoints/weights/state/publish", None),
    "ttl": ("PUT", "training_runs/{model}/checkpoints/weights/state/ttl", {"ttl_seconds": 3600}),
    "delete": ("DELETE", "training_runs/{model}/checkpoints/weights/state", None),
    "urls": ("GET", "training_runs/{model}/checkpoints/external_weights/out/external_weights_urls", None),
    "archive": ("GET", "training_runs/{model}/checkpoints/weights/state/archive", None),
}


@pytest.mark.parametrize("name", CALLS)
def test_anothers_things_look_like_things_that_never_were(
    shared: RunningServer, things: dict[str, str], name: str
) -> None:
    method, path, body = CALLS[name]
    nothing = {kind: _nothing_like(kind, things) for kind in things}
    anothers, missing = (
        shared.call(method, f"/api/v1/{_filled(path, names)}", _filled(body, names), key=BORIS)
        for names in (things, nothing)
    )
    assert anothers.status == missing.status == 404
    hidden = [anothers.body.decode().replace(things[kind], nothing[kind]) for kind in ("session",)]
    assert hidden[0].replace(things["model"], nothing["model"]) == missing.body.decode()


def _nothing_like(kind: str, things: dict[str, str]) -> str:
    return things[kind].replace(things["session"], "00000000-0000-4000-8000-000000000000")


def _filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        return value.format(**names)
    return {key: _filled(item, names) for key, item in value.items()} if isinstance(value, dict) else value


def test_lists_hold_ones_own_only(shared: RunningServer, things: dict[str, str]) -> None:
    assert shared.get("sessions", key=BORIS).json() == {"sessions": []}
    assert shared.get("training_runs?access_scope=accessible", key=BORIS).json()["training_runs"] == []
    assert shared.get("checkpoints", key=BORIS).json()["checkpoints"] == []
    assert shared.post("sessions/search", {"owner": {"type": "accessible"}}, key=BORIS).json() == {"sessions": []}
    assert shared.get("audit", key=BORIS).json() == {"entries": []}
    assert things["session"] in shared.get("sessions", key=ANNA).json()["sessions"]


def test_an_access_token_of_the_owner_opens_a_checkpoint(shared: RunningServer, things: dict[str, str]) -> None:
    body = {"source_path": things["path"]}
    copied = shared.post("copy_weights", body, key=BORIS, headers={"x-tinker-weights-access-token": ANNA})
    assert copied.status == 200
    loaded = {"session_id": shared.session(key=BORIS), "model_seq_id": 0, "path": things["path"], "optimizer": True}
    made = shared.post("load_weights", {**loaded, "weights_access_token": ANNA}, key=BORIS)
    assert shared.result(made, key=BORIS)["model_id"] == f"{loaded['session_id']}:train:0"
    assert ANNA.encode() not in b"".join(job.payload for job in shared.workers.executed)


def test_a_published_checkpoint_is_everybodys_to_read(shared: RunningServer, things: dict[str, str]) -> None:
    place = f"training_runs/{things['model']}/checkpoints/weights/state"
    for _ in range(2):  # the second time changes nothing, and is no conflict: those are retried for minutes
        assert shared.post(f"{place}/publish", key=ANNA).status == 204
    try:
        assert shared.post("weights_info", {"tinker_path": things["path"]}, key=BORIS).status == 200
        assert shared.call("DELETE", f"/api/v1/{place}", key=BORIS).status == 404
        _its_session_is_seen_and_what_was_written_into_it_is_not(shared, things)
    finally:
        assert shared.call("DELETE", f"/api/v1/{place}/publish", key=ANNA).status == 204
    assert shared.post("weights_info", {"tinker_path": things["path"]}, key=BORIS).status == 404


def _its_session_is_seen_and_what_was_written_into_it_is_not(shared: RunningServer, things: dict[str, str]) -> None:
    place = f"sessions/{things['session']}"
    assert shared.get("sessions?access_scope=accessible", key=BORIS).json()["sessions"][-1] == things["session"]
    assert shared.get(place, key=BORIS).status == 404
    shown = shared.get(f"{place}?access_scope=accessible", key=BORIS).json()
    assert (shown["training_run_ids"], shown["sampler_ids"]) == ([things["model"]], [])
    assert not shown.get("display_name")
    query = {"session_id": things["session"], "owner": {"type": "accessible"}}
    (found,) = shared.post("sessions/search", query, key=BORIS).json()["sessions"]
    assert found["checkpoints_count"] == 1
    assert "Anna's secret" not in str(found)
    assert "Anna's secret" in str(shared.post("sessions/search", query, key=ANNA).json())


def test_an_unknown_key_is_refused(shared: RunningServer) -> None:
    refused = shared.get("sessions", key="tml-eve")
    assert refused.status == 401
    assert "tml-eve" not in refused.body.decode()
