"""The admin client: audit log, billing and storage of an organisation."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Literal, get_args

from tinsmith.client.checks import check_choice
from tinsmith.client.futures import APIFuture
from tinsmith.client.rest_calls import RestCalls
from tinsmith.errors import InvalidInputError, InvalidTypeError
from tinsmith.types import AuditLogResponse, BillingUsageResponse, CurrentCheckpointStorageUsageResponse

AuditEventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AdminClient(RestCalls):
    """Needs no session. Synchronous methods return a future; twins with `_async` return the value."""

    def get_audit_log(self, event_type: AuditEventType = "all", day: date | None = None) -> APIFuture[AuditLogResponse]:
        """The events of one UTC day, today's if none is given."""
        check_choice("event_type", event_type, get_args(AuditEventType))
        query = {"event_type": event_type, "day": None if day is None else _day(day)}
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


def _day(day: date) -> str:
    if not isinstance(day, date):
        raise InvalidTypeError(f"day is {day!r}; it must be a date, such as date(2026, 1, 31).", field="day", value=day)
    return day.strftime("%Y-%m-%d")


def _rfc3339(field: str, value: datetime | str) -> str:
    if isinstance(value, str):
        try:
            datetime.fromisoformat(value)
        except ValueError:
            raise InvalidInputError(
                f"{field} is {value!r}; it must be a time such as 2026-01-31T13:00:00Z.", field=field, value=value
            ) from None
        return value
    if not isinstance(value, datetime):
        raise InvalidTypeError(f"{field} is {value!r}; it must be a datetime or a text.", field=field, value=value)
    if value.tzinfo is None:
        raise InvalidInputError(
            f"{field} is {value.isoformat()}, which has no time zone; use datetime(..., tzinfo=timezone.utc).",
            field=field,
            value=value,
        )
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
