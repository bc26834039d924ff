"""Administration: the audit log, billing and storage."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from tinsmith.types._model import Request, Response


class AuditLogEntry(Response):
    timestamp: datetime
    event: str
    """Resource and action, as in `checkpoint_read`."""

    event_details: dict[str, Any] = msgspec.field(default_factory=dict)

    # The last three repeat what `event_details` says and are set for checkpoints only.
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Response):
    entries: list[AuditLogEntry]


class GetBillingUsageRequest(Request):
    """A window of at most 14 days, from and to full hours UTC."""

    starting_on: datetime
    ending_before: datetime


class TrainingBillingEvent(Response):
    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(Response):
    """Prompt tokens; `cached` ones cost less."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Response):
    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(Response):
    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(Response):
    type: Literal["storage"] = "storage"
    free: bool = False
    gigabyte_hours: float


BillingEventInfo: TypeAlias = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)


class BillingUsageEvent(Response):
    """The usage of one hour, one user, one model and one kind."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None

    estimated_cost_usd: float | None = None
    """Before credits. Today's is an estimate at list prices; a past day has one once it agrees with the invoice."""

    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    """A month counts as 720 hours."""

    event_info: BillingEventInfo


class BillingUsageSession(Response):
    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(Response):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = msgspec.field(default_factory=dict)
    """What is known of the sessions that `data` names."""

    cost_data_through: datetime | None = None
    """Costs before this time come from invoices, later ones from list prices."""


class GetCurrentCheckpointStorageUsageRequest(Request):
    project_id: str | None = None
    """`None` for the whole organization."""


class CurrentCheckpointStorageUsageItem(Response):
    """What one user stores in one project."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Response):
    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]
