"""What a client reports about itself."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from tinsmith.types._model import Request, Response

EventType: TypeAlias = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]

Severity: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class _Event(Response):
    event_id: str
    event_session_index: int
    """The number of the event within its session."""

    severity: Severity
    timestamp: datetime


class SessionStartEvent(_Event):
    event: Literal["SESSION_START"] = "SESSION_START"


class SessionEndEvent(_Event):
    event: Literal["SESSION_END"] = "SESSION_END"
    duration: str
    """As Python writes a timedelta, `0:00:13.77`."""


class UnhandledExceptionEvent(_Event):
    event: Literal["UNHANDLED_EXCEPTION"] = "UNHANDLED_EXCEPTION"
    error_message: str
    error_type: str
    traceback: str | None = None


class GenericEvent(_Event):
    event: Literal["GENERIC_EVENT"] = "GENERIC_EVENT"
    event_name: str
    event_data: dict[str, Any] = msgspec.field(default_factory=dict)


TelemetryEvent: TypeAlias = SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent


class TelemetryBatch(Response):
    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str
    """The same for all sessions of a process."""


class TelemetrySendRequest(Request):
    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str


class TelemetryResponse(Response):
    status: Literal["accepted"]
