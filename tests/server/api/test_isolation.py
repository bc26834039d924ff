"""What belongs to one key does not exist for another, unless it was published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.routing import Route

from tests.server.api.running import MODELS, Answer, RunningServer
from tests.server.api.test_limits import custom_loss
from tinsmith.server.messages import LoadJob
from tinsmith.wire import json

ANNA, BORIS = "tml-anna", "tml-boris"
NOBODY = "00000000-0000-4000-8000-000000000000"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("shared"), api_keys=(ANNA, BORIS), long_poll_seconds=5) as running:
        yield running


@pytest.fixture(scope="module")
def things(shared: RunningServer) -> dict[str, str]:
    """Anna's."""
    written = {"display_name": "Anna's secret", "project_id": "Anna's secret project"}
    body = {"tags": [], "user_metadata": {}, "sdk_version": "1", **written}
    session_id = shared.post("create_session", body, key=ANNA).json()["session_id"]
    place = {"session_id": session_id, "model_seq_id": 0, "base_model": MODELS[0], "lora_config": {"rank": 8}}
    making = {**place, "user_metadata": {"customer": "Anna's secret"}}
    model_id = shared.result(shared.post("create_model", making, key=ANNA), key=ANNA)["model_id"]
    saved = shared.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "state"}, key=ANNA)
    exported = shared.post("save_weights_external", {"model_id": model_id, "seq_id": 2, "path": "out"}, key=ANNA)
    shared.result(exported, key=ANNA)
    shared.post("log_metrics", {"model_id": model_id, "metrics": {"secret": 1}}, key=ANNA)
    loss = shared.result(shared.post("create_custom_loss", custom_loss(session_id, 0), key=ANNA), key=ANNA)
    return {
        "session": session_id,
        "model": model_id,
        "sampler": shared.sampler(session_id, key=ANNA),
        "request": saved.json()["request_id"],
        "path": shared.result(saved, key=ANNA)["path"],
        "loss": loss["loss_id"],
        "key": str(shared.get("auth/apikey/me", key=ANNA).json()["key_id"]),
    }


class Ask(NamedTuple):
    """A request of Boris that names something of Anna's, and the status that it gets."""

    body: Any = None
    status: int = 404
    query: str = ""


EXAMPLES = {"data": [], "loss_fn": "cross_entropy"}
TOKENS = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
DATUM = {
    "model_input": TOKENS,
    "loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "int64", "shape": [1]}},
}
CUSTOM = {"data": [DATUM], "loss_fn": "custom", "loss_fn_config": {"loss_id": "{loss}"}}
TARGET = {"type": "sampling_session", "sampling_session_id": "{sampler}", "cloned_sampler_id": 0}
OPERATION = {"model_id": "{model}", "seq_id": 9}
CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
EXPORTED = {"{kind}": "external_weights", "{name}": "out", "{file:path}": "adapter_config.json"}
ACCESSIBLE = "?access_scope=accessible"

NAMES: dict[str, tuple[Ask, ...]] = {
    "POST /api/v1/session_heartbeat": (Ask({"session_id": "{session}"}),),
    "POST /api/v1/sessions/search": (
        Ask({"session_id": "{session}", "owner": {"type": "accessible"}}, 200),
        Ask({"session_id": "{session}", "owner": {"type": "own"}}, 200),
        Ask({"display_name": "secret", "owner": {"type": "accessible"}}, 200),
    ),
    "POST /api/v1/sessions/{session_id}/finish": (Ask({"reason": {"type": "success"}, "detail": None}),),
    "GET /api/v1/sessions/{session_id}": (Ask(), Ask(query=ACCESSIBLE)),
    "PUT /api/v1/sessions/{session_id}/project": (Ask({"project_id": "mine"}),),
    "GET /api/v1/sessions/{session_id}/trace_export": (Ask(),),
    "GET /api/v1/traces/{session_id}": (
        Ask(status=403),
        Ask(status=403, query="?key=1&expires=9999999999&signature=x"),
    ),
    "POST /api/v1/create_model": (Ask({"session_id": "{session}", "model_seq_id": 5, "base_model": "x"}),),
    "POST /api/v1/get_info": (Ask({"model_id": "{model}"}),),
    "POST /api/v1/unload_model": (Ask({"model_id": "{model}"}),),
    "POST /api/v1/forward_backward": (
        Ask({**OPERATION, "forward_backward_input": EXAMPLES}),
        Ask({"model_id": "{mine}:train:0", "seq_id": 1, "forward_backward_input": CUSTOM}, 200),
    ),
    "POST /api/v1/forward": (Ask({**OPERATION, "forward_input": EXAMPLES}),),
    "POST /api/v1/optim_step": (Ask({**OPERATION, "adam_params": {}}),),
    "POST /api/v1/create_custom_loss": (Ask(custom_loss("{session}", 0)),),
    "POST /api/v1/save_weights": (Ask({**OPERATION, "path": "x"}),),
    "POST /api/v1/save_weights_for_sampler": (Ask({**OPERATION, "path": "x"}),),
    "POST /api/v1/save_weights_external": (Ask({**OPERATION, "path": "x"}),),
    "POST /api/v1/load_weights": (
        Ask({**OPERATION, "path": "{path}", "optimizer": True}),
        Ask({"session_id": "{session}", "model_seq_id": 7, "path": "{path}", "optimizer": True}),
        Ask({"session_id": "{mine}", "model_seq_id": 7, "path": "{path}", "optimizer": True}, 200),
        Ask({"model_id": "{mine}:train:0", "seq_id": 2, "path": "{path}", "optimizer": True}, 200),
    ),
    "POST /api/v1/weights_info": (Ask({"tinker_path": "{path}"}),),
    "POST /api/v1/copy_weights": (
        Ask({"source_path": "{path}"}),
        Ask({"source_path": "{path}", "session_id": "{session}", "model_seq_id": 0}),
    ),
    "POST /api/v1/create_sampling_session": (
        Ask({"session_id": "{session}", "sampling_session_seq_id": 1, "base_model": "tiny/model-1"}),
        Ask({"session_id": "{mine}", "sampling_session_seq_id": 1, "model_path": "{path}"}),
    ),
    "POST /api/v1/join_sampling_session": (Ask({"sampling_session_id": "{sampler}"}),),
    "GET /api/v1/samplers/{sampler_id}": (Ask(),),
    "POST /api/v1/asample": (Ask({"sampling_session_id": "{sampler}", "seq_id": 0, "prompt": TOKENS}),),
    "POST /api/v1/retrieve_future": (Ask({"request_id": "{request}"}),),
    "POST /api/v1/retrieve_futures": (
        Ask({"target": TARGET, "prev_cursor": 0, "retrieved_request_ids": ["{request}"]}),
    ),
    "POST /api/v1/cancel_future": (Ask({"request_id": "{request}"}),),
    "GET /api/v1/training_runs/{run_id}": (Ask(), Ask(query=ACCESSIBLE)),
    "GET /api/v1/training_runs/{run_id}/checkpoints": (Ask(),),
    f"DELETE {CHECKPOINT}": (Ask(),),
    f"POST {CHECKPOINT}/publish": (Ask(),),
    f"DELETE {CHECKPOINT}/publish": (Ask(),),
    f"PUT {CHECKPOINT}/ttl": (Ask({"ttl_seconds": 3600}), Ask({"ttl_seconds": None})),
    f"GET {CHECKPOINT}/external_weights_urls": (Ask(),),
    f"GET {CHECKPOINT}/archive": (Ask(),),
    f"GET {CHECKPOINT}/export": (Ask(query="?to=peft"), Ask(query="?to=merged"), Ask(query="?to=nonsense")),
    "GET /api/v1/files/{run_id}/{kind}/{name}/{file:path}": (Ask(status=403),),
    **{
        f"{method} {prefix}/{path}": asks
        for prefix in ("/v1", "/oai/api/v1")
        for method, path, asks in (
            ("GET", "models/{model:path}", (Ask(),)),
            (
                "POST",
                "completions",
                (Ask({"model": "{path}", "prompt": [1]}), Ask({"model": "{model}", "prompt": [1]})),
            ),
            (
                "POST",
                "chat/completions",
                (Ask({"model": "{path}", "messages": []}), Ask({"model": "{model}", "messages": []})),
            ),
        )
    },
    "POST /api/v1/log_metrics": (Ask({"model_id": "{model}", "metrics": {"reward": 1}}),),
    "GET /dashboard/api/runs/{run_id}": (Ask(),),
    "GET /dashboard/api/runs/{run_id}/series": (Ask(),),
    "GET /dashboard/api/runs/{run_id}/points": (Ask(query="?name=loss"), Ask(), Ask(query="?name=loss&after=x")),
    "GET /dashboard/api/samples": (Ask(query="?run_id={model}"), Ask(query="?run_id={model}&limit=5")),
    "DELETE /dashboard/api/keys/{key_id}": (Ask(),),
}
"""Every endpoint that is told what it is about."""

NAMELESS = {
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/auth/token",
    "GET /api/v1/auth/apikey/me",
    "DELETE /api/v1/auth/apikey/me",
    "GET /api/v1/get_server_capabilities",
    "POST /api/v1/telemetry",
    "GET /api/v1/healthz",
    "GET /readyz",
    "POST /api/v1/create_session",
    "GET /api/v1/sessions",
    "GET /api/v1/training_runs",
    "GET /api/v1/checkpoints",
    "POST /api/v1/import_weights",
    "GET /api/v1/audit",
    "GET /api/v1/billing/usage/events",
    "GET /api/v1/billing/usage/checkpoints/current",
    "GET /dashboard/api/overview",
    "GET /dashboard/api/runs",
    "GET /dashboard/api/keys",
    "POST /dashboard/api/keys",
    "GET /v1/models",
    "GET /oai/api/v1/models",
    "GET /metrics",
    "GET /openapi.json",
    "GET /docs",
    "GET /",
    "GET /web/{name}",
}
"""Every endpoint that is not: about the caller, or the server."""


def test_every_endpoint_is_in_one_of_the_tables(shared: RunningServer) -> None:
    """One that is new belongs into one of them: does its caller name anything that may be somebody else's?"""
    served = {
        f"{method} {route.path}"
        for route in shared.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert served == {*NAMES, *NAMELESS}
    assert len(served) == len(NAMES) + len(NAMELESS)


@pytest.mark.parametrize("endpoint", NAMES)
def test_anothers_things_look_like_things_that_never_were(
    shared: RunningServer, things: dict[str, str], endpoint: str
) -> None:
    nothing = {kind: name.replace(things["session"], NOBODY) for kind, name in things.items()} | {"key": "9"}
    for ask in NAMES[endpoint]:
        anothers, missing = (
            everything_said(shared, endpoint, ask, {**names, "mine": own_session(shared)})
            for names in (things, nothing)
        )
        assert anothers == missing
        assert "Anna" not in str(anothers)


def own_session(shared: RunningServer) -> str:
    """A session of Boris's with a model."""
    session_id = shared.session(key=BORIS)
    shared.model(session_id, key=BORIS)
    return session_id


def everything_said(shared: RunningServer, endpoint: str, ask: Ask, names: dict[str, str]) -> list[Any]:
    """The answer, and what became of an operation that was accepted; ids of the two cases are made the same."""
    method, path = endpoint.split()
    for name, value in placed(endpoint).items():
        path = path.replace(name, value)
    path = path.replace("{session_id}", names["session"]).replace("{run_id}", names["model"])
    path = path.replace("{sampler_id}", names["sampler"]).replace("{key_id}", names["key"])
    path = path.replace("{model:path}", names["path"])
    answer = shared.call(method, path + filled(ask.query, names), filled(ask.body, names), key=BORIS)
    assert answer.status == ask.status, answer
    said = [told(answer, names)]
    if b"request_id" in answer.body:
        result = shared.post("retrieve_future", {"request_id": answer.json()["request_id"]}, key=BORIS)
        assert result.json()["category"] == "user"
        said.append(told(result, names))
    return said


def placed(endpoint: str) -> dict[str, str]:
    """The kind and name in a path: Anna has an export and a checkpoint of the other kind."""
    about_exports = "external_weights_urls" in endpoint or "/files/" in endpoint
    return EXPORTED if about_exports else {"{kind}": "weights", "{name}": "state"}


def told(answer: Answer, names: dict[str, str]) -> tuple[int, dict[str, str], str]:
    body = answer.body.decode().replace(names["mine"], "mine").replace(names["session"], "theirs")
    body = body.replace(f"'{names['key']}'", "their key")
    return (
        answer.status,
        {name.lower(): value for name, value in answer.headers.items() if name.lower() != "date"},
        body,
    )


def filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        for name, meant in names.items():
            value = value.replace(f"{{{name}}}", meant)
        return value
    if isinstance(value, list):
        return [filled(item, names) for item in value]
    return {key: filled(item, names) for key, item in value.items()} if isinstance(value, dict) else value


def test_after_all_that_nothing_of_hers_has_changed(shared: RunningServer, things: dict[str, str]) -> None:
    """Runs after the walk above; alone it only shows that she sees her things."""
    found = shared.post("sessions/search", {"session_id": things["session"]}, key=ANNA).json()["sessions"]
    assert [(one["status"]["type"], one["project_id"]) for one in found] == [("active", "Anna's secret project")]
    kept = shared.get(f"training_runs/{things['model']}/checkpoints", key=ANNA).json()["checkpoints"]
    assert sorted((one["checkpoint_id"], one["public"], one.get("expires_at")) for one in kept) == [
        ("external_weights/out", False, None),
        ("weights/state", False, None),
    ]
    curve = shared.call("GET", f"/dashboard/api/runs/{things['model']}/points?name=client/secret", key=ANNA).json()
    assert [value for _, _, value in curve["points"]] == [1.0]
    step = shared.post("optim_step", {"model_id": things["model"], "seq_id": 3, "adam_params": {}}, key=ANNA)
    assert shared.result(step, key=ANNA)["metrics"]["step"] >= 1
    assert {job.owner for job in shared.workers.executed if job.model_id == things["model"]} == {
        shared.get("auth/apikey/me", key=ANNA).json()["details"]["user_details"]["email"]
    }


def test_lists_hold_ones_own_only(shared: RunningServer, things: dict[str, str]) -> None:
    carl = shared.store.keys.create("carl", "new").plain
    assert shared.get("sessions", key=carl).json() == {"sessions": []}
    for scope in ("", ACCESSIBLE):
        assert shared.get(f"training_runs{scope}", key=carl).json()["training_runs"] == []
        assert shared.get(f"sessions{scope}", key=carl).json()["sessions"] == []
    assert shared.get("checkpoints", key=carl).json()["checkpoints"] == []
    assert shared.post("sessions/search", {"owner": {"type": "accessible"}}, key=carl).json() == {"sessions": []}
    assert {entry["event"] for entry in shared.get("audit", key=carl).json()["entries"]} <= {"key_create"}
    assert shared.get("billing/usage/checkpoints/current", key=carl).json() == {"data": []}
    assert shared.call("GET", "/dashboard/api/runs", key=carl).json() == {"total": 0, "runs": []}
    assert shared.call("GET", "/dashboard/api/samples", key=carl).json() == {"samples": []}
    assert shared.call("GET", "/dashboard/api/overview", key=carl).json()["queue"] == []
    assert [one["name"] for one in shared.call("GET", "/dashboard/api/keys", key=carl).json()["keys"]] == ["new"]
    assert things["session"] in shared.get("sessions", key=ANNA).json()["sessions"]


def test_what_everybody_may_read_names_nobody(shared: RunningServer, things: dict[str, str]) -> None:
    pages = b"".join(
        shared.call("GET", path, key=None).body for path in ("/metrics", "/openapi.json", "/docs", "/readyz")
    )
    named = {**things, "key": ANNA}
    for word in (*named.values(), "Anna", "key-"):
        assert word.encode() not in pages


def test_an_access_token_of_the_owner_opens_a_checkpoint(shared: RunningServer, things: dict[str, str]) -> None:
    body = {"source_path": things["path"]}
    copied = shared.post("copy_weights", body, key=BORIS, headers={"x-tinker-weights-access-token": ANNA})
    assert copied.status == 200
    loaded = {"session_id": shared.session(key=BORIS), "model_seq_id": 0, "path": things["path"], "optimizer": True}
    made = shared.post("load_weights", {**loaded, "weights_access_token": ANNA}, key=BORIS)
    assert shared.result(made, key=BORIS)["model_id"] == f"{loaded['session_id']}:train:0"
    assert ANNA.encode() not in b"".join(job.payload for job in shared.workers.executed)
    loads = [json.decode(LoadJob, job.payload) for job in shared.workers.executed if job.kind == "load_weights"]
    owner = shared.get("auth/apikey/me", key=ANNA).json()["details"]["user_details"]["email"]
    assert loads[-1].reader == owner, "for whom it is read, which may be later"


def test_a_published_checkpoint_is_everybodys_to_read(shared: RunningServer, things: dict[str, str]) -> None:
    place = f"training_runs/{things['model']}/checkpoints/weights/state"
    for _ in range(2):  # the second time changes nothing, and is no conflict: those are retried for minutes
        assert shared.post(f"{place}/publish", key=ANNA).status == 204
    try:
        _it_can_be_read_in_every_way(shared, things)
        for endpoint in (f"DELETE {CHECKPOINT}", *(f"{method} {CHECKPOINT}/publish" for method in ("POST", "DELETE"))):
            test_anothers_things_look_like_things_that_never_were(shared, things, endpoint)
        test_anothers_things_look_like_things_that_never_were(shared, things, f"PUT {CHECKPOINT}/ttl")
        test_anothers_things_look_like_things_that_never_were(shared, things, "POST /api/v1/save_weights")
        _its_session_is_seen_and_what_was_written_into_it_is_not(shared, things)
        _its_run_is_seen_and_what_was_written_into_it_is_not(shared, things)
    finally:
        assert shared.call("DELETE", f"/api/v1/{place}/publish", key=ANNA).status == 204
    assert shared.post("weights_info", {"tinker_path": things["path"]}, key=BORIS).status == 404


@pytest.mark.parametrize("by_overwriting", [False, True])
@pytest.mark.parametrize("reading", ["copy", "archive"])
def test_what_is_withdrawn_before_its_files_are_read_is_read_by_nobody_else(
    shared: RunningServer, monkeypatch: pytest.MonkeyPatch, reading: str, by_overwriting: bool
) -> None:
    """They may have to be waited for, or to be fetched from elsewhere."""
    model_id = shared.model(key=ANNA)
    save = {"model_id": model_id, "path": "state", "overwrite": True}
    path = shared.result(shared.post("save_weights", {**save, "seq_id": 1}, key=ANNA), key=ANNA)["path"]
    place = f"training_runs/{model_id}/checkpoints/weights/state"
    assert shared.post(f"{place}/publish", key=ANNA).status == 204
    archive = shared.get(f"{place}/archive", key=BORIS).json()["url"].removeprefix(shared.url)

    def read() -> int:
        if reading == "archive":
            return shared.call("GET", archive, key=None).status
        return shared.post("copy_weights", {"source_path": path}, key=BORIS).status

    assert read() == 200
    folders = shared.app.state.services.folders
    files = folders.files

    def late(path: str) -> dict[str, Path]:
        if by_overwriting:
            shared.result(shared.post("save_weights", {**save, "seq_id": 2}, key=ANNA), key=ANNA)
        else:
            assert shared.call("DELETE", f"/api/v1/{place}/publish", key=ANNA).status == 204
        found: dict[str, Path] = files(path)
        return found

    monkeypatch.setattr(folders, "files", late)
    assert read() == 404


def _it_can_be_read_in_every_way(shared: RunningServer, things: dict[str, str]) -> None:
    mine = own_session(shared)
    assert shared.post("weights_info", {"tinker_path": things["path"]}, key=BORIS).status == 200
    assert shared.post("copy_weights", {"source_path": things["path"]}, key=BORIS).status == 200
    loading = {"path": things["path"], "optimizer": True}
    for place in ({"model_id": f"{mine}:train:0", "seq_id": 1}, {"session_id": mine, "model_seq_id": 1}):
        loaded = shared.result(shared.post("load_weights", {**loading, **place}, key=BORIS), key=BORIS)
        assert loaded["path"] == things["path"]
    sampler = {"session_id": mine, "sampling_session_seq_id": 0, "model_path": things["path"]}
    assert shared.post("create_sampling_session", sampler, key=BORIS).status == 200
    archive = shared.get(f"training_runs/{things['model']}/checkpoints/weights/state/archive", key=BORIS).json()["url"]
    assert shared.call("GET", archive.removeprefix(shared.url), key=None).status == 200
    shown = shared.get(f"training_runs/{things['model']}/checkpoints", key=BORIS).json()["checkpoints"]
    assert [one["checkpoint_id"] for one in shown] == ["weights/state"], "the other one was not published"


def _its_session_is_seen_and_what_was_written_into_it_is_not(shared: RunningServer, things: dict[str, str]) -> None:
    place = f"sessions/{things['session']}"
    assert things["session"] in shared.get("sessions?access_scope=accessible&limit=1000", key=BORIS).json()["sessions"]
    assert shared.get(place, key=BORIS).status == 404
    shown = shared.get(f"{place}?access_scope=accessible", key=BORIS).json()
    assert (shown["training_run_ids"], shown["sampler_ids"]) == ([things["model"]], [])
    assert not shown.get("display_name")
    query = {"session_id": things["session"], "owner": {"type": "accessible"}}
    (found,) = shared.post("sessions/search", query, key=BORIS).json()["sessions"]
    assert found["checkpoints_count"] == 1
    assert "Anna's secret" not in str(found)
    assert "Anna's secret" in str(shared.post("sessions/search", query, key=ANNA).json())
    project = {**query, "project_ids": ["Anna's secret project"]}
    assert [len(shared.post("sessions/search", project, key=key).json()["sessions"]) for key in (ANNA, BORIS)] == [1, 0]


def _its_run_is_seen_and_what_was_written_into_it_is_not(shared: RunningServer, things: dict[str, str]) -> None:
    place = f"training_runs/{things['model']}{ACCESSIBLE}"
    assert shared.get(place, key=ANNA).json()["user_metadata"] == {"customer": "Anna's secret"}
    listed = shared.get(f"training_runs{ACCESSIBLE}&limit=1000", key=BORIS).json()["training_runs"]
    found = [run for run in listed if run["training_run_id"] == things["model"]]
    for shown in (shared.get(place, key=BORIS).json(), *found):
        assert shown["last_checkpoint"]["tinker_path"] == things["path"]
        assert "Anna's secret" not in str(shown)
    assert found
    project = f"training_runs{ACCESSIBLE}&project_id=Anna%27s%20secret%20project"
    assert [shared.get(project, key=key).json()["cursor"]["total_count"] for key in (ANNA, BORIS)] == [1, 0]


def test_an_unknown_key_is_refused(shared: RunningServer) -> None:
    refused = shared.get("sessions", key="tml-eve")
    assert refused.status == 401
    assert "tml-eve" not in refused.body.decode()
