"""Who did what, for the owner to read."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.records import AuditEvent
from tinsmith.server.store.schema import audit


class Audit:
    def __init__(self, database: Database) -> None:
        self._database = database

    def record(
        self,
        owner: str,
        event: str,
        details: dict[str, Any] | None = None,
        *,
        model_id: str | None = None,
        tinker_path: str | None = None,
    ) -> None:
        """`event` is a resource and an action, as in `checkpoint_publish`. No secrets and no prompts in `details`."""
        values = {
            "time": self._database.now(),
            "owner": owner,
            "event": event,
            "details": details or {},
            "model_id": model_id,
            "tinker_path": tinker_path,
        }
        self._database.write(lambda connection: connection.execute(sa.insert(audit), values))

    def events(
        self, owner: str, *, resource: str | None = None, day: date | None = None, limit: int = 1000
    ) -> list[AuditEvent]:
        """Newest first; of one resource (`checkpoint`), of one day (UTC)."""
        query = sa.select(audit).where(audit.c.owner == owner)
        if resource is not None:
            query = query.where(audit.c.event.startswith(f"{resource}_", autoescape=True))
        if day is not None:
            start = datetime.combine(day, time(), UTC)
            query = query.where(audit.c.time >= start, audit.c.time < start + timedelta(days=1))
        query = query.order_by(audit.c.time.desc(), audit.c.event_id.desc()).limit(limit)
        return self._database.all(query, _event)


def _event(row: Row) -> AuditEvent:
    return AuditEvent(**{name: row._mapping[name] for name in AuditEvent.__struct_fields__})
