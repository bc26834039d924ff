"""Who did what. Events are added and, when they are old, removed; they are never changed."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, date, datetime, time, timedelta
from typing import TypeVar

import sqlalchemy as sa

from tinsmith.server.store.database import Database, Row, Work
from tinsmith.server.store.records import AuditEvent, NewEvent
from tinsmith.server.store.schema import audit

T = TypeVar("T")


class Audit:
    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, event: NewEvent) -> None:
        """An event that changes nothing else."""
        self._database.write(lambda connection: note(connection, event, self._database.now()))

    def events(
        self, owner: str, *, resource: str | None = None, day: date | None = None, limit: int = 1000
    ) -> list[AuditEvent]:
        """What was done to the things of an owner, newest first; of one resource (`checkpoint`), of one day (UTC)."""
        query = sa.select(audit).where(audit.c.owner == owner, audit.c.outcome == "done")
        if resource is not None:
            query = query.where(audit.c.event.startswith(f"{resource}_", autoescape=True))
        if day is not None:
            start = datetime.combine(day, time(), UTC)
            query = query.where(audit.c.time >= start, audit.c.time < start + timedelta(days=1))
        query = query.order_by(audit.c.time.desc(), audit.c.event_id.desc()).limit(limit)
        return self._database.all(query, _event)

    def trail(
        self,
        *,
        since: datetime,
        until: datetime | None = None,
        key_ids: Collection[int] | None = None,
        owner: str | None = None,
        limit: int = 1000,
    ) -> list[AuditEvent]:
        """What anybody did or tried, newest first."""
        query = sa.select(audit).where(audit.c.time >= since)
        if until is not None:
            query = query.where(audit.c.time < until)
        if key_ids is not None:
            query = query.where(audit.c.key_id.in_(key_ids))
        if owner is not None:
            query = query.where(audit.c.owner == owner)
        query = query.order_by(audit.c.time.desc(), audit.c.event_id.desc()).limit(limit)
        return self._database.all(query, _event)

    def forget(self, before: datetime) -> int:
        """Remove what is older; gives back how many events that was."""
        delete = sa.delete(audit).where(audit.c.time < before)
        return self._database.write(lambda connection: connection.execute(delete).rowcount, durable=False)


def note(connection: sa.Connection, event: NewEvent, now: datetime) -> None:
    """Add an event within the transaction of what it tells of."""
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    connection.execute(sa.insert(audit), {**values, "time": now})


def noted(work: Work[T], event: NewEvent | None, now: datetime) -> Work[T]:
    """The work and, if it has changed something, the event, in one transaction."""
    if event is None:
        return work

    def both(connection: sa.Connection) -> T:
        result = work(connection)
        if result:
            note(connection, event, now)
        return result

    return both


def _event(row: Row) -> AuditEvent:
    return AuditEvent(**{name: row._mapping[name] for name in AuditEvent.__struct_fields__})
