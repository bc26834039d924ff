"""Sessions, runs and checkpoints as they are looked up, changed and downloaded later."""

from __future__ import annotations

import io
import tarfile
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.server.api.running import RunningServer
from tests.server.api.stand_in import FILES


@pytest.fixture(scope="module")
def run(server: RunningServer) -> str:
    """A run with one checkpoint of every kind."""
    model_id = server.model()
    for number, (endpoint, name) in enumerate(
        [("save_weights", "state"), ("save_weights_for_sampler", "sampler"), ("save_weights_external", "out")], start=1
    ):
        server.result(server.post(endpoint, {"model_id": model_id, "seq_id": number, "path": name}))
    return model_id


def test_a_run_shows_its_last_checkpoints(server: RunningServer, run: str) -> None:
    shown = server.get(f"training_runs/{run}").json()
    assert shown["last_checkpoint"]["checkpoint_id"] == "weights/state"
    assert shown["last_sampler_checkpoint"]["checkpoint_type"] == "sampler"
    assert shown["lora_rank"] == 8


def test_times_have_a_time_zone(server: RunningServer, run: str) -> None:
    shown = server.get(f"training_runs/{run}").json()
    for text in (shown["last_request_time"], shown["last_checkpoint"]["time"]):
        assert text.endswith("Z")
        assert datetime.fromisoformat(text).tzinfo is not None


def test_lists_are_paged(server: RunningServer, run: str) -> None:
    page = server.get("checkpoints?limit=2&offset=1").json()
    assert len(page["checkpoints"]) == 2
    assert page["cursor"]["offset"] == 1
    assert page["cursor"]["total_count"] >= 3
    assert len(server.get("training_runs?limit=1").json()["training_runs"]) == 1


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=1001", "offset=-1", "limit=x", "access_scope=all", "limit=9e9"),
        *(f"limit={'0' * 20}1001", f"offset={'9' * 5000}"),
    ],
)
def test_a_page_that_cannot_be_is_refused(server: RunningServer, query: str) -> None:
    assert server.get(f"training_runs?{query}").status == 422


def test_a_time_to_live_is_set_and_removed(server: RunningServer, run: str) -> None:
    place = f"/api/v1/training_runs/{run}/checkpoints/weights/state"
    assert server.call("PUT", f"{place}/ttl", {"ttl_seconds": 7200}).status == 204
    assert "expires_at" in server.get(f"training_runs/{run}").json()["last_checkpoint"]
    assert server.call("PUT", f"{place}/ttl", {"ttl_seconds": None}).status == 204
    assert "expires_at" not in server.get(f"training_runs/{run}").json()["last_checkpoint"]
    assert server.call("PUT", f"{place}/ttl", {"ttl_seconds": 1}).status == 422


def test_what_was_done_to_checkpoints_is_in_the_audit_log(server: RunningServer, run: str) -> None:
    server.post(f"training_runs/{run}/checkpoints/weights/state/publish")
    entries = server.get("audit?event_type=checkpoints").json()["entries"]
    assert entries[0]["event"] == "checkpoint_publish"
    assert entries[0]["tinker_path"] == f"tinker://{run}/weights/state"
    assert server.get("audit?event_type=teams").json() == {"entries": []}
    assert server.get("audit?day=2030-13-01").status == 422


@pytest.mark.parametrize("day", ["9999-12-31", "yesterday"])
def test_a_day_that_cannot_be_is_refused(server: RunningServer, day: str) -> None:
    refused = server.get(f"audit?day={day}")
    assert (refused.status, day in refused.json()["detail"]) == (422, True)


def test_a_copy_is_made_once_per_idempotency_key(server: RunningServer, run: str) -> None:
    body = {"source_path": f"tinker://{run}/weights/state", "ttl_seconds": 3600}
    first, again, other = (
        server.post("copy_weights", body, headers={"x-idempotency-key": key}).json()["tinker_path"]
        for key in ("one", "one", "two")
    )
    assert first == again != other
    copied = first.removeprefix("tinker://").partition("/")[0]
    assert "expires_at" in server.get(f"training_runs/{copied}").json()["last_checkpoint"]
    step = server.post("optim_step", {"model_id": copied, "seq_id": 1, "adam_params": {}})
    assert "copied checkpoints only" in server.result(step)["error"]


def test_a_copy_belongs_to_the_project_it_was_copied_into(server: RunningServer, run: str) -> None:
    body = {"source_path": f"tinker://{run}/weights/state"}

    def project_runs(project_id: str) -> list[str]:
        runs = server.get(f"training_runs?project_id={project_id}&limit=1000").json()["training_runs"]
        return [one["training_run_id"] for one in runs]

    def run_of(**fields: Any) -> str:
        copied = server.post("copy_weights", {**body, **fields}).json()["tinker_path"]
        return str(copied.removeprefix("tinker://").partition("/")[0])

    team, default = run_of(destination_project_id="team"), run_of()
    assert project_runs("team") == [team]
    assert default in project_runs("project-default")
    stored = server.get("billing/usage/checkpoints/current?project_id=team").json()["data"]
    assert [item["checkpoint_count"] for item in stored] == [1]


def test_a_copy_can_take_a_place_in_a_session(server: RunningServer, run: str) -> None:
    model_id = server.model()
    session_id = model_id.partition(":")[0]
    body = {"source_path": f"tinker://{run}/weights/state", "session_id": session_id}
    for _ in range(2):
        copied = server.post("copy_weights", {**body, "model_seq_id": 7})
        assert copied.json()["tinker_path"] == f"tinker://{session_id}:train:7/weights/state"
    assert server.get(f"sessions/{session_id}").json()["training_run_ids"] == [model_id, f"{session_id}:train:7"]
    assert server.post("copy_weights", {**body, "model_seq_id": 0}).status == 422
    assert server.post("copy_weights", body).status == 422
    assert server.post("copy_weights", {**body, "session_id": "no", "model_seq_id": 1}).status == 404


def test_a_deleted_checkpoint_is_gone_with_its_files(server: RunningServer) -> None:
    model_id = server.model()
    path = server.result(server.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"}))["path"]
    folder = server.app.state.services.folders.folder(path)
    assert folder.is_dir()
    assert server.call("DELETE", f"/api/v1/training_runs/{model_id}/checkpoints/weights/a").status == 204
    assert not folder.exists()
    assert server.call("DELETE", f"/api/v1/training_runs/{model_id}/checkpoints/weights/a").status == 404


# Downloads


def download(url: str, **headers: str) -> tuple[int, bytes, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def test_an_export_is_downloaded_without_a_key_whole_or_in_part(server: RunningServer, run: str) -> None:
    given = server.get(f"training_runs/{run}/checkpoints/external_weights/out/external_weights_urls").json()
    assert datetime.fromisoformat(given["expires"]).tzinfo is not None
    url, content = given["urls"]["adapter_model.safetensors"], FILES["adapter_model.safetensors"]
    status, body, headers = download(url)
    assert (status, body, headers["content-length"]) == (200, content, str(len(content)))
    status, body, headers = download(url, Range="bytes=100-199")
    assert (status, body) == (206, content[100:200])
    assert headers["content-range"] == f"bytes 100-199/{len(content)}"
    assert download(url, Range=f"bytes={len(content)}-")[0] == 416


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("lines=1", 400),
        ("bytes=9-5", 400),
        ("bytes=-", 400),
        (f"bytes={10**30}-", 400),
        ("bytes=99999999-", 416),
    ],
)
def test_a_part_that_does_not_exist_is_refused_in_words(
    server: RunningServer, run: str, asked: str, status: int
) -> None:
    given = server.get(f"training_runs/{run}/checkpoints/external_weights/out/external_weights_urls").json()
    refused, body, _ = download(given["urls"]["adapter_model.safetensors"], Range=asked)
    assert (refused, b'"detail":"The header Range is' in body) == (status, True)


def test_a_changed_or_expired_url_is_refused(server: RunningServer, run: str, tmp_path: Path) -> None:
    given = server.get(f"training_runs/{run}/checkpoints/external_weights/out/external_weights_urls").json()
    url = given["urls"]["adapter_config.json"]
    assert download(url.replace("adapter_config.json", "policy.json"))[0] == 403
    assert download(url.replace("external_weights", "weights"))[0] in (403, 422)
    assert download(url.partition("?")[0])[0] == 403
    with RunningServer(tmp_path, url_lifetime_seconds=-10) as running:
        model_id = running.model()
        running.result(running.post("save_weights_external", {"model_id": model_id, "seq_id": 1, "path": "out"}))
        late = running.get(f"training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls").json()
        status, body, _ = download(late["urls"]["adapter_config.json"])
    assert status == 403
    assert b"has expired" in body


def test_only_exports_have_urls(server: RunningServer, run: str) -> None:
    assert server.get(f"training_runs/{run}/checkpoints/weights/state/external_weights_urls").status == 422


def test_old_clients_get_an_archive(server: RunningServer, run: str) -> None:
    given = server.get(f"training_runs/{run}/checkpoints/sampler_weights/sampler/archive").json()
    status, body, headers = download(given["url"])
    assert (status, headers["content-length"]) == (200, str(len(body)))
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        assert set(FILES) <= set(archive.getnames())


def test_the_timeline_of_a_session_can_be_downloaded(server: RunningServer, run: str) -> None:
    session_id = run.partition(":")[0]
    given = server.get(f"sessions/{session_id}/trace_export").json()
    assert given["status"] == "ready"
    assert "error" not in given
    status, body, _ = download(given["url"])
    assert status == 200
    assert b"weights/state" in body
    assert download(given["url"].replace(session_id, "other"))[0] == 403


# Sessions


def test_a_heartbeat_is_answered_until_the_session_ends(server: RunningServer) -> None:
    session_id = server.session()
    assert server.post("session_heartbeat", {"session_id": session_id}).json() == {"type": "session_heartbeat"}
    finish = {"reason": {"type": "errored"}, "detail": "gave up"}
    assert server.post(f"sessions/{session_id}/finish", finish).status == 204
    assert server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None}).status == 204
    assert server.post("session_heartbeat", {"session_id": session_id}).status == 410
    found = server.post("sessions/search", {"session_id": session_id}).json()["sessions"][0]
    assert found["status"] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "gave up"}


def test_metadata_comes_back_as_text(server: RunningServer) -> None:
    body = {"tags": [], "sdk_version": "1", "user_metadata": {"a": "b", "n": 1, "deep": {"x": [None]}}}
    session_id = server.post("create_session", body).json()["session_id"]
    assert server.get(f"sessions/{session_id}").json()["user_metadata"] == {
        "a": "b",
        "n": "1",
        "deep": '{"x":[null]}',
    }


def test_sessions_are_found_page_by_page(server: RunningServer) -> None:
    made = [server.session() for _ in range(3)]
    first = server.post("sessions/search", {"limit": 2}).json()
    second = server.post("sessions/search", {"limit": 2, "cursor": first["next_cursor"]}).json()
    found = [one["session_id"] for one in first["sessions"] + second["sessions"]]
    assert found[:3] == made[::-1]


def test_sessions_are_found_by_words_of_their_name_or_by_id(server: RunningServer) -> None:
    body = {"tags": [], "sdk_version": "1", "user_metadata": {}, "display_name": "Tall Ships of the north"}
    named = server.post("create_session", body).json()["session_id"]
    plain = server.session()

    def found(**query: Any) -> list[str]:
        return [one["session_id"] for one in server.post("sessions/search", query).json()["sessions"]]

    assert found(display_name="NORTH tall") == [named]
    assert found(display_name="north small") == []
    assert found(display_name="ships", session_id=plain) == [plain, named]
    assert found(owner={"type": "user", "owner_urns": ["local"]}, session_id=plain) == [plain]
    assert found(owner={"type": "user", "owner_urns": ["somebody"]}, session_id=plain) == []
    assert found(statuses=[{"type": "failed"}]) == []


@pytest.mark.parametrize(
    "query",
    [
        {"project_ids": ["p"] * 101},
        {"statuses": [{"type": "active"}] * 101},
        {"user_metadata": {str(number): "x" for number in range(101)}},
        {"display_name": "word " * 101},
    ],
)
def test_a_search_with_too_many_conditions_is_refused(server: RunningServer, query: dict[str, Any]) -> None:
    refused = server.post("sessions/search", query)
    assert refused.status == 422
    assert refused.json()["detail"] == f"{next(iter(query))} has 101 parts; search for at most 100 at once"


def test_a_search_for_a_longer_name_than_there_can_be_is_refused(server: RunningServer) -> None:
    refused = server.post("sessions/search", {"display_name": "x" * 60_000})  # longer than SQLite's patterns
    assert refused.status == 422
    assert refused.json()["detail"] == "display_name has 60,000 characters; keep it to 1,000"


def test_a_number_of_a_sampling_session_stands_for_one_source(server: RunningServer, run: str) -> None:
    session_id = server.session()
    first = server.sampler(session_id)
    assert server.sampler(session_id) == first
    other = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": f"tinker://{run}/weights/state"}
    refused = server.post("create_sampling_session", other)
    assert refused.status == 422
    assert "samples from other weights" in refused.json()["detail"]


def test_storage_is_counted_by_project(server: RunningServer, run: str) -> None:
    items = server.get("billing/usage/checkpoints/current").json()["data"]
    assert sum(item["checkpoint_count"] for item in items) >= 3
    assert server.get("billing/usage/events").json() == {"data": [], "sessions": {}}
