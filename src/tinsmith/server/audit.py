"""What goes into the audit trail: who did what, from where, to which thing, and what came of it."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tinsmith.errors import APIStatusError, InvalidInputError
from tinsmith.server.logs import printable
from tinsmith.server.reasons import reason
from tinsmith.server.store import ids
from tinsmith.server.store.records import (
    CheckpointKey,
    CheckpointKind,
    Done,
    EventOutcome,
    Failed,
    Job,
    NewEvent,
    NewJob,
    Outcome,
    Status,
)

if TYPE_CHECKING:
    from tinsmith.server.routes._call import Call

_OF_JOBS: Mapping[str, str] = {
    "create_model": "model_create",
    "load_weights": "model_load",
    "save_weights": "checkpoint_save",
    "save_weights_for_sampler": "checkpoint_save",
    "save_weights_external": "checkpoint_export",
}
_SAVED: Mapping[str, CheckpointKind] = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
_OF_ENDPOINTS: Mapping[str, str] = {
    **_OF_JOBS,
    "copy_weights": "checkpoint_copy",
    "delete_checkpoint": "checkpoint_delete",
    "publish": "checkpoint_publish",
    "unpublish": "checkpoint_unpublish",
    "set_ttl": "checkpoint_set_ttl",
    "external_weights_urls": "checkpoint_download",
    "archive_url": "checkpoint_download",
    "export_checkpoint": "checkpoint_download",
    "import_weights": "checkpoint_import",
    "finish_session": "session_end",
    "assign_project": "session_move",
    "revoke_apikey_me": "key_revoke",
    "create_key": "key_create",
    "revoke_key": "key_revoke",
}
"""By the name of the function that answers."""

_REFUSALS = (400, 403, 404, 409, 410, 422)
"""Statuses that say no; others say to come again, or that nobody knows who asks."""


class _Named(msgspec.Struct):
    path: str | None = None


def command_line() -> str:
    """In place of an address: a command that was run where the server's state is."""
    try:
        return f"command line of {getpass.getuser()}"
    except (OSError, KeyError):  # a container's user need not have a name
        return "command line"


# --- what was asked for ----------------------------------------------------------------------------------------------


def done(call: Call, event: str, key: CheckpointKey | None = None, **details: Any) -> NewEvent:
    return NewEvent(
        event=event,
        details=details,
        model_id=key.run_id if key else None,
        tinker_path=key.tinker_path if key else None,
        **_who(call),
    )


def refused(call: Call, endpoint: str, error: APIStatusError | InvalidInputError) -> NewEvent | None:
    """A request that was turned down, if it would have been an event; with what it names, which may not exist."""
    event = _OF_ENDPOINTS.get(endpoint)
    status = error.status_code if isinstance(error, APIStatusError) else 422
    if event is None or status not in _REFUSALS:
        return None
    named = {**call.request.path_params, **call.named}
    details = {"status": status, "reason": reason(error), **_printable(named)}
    return NewEvent(event=event, outcome="refused", details=details, **_who(call))


def submitted(call: Call, job: NewJob, refusal: Failed | None = None) -> NewEvent | None:
    """An operation that was taken into the queue or, as it cannot be done, only written down."""
    if job.kind not in _OF_JOBS or job.seq_id is None:
        return None
    request_id = ids.request_id(job.stream, job.seq_id)
    details = {**_why(refusal), **_printable(call.named)} if refusal else {}
    return _of_job(job, request_id, "refused" if refusal else "accepted", details, **_who(call))


def _printable(named: Mapping[str, Any]) -> dict[str, str]:
    return {name: printable(str(value)) for name, value in named.items()}


def _who(call: Call) -> dict[str, Any]:
    key = call.caller.key
    return {"owner": call.owner, "key_id": key.key_id if key else None, "address": address(call)}


def address(call: Call) -> str | None:
    client = call.request.client
    return printable(client.host) if client else None


# --- what came of it -------------------------------------------------------------------------------------------------


def finished(job: Job, outcome: Outcome) -> NewEvent | None:
    """An operation that its worker is through with."""
    if job.kind not in _OF_JOBS:
        return None
    details = _why(outcome) if isinstance(outcome, Failed) else {}
    return _of_job(job, job.request_id, "done" if isinstance(outcome, Done) else "failed", details, **_whose(job))


def given_up(status: Status) -> NewEvent | None:
    """An operation that no worker survived."""
    if status.kind not in _OF_JOBS:
        return None
    details = {"request_id": status.request_id}
    if isinstance(status.outcome, Failed):
        details |= _why(status.outcome)
    return NewEvent(event=_OF_JOBS[status.kind], outcome="failed", details=details, **_whose(status))


def _whose(job: Job | Status) -> dict[str, Any]:
    return {"owner": job.owner, "key_id": job.key_id}


def _why(failed: Failed) -> dict[str, str]:
    return {"category": failed.category, **({"reason": failed.reason} if failed.reason else {})}


def _of_job(
    job: NewJob | Job, request_id: str, outcome: EventOutcome, more: Mapping[str, str], **who: Any
) -> NewEvent | None:
    name = msgspec.json.decode(job.payload, type=_Named).path if job.payload else None
    if job.kind == "save_weights_for_sampler" and job.payload and name is None:
        return None  # a sampler in memory, as every step of reinforcement learning makes one
    details = {"request_id": request_id, **more}
    tinker_path = None
    if name is not None and job.model_id is not None and job.kind in _SAVED:
        tinker_path = ids.tinker_path(job.model_id, _SAVED[job.kind], name)
    elif name is not None:
        details["source"] = name
    return NewEvent(
        event=_OF_JOBS[job.kind],
        outcome=outcome,
        model_id=job.model_id,
        tinker_path=tinker_path,
        details=details,
        **who,
    )
