"""The timeline of a session in the trace event format, which Perfetto and Chrome's tracing page show."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tinsmith.server.store import Store
from tinsmith.server.store.records import Checkpoint, Model, Session


def session_trace(store: Store, session: Session) -> dict[str, Any]:
    """One row for the session and one for each of its training runs, with their checkpoints as moments on it."""
    members = store.sessions.members(session.session_id, session.owner)
    found = [store.models.get(model_id, session.owner) for model_id in members.model_ids]
    events = [_span(0, f"session {session.display_name or session.session_id}", session.created, session.heartbeat)]
    for row, run in enumerate((run for run in found if run is not None), start=1):
        events += _run_events(row, run, store.checkpoints.of_run(run.model_id, session.owner))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"session_id": session.session_id}}


def _run_events(row: int, run: Model, checkpoints: list[Checkpoint]) -> list[dict[str, Any]]:
    name = f"training {run.model_id} on {run.base_model}"
    saved = [
        {"ph": "i", "s": "t", "pid": 1, "tid": row, "name": f"{one.key.kind}/{one.key.name}", "ts": _time(one.created)}
        for one in checkpoints
    ]
    return [_span(row, name, run.created, run.last_request), *saved]


def _span(row: int, name: str, start: datetime, end: datetime) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": row, "name": name, "ts": _time(start), "dur": _time(end) - _time(start)}


def _time(moment: datetime) -> int:
    """Microseconds, the unit of the format."""
    return int(moment.timestamp() * 1e6)
