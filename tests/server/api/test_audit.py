"""Who did what, from where and with which outcome: written down with the deed, and kept for as long as was said."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.server.api.running import MODELS, RunningServer
from tests.server.api.test_tidying import Minutes
from tinsmith.server.store.records import AuditEvent, CheckpointKey, NewEvent

ANNA, BORIS = "tml-anna", "tml-boris"
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[RunningServer]:
    with RunningServer(tmp_path, api_keys=(ANNA, BORIS)) as running:
        yield running


def trail(server: RunningServer, *, but: tuple[str, ...] = ("key_create",)) -> list[AuditEvent]:
    """All events, oldest first."""
    return [event for event in reversed(server.store.audit.trail(since=LONG_AGO)) if event.event not in but]


def words(events: list[AuditEvent]) -> list[tuple[str, str]]:
    return [(event.event, event.outcome) for event in events]


def saved(server: RunningServer, **options: Any) -> str:
    """A run with a checkpoint to train on and one to export."""
    run = server.model(**options)
    server.result(server.post("save_weights", {"model_id": run, "seq_id": 1, "path": "state"}, **options), **options)
    exported = server.post("save_weights_external", {"model_id": run, "seq_id": 2, "path": "out"}, **options)
    server.result(exported, **options)
    return run


def test_everything_that_is_done_to_a_checkpoint_is_known_with_who_and_from_where(shared: RunningServer) -> None:
    run = saved(shared, key=ANNA)
    place = f"/api/v1/training_runs/{run}/checkpoints"
    shared.call("PUT", f"{place}/weights/state/ttl", {"ttl_seconds": 7200}, key=ANNA)
    shared.call("POST", f"{place}/weights/state/publish", key=ANNA)
    shared.post("copy_weights", {"source_path": f"tinker://{run}/weights/state"}, key=BORIS)
    shared.call("DELETE", f"{place}/weights/state/publish", key=ANNA)
    shared.call("GET", f"{place}/external_weights/out/external_weights_urls", key=ANNA)
    shared.call("DELETE", f"{place}/weights/state", key=ANNA)
    events = trail(shared)
    assert words(events) == [
        ("model_create", "accepted"),
        ("checkpoint_save", "accepted"),
        ("checkpoint_export", "accepted"),
        ("checkpoint_set_ttl", "done"),
        ("checkpoint_publish", "done"),
        ("checkpoint_copy", "done"),
        ("checkpoint_unpublish", "done"),
        ("checkpoint_download", "done"),
        ("checkpoint_delete", "done"),
    ]
    keys = {key.key_id: key for key in shared.store.keys.all()}
    assert [keys[event.key_id or 0].name for event in events] == [
        "configured-2" if event.event == "checkpoint_copy" else "configured-1" for event in events
    ]
    assert all(event.owner == keys[event.key_id or 0].owner for event in events)
    assert {event.address for event in events} == {"127.0.0.1"}
    assert events[1].tinker_path == events[-1].tinker_path == f"tinker://{run}/weights/state"
    assert events[3].details == {"ttl_seconds": 7200}
    assert events[5].details == {"source": f"tinker://{run}/weights/state"}


def test_what_is_refused_is_known_too(shared: RunningServer) -> None:
    run = saved(shared, key=ANNA)
    before = len(trail(shared))
    place = f"/api/v1/training_runs/{run}/checkpoints/weights/state"
    for method, path in (("DELETE", place), ("POST", f"{place}/publish"), ("GET", f"{place}/archive")):
        assert shared.call(method, path, key=BORIS).status == 404
    assert shared.call("PUT", f"{place}/ttl", {"ttl_seconds": -1}, key=ANNA).status == 422
    finish = {"reason": {"type": "success"}, "detail": None}
    assert shared.post("sessions/nothing%0Ahere%00/finish", finish, key=BORIS).status in (404, 422)
    events = trail(shared)[before:]
    assert words(events) == [
        ("checkpoint_delete", "refused"),
        ("checkpoint_publish", "refused"),
        ("checkpoint_download", "refused"),
        ("checkpoint_set_ttl", "refused"),
        ("session_end", "refused"),
    ]
    named = {"run_id": run, "kind": "weights", "name": "state"}
    assert events[0].details == {"status": 404, "reason": "There is no checkpoint", **named}
    assert events[4].details["session_id"] == "nothing\\nhere\\x00"
    assert shared.get("audit", key=BORIS).json()["entries"][0]["event"] == "key_create", "its owner sees deeds only"


def test_what_was_not_to_be_read_is_named(shared: RunningServer) -> None:
    run = shared.model(key=ANNA)
    saving = {"model_id": run, "seq_id": 1, "path": "mine"}
    path = shared.result(shared.post("save_weights", saving, key=ANNA), key=ANNA)["path"]
    session_id, theirs = shared.session(key=BORIS), shared.model(key=BORIS)
    before = len(trail(shared))
    loading = {"path": path, "optimizer": True}
    shared.post("load_weights", {**loading, "session_id": session_id, "model_seq_id": 0}, key=BORIS)
    shared.post("load_weights", {**loading, "model_id": theirs, "seq_id": 1}, key=BORIS)
    assert shared.post("copy_weights", {"source_path": path}, key=BORIS).status == 404
    assert shared.post("copy_weights", {"source_path": "nonsense"}, key=BORIS).status == 422
    events = trail(shared)[before:]
    load, copy = ("model_load", "refused"), ("checkpoint_copy", "refused")
    assert words(events) == [load, load, copy, copy]
    assert [event.details.get("source") for event in events] == [path] * 3 + [None]


def test_an_operation_that_is_refused_or_repeated_is_one_event(shared: RunningServer) -> None:
    run = shared.model(key=ANNA)
    for _ in range(2):
        shared.post("save_weights", {"model_id": run, "seq_id": 1, "path": "../.."}, key=ANNA)
        shared.post("load_weights", {"model_id": run, "seq_id": 2, "path": "tinker://x/weights/y"}, key=ANNA)
    events = trail(shared, but=("key_create", "model_create"))
    assert words(events) == [("checkpoint_save", "refused"), ("model_load", "refused")]
    reasons = ("InvalidInputError: path", "InvalidTypeError: LoadWeightsRequest")
    assert [event.details for event in events] == [
        {"request_id": f"{run}:{number}", "category": "user", "reason": reason}
        for number, reason in enumerate(reasons, start=1)
    ]


def test_a_worker_knows_the_key_that_an_operation_came_with(
    shared: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.workers, "_claim", list)
    body = {"session_id": shared.session(key=BORIS), "model_seq_id": 0, "base_model": MODELS[0]}
    assert shared.post("create_model", body, key=BORIS).status == 200
    (job,) = shared.store.jobs.claim(MODELS[0], "worker", train=1)
    (accepted,) = trail(shared)
    assert job.key_id == accepted.key_id
    assert shared.store.keys.get(job.key_id or 0) == shared.store.keys.verify(BORIS)


def test_steps_of_training_and_samples_are_no_events(shared: RunningServer) -> None:
    run = shared.model(key=ANNA)
    before = len(trail(shared))
    shared.result(shared.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}}, key=ANNA), key=ANNA)
    body = {"model_id": run, "seq_id": 2, "sampling_session_seq_id": 0}
    shared.result(shared.post("save_weights_for_sampler", body, key=ANNA), key=ANNA)
    assert len(trail(shared)) == before


def test_the_end_of_a_session_is_known_once(shared: RunningServer) -> None:
    session_id = shared.session(key=ANNA)
    for reason in ("errored", "success"):
        body = {"reason": {"type": reason}, "detail": "what the client says"}
        assert shared.post(f"sessions/{session_id}/finish", body, key=ANNA).status == 204
    (event,) = trail(shared)
    assert (event.event, event.details) == ("session_end", {"session_id": session_id, "reason": "errored"})


def test_a_session_that_is_moved_to_where_it_is_makes_no_event(shared: RunningServer) -> None:
    place = f"/api/v1/sessions/{shared.session(key=ANNA)}/project"
    moves = [shared.call("PUT", place, {"project_id": name}, key=ANNA).status for name in ("one", "one", "two", "two")]
    assert moves == [204] * 4
    assert words(trail(shared)) == [("session_move", "done")] * 2


def test_keys_that_are_made_and_revoked_are_known_by_name_alone(shared: RunningServer) -> None:
    assert shared.call("DELETE", "/api/v1/auth/apikey/me", key=BORIS).status == 204
    made, _, revoked = trail(shared, but=())
    assert made.event == "key_create"
    assert (made.address or "").startswith("command line")
    assert (revoked.event, revoked.address, revoked.details) == ("key_revoke", "127.0.0.1", {"name": "configured-2"})
    assert not any(key in str(trail(shared, but=())) for key in (ANNA, BORIS))


def test_a_deed_that_is_undone_leaves_no_event(shared: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is written in the transaction of what it tells of."""
    run = saved(shared, key=ANNA)
    before = len(trail(shared))

    def fail(*arguments: object) -> None:
        raise RuntimeError("the machine stopped here")

    monkeypatch.setattr("tinsmith.server.store.audit.note", fail)
    place = f"/api/v1/training_runs/{run}/checkpoints/weights/state"
    assert shared.call("POST", f"{place}/publish", key=ANNA).status == 500
    assert len(trail(shared)) == before
    assert shared.get(f"training_runs/{run}/checkpoints", key=ANNA).json()["checkpoints"][-1]["public"] is False


def test_sessions_that_the_server_ends_are_events_without_an_address(shared: RunningServer) -> None:
    session_id = shared.session(key=ANNA)
    Minutes(shared).pass_(timedelta(minutes=21))
    (event,) = trail(shared)
    assert (event.event, event.address, event.details["session_id"]) == ("session_end", None, session_id)


def test_checkpoints_whose_time_is_over_are_events_too(shared: RunningServer) -> None:
    run = saved(shared, key=ANNA)
    past = datetime.now(UTC) - timedelta(seconds=1)
    key = CheckpointKey(run_id=run, kind="weights", name="state")
    (owner,) = {event.owner for event in trail(shared)}
    assert shared.store.checkpoints.set_expiry(key, owner, past)
    Minutes(shared).round()
    event = trail(shared)[-1]
    assert (event.event, event.owner, event.tinker_path) == ("checkpoint_expire", owner, key.tinker_path)


def test_events_are_kept_for_as_long_as_was_said(tmp_path: Path) -> None:
    with RunningServer(tmp_path, audit_days=30) as running:
        running.store.audit.record(NewEvent(owner="ann", event="checkpoint_publish"))
        minutes = Minutes(running)
        minutes.now += timedelta(days=29)
        minutes.round()
        assert len(trail(running)) == 1
        minutes.now += timedelta(days=2)
        minutes.round()
        assert trail(running) == []


def test_refusals_cannot_fill_the_database(tmp_path: Path) -> None:
    with RunningServer(tmp_path, max_paperwork_bytes=4096, paperwork_bytes_per_second=1) as running:
        answers = [running.call("DELETE", "/api/v1/training_runs/a/checkpoints/weights/b").status for _ in range(8)]
        assert answers == [404] * 4 + [429] * 4
        assert len(trail(running)) == 4
