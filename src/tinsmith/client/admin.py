"""The admin client: audit log, billing and storage of an organisation."""

from __future__ import annotations

from datetime import date, datetime, timezone
from typing import Literal
from urllib.parse import urlencode

from tinsmith.client.config import Config
from tinsmith.client.connection import Connection
from tinsmith.client.futures import APIFuture
from tinsmith.client.rest_calls import RestCalls
from tinsmith.errors import InvalidInputError
from tinsmith.types import AuditLogResponse, BillingUsageResponse, CurrentCheckpointStorageUsageResponse

AuditEventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AdminClient(RestCalls):
    """Needs no session. Synchronous methods return a future; twins with `_async` return the value."""

    def get_audit_log(self, event_type: AuditEventType = "all", day: date | None = None) -> APIFuture[AuditLogResponse]:
        """The events of one UTC day, today's if none is given."""
        query = {"event_type": event_type, "day": day.isoformat() if day else None}
        return self._get(AuditLogResponse, "/api/v1/audit", "get_audit_log", query)

    async def get_audit_log_async(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> AuditLogResponse:
        return await self.get_audit_log(event_type, day)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Usage between two UTC hours, at most 14 days apart."""
        query = {
            "starting_on": _rfc3339("starting_on", starting_on),
            "ending_before": _rfc3339("ending_before", ending_before),
        }
        return self._get(BillingUsageResponse, "/api/v1/billing/usage/events", "get_billing_usage", query)

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> BillingUsageResponse:
        return await self.get_billing_usage(starting_on, ending_before)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        return self._get(
            CurrentCheckpointStorageUsageResponse,
            "/api/v1/billing/usage/checkpoints/current",
            "get_current_checkpoint_storage_usage",
            {"project_id": project_id},
        )

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        return await self.get_current_checkpoint_storage_usage(project_id)


def _rfc3339(field: str, value: datetime | str) -> str:
    if isinstance(value, str):
        return value
    if value.tzinfo is None:
        raise InvalidInputError(
            f"{field} is {value.isoformat()}, which has no time zone; use datetime(..., tzinfo=timezone.utc).",
            field=field,
            value=value,
        )
    return value.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
