"""For the owner of the account: who did what, and what is stored.

Nothing is billed here, so the usage events are empty; the storage figures are real.
"""

from __future__ import annotations

from datetime import date

from starlette.responses import Response

from tinsmith.server.routes._call import Call, Endpoint, reply, status_error
from tinsmith.types import (
    AuditLogEntry,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
)

_RESOURCES = {
    "all": None,
    "checkpoints": "checkpoint",
    "projects": "project",
    "teams": "team",
    "organizations": "organization",
}


async def audit(call: Call) -> Response:
    """What was done to the caller's things, newest first."""
    event_type = call.request.query_params.get("event_type", "all")
    if event_type not in _RESOURCES:
        raise status_error(422, f"event_type is {event_type!r}; it must be one of {', '.join(_RESOURCES)}.")
    found = await call.stored(call.store.audit.events, call.owner, resource=_RESOURCES[event_type], day=_day(call))
    return reply(
        AuditLogResponse(
            entries=[
                AuditLogEntry(
                    timestamp=event.time,
                    event=event.event,
                    event_details=event.details,
                    model_id=event.model_id,
                    tinker_path=event.tinker_path,
                )
                for event in found
            ]
        )
    )


def _day(call: Call) -> date | None:
    text = call.request.query_params.get("day")
    if text is None:
        return None
    try:
        day = date.fromisoformat(text)
    except ValueError:
        day = date.max
    if day == date.max:  # which has no end, as the calendar has none after it
        raise status_error(422, f"day is {text!r}; it must be a date such as 2030-01-31.")
    return day


async def billing_events(call: Call) -> Response:
    """Always empty: nothing is billed."""
    return reply(BillingUsageResponse(data=[]))


async def checkpoint_storage(call: Call) -> Response:
    """How much the caller's checkpoints take, by project."""
    project_id = call.request.query_params.get("project_id")
    found = await call.stored(call.store.checkpoints.storage, call.owner)
    return reply(
        CurrentCheckpointStorageUsageResponse(
            data=[
                CurrentCheckpointStorageUsageItem(
                    checkpoint_count=one.count,
                    size_bytes=one.size_bytes,
                    size_gigabytes=one.size_bytes / 1e9,
                    project_id=one.project_id,
                    org_user_urn=call.owner,
                )
                for one in found
                if project_id in (None, one.project_id)
            ]
        )
    )


ENDPOINTS = (
    Endpoint("GET", "/api/v1/audit", audit, gives=AuditLogResponse),
    Endpoint("GET", "/api/v1/billing/usage/events", billing_events, gives=BillingUsageResponse),
    Endpoint(
        "GET",
        "/api/v1/billing/usage/checkpoints/current",
        checkpoint_storage,
        gives=CurrentCheckpointStorageUsageResponse,
    ),
)
