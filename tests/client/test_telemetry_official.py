"""Our batches against the official package's own models, for all four kinds of event."""

from __future__ import annotations

import asyncio
import contextlib
import json

from tinker.types.telemetry_send_request import TelemetrySendRequest

from tinsmith.client.retry import is_user_error
from tinsmith.client.telemetry import TelemetryReporter


def test_the_official_client_would_write_our_batch_with_the_same_bytes() -> None:
    bodies: list[bytes] = []

    async def send(body: bytes) -> None:
        bodies.append(body)

    async def main() -> None:
        reporter = TelemetryReporter(send, session_id="session-1", sdk_version="0.36.0", is_user_error=is_user_error)
        reporter.record_event("thing", {"count": 3, "missing": None, "text": "ünï"})
        with contextlib.suppress(RuntimeError), reporter.capture_exceptions(severity="CRITICAL"):
            raise RuntimeError
        reporter.record_exception(RuntimeError())  # never raised: no traceback
        await reporter.close()

    asyncio.run(main())
    (body,) = bodies
    read = TelemetrySendRequest.model_validate(json.loads(body))
    assert [type(event).__name__ for event in read.events] == [
        "SessionStartEvent",
        "GenericEvent",
        "UnhandledExceptionEvent",
        "UnhandledExceptionEvent",
        "SessionEndEvent",
    ]
    written = read.model_dump(mode="json", exclude_none=True)
    assert body == json.dumps(written, ensure_ascii=False, separators=(",", ":")).encode()
