"""Outcomes as columns, and back."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from tinsmith.server.store.database import Row
from tinsmith.server.store.records import Cancelled, Done, Expired, Failed, Outcome, Status, Stepped, TrainedOn
from tinsmith.server.store.schema import jobs, results

STATUS_COLUMNS = (
    *(jobs.c[name] for name in ("request_id", "kind", "owner", "base_model", "state", "turn", "error", "category")),
    jobs.c.key_id,
    results.c.content_type,
    results.c.data,
)


def outcome_values(outcome: Outcome, now: datetime, serial: int) -> dict[str, Any]:
    """The columns of a job that has just got its outcome."""
    failed = outcome if isinstance(outcome, Failed) else None
    return {
        "state": _STATES[type(outcome)],
        "error": failed and failed.error,
        "category": failed and failed.category,
        "finished": now,
        "done_serial": serial,
        "shown": _shown(outcome),
    }


def _shown(outcome: Outcome) -> bytes | None:
    """For the curves of a model; samples are kept elsewhere."""
    if isinstance(outcome, Done) and isinstance(outcome.shown, TrainedOn | Stepped):
        return msgspec.msgpack.encode(outcome.shown)
    return None


def result_values(request_id: str, done: Done) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "content_type": done.content_type,
        "size": len(done.result),
        "data": done.result,
    }


def status(row: Row) -> Status:
    return Status(
        request_id=row.request_id,
        kind=row.kind,
        owner=row.owner,
        base_model=row.base_model,
        state=row.state,
        outcome=_outcome(row),
        is_held_up=row.state == "queued" and row.turn is None,
        key_id=row.key_id,
    )


_STATES = {Done: "done", Failed: "failed", Cancelled: "cancelled"}


def _outcome(row: Row) -> Outcome | Expired | None:
    match row.state:
        case "done":
            return Expired() if row.data is None else Done(result=row.data, content_type=row.content_type)
        case "failed":
            return Failed(error=row.error, category=row.category)
        case "cancelled":
            return Cancelled()
        case _:
            return None
