"""Sessions: one per client program, from its first call to its last."""

from __future__ import annotations

import uuid

import sqlalchemy as sa

from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.records import (
    FinishReason,
    NewSession,
    Session,
    SessionCursor,
    SessionMembers,
    SessionQuery,
    SessionsFound,
    SessionState,
    SessionSummary,
    StatusFilter,
)
from tinsmith.server.store.schema import checkpoints, models, samplers, sessions

_NEWEST_FIRST = (sessions.c.created.desc(), sessions.c.session_id.desc())


class Sessions:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, session: NewSession) -> Session:
        now = self._database.now()
        made = Session(
            session_id=str(uuid.uuid4()),
            owner=session.owner,
            tags=session.tags,
            user_metadata=session.user_metadata,
            sdk_version=session.sdk_version,
            project_id=session.project_id,
            display_name=session.display_name,
            created=now,
            heartbeat=now,
            state="active",
            finish_reason=None,
            finish_detail=None,
        )
        values = {name: getattr(made, name) for name in made.__struct_fields__}
        self._database.write(lambda connection: connection.execute(sa.insert(sessions), values))
        return made

    def get(self, session_id: str, owner: str) -> Session | None:
        query = sa.select(sessions).where(sessions.c.session_id == session_id, sessions.c.owner == owner)
        return self._database.first(query, _session)

    def heartbeat(self, session_id: str, owner: str) -> SessionState | None:
        """Note that the client lives; gives back the session's state, `None` without such a session."""
        update = (
            sa.update(sessions)
            .where(sessions.c.session_id == session_id, sessions.c.owner == owner)
            .values(heartbeat=self._database.now())
            .returning(sessions.c.state)
        )
        return self._database.write(lambda c: c.execute(update).scalar_one_or_none(), durable=False)

    def finish(self, session_id: str, owner: str, reason: FinishReason, detail: str | None = None) -> bool:
        """The client says how it ended. The first end of a session stands; False if there is no such session."""
        return self._end(session_id, owner, state="client_finished", finish_reason=reason, finish_detail=detail)

    def cancel(self, session_id: str, owner: str, detail: str) -> bool:
        """The server ends the session, for instance because its client is gone; otherwise as `finish`."""
        return self._end(session_id, owner, state="cancelled", finish_detail=detail)

    def _end(self, session_id: str, owner: str, **values: str | None) -> bool:
        mine = sa.and_(sessions.c.session_id == session_id, sessions.c.owner == owner)

        def write(connection: sa.Connection) -> bool:
            connection.execute(sa.update(sessions).where(mine, sessions.c.state == "active").values(**values))
            return connection.scalar(sa.select(sa.literal(1)).select_from(sessions).where(mine)) is not None

        return self._database.write(write)

    def set_project(self, session_id: str, owner: str, project_id: str) -> bool:
        """False if there is no such session."""
        update = sa.update(sessions).where(sessions.c.session_id == session_id, sessions.c.owner == owner)
        return self._database.write(lambda c: c.execute(update.values(project_id=project_id)).rowcount > 0)

    def page(self, owner: str, *, limit: int, offset: int = 0) -> list[str]:
        """The ids, newest first."""
        query = sa.select(sessions.c.session_id).where(sessions.c.owner == owner).order_by(*_NEWEST_FIRST)
        return self._database.all(query.limit(limit).offset(offset), lambda row: row.session_id)

    def members(self, session_id: str) -> SessionMembers:
        """What was made in a session, oldest first."""
        runs = sa.select(models.c.model_id).where(models.c.session_id == session_id).order_by(models.c.created)
        made = sa.select(samplers.c.sampler_id).where(samplers.c.session_id == session_id).order_by(samplers.c.created)
        return self._database.read(
            lambda connection: SessionMembers(
                model_ids=[*connection.scalars(runs)], sampler_ids=[*connection.scalars(made)]
            )
        )

    def search(self, query: SessionQuery) -> SessionsFound:
        """Newest first. `next_cursor` continues after the last one found, and is `None` at the end."""
        statement = (
            sa.select(sessions, *_stored_checkpoints())
            .where(sessions.c.owner.in_(query.owners), *self._conditions(query))
            .order_by(*_NEWEST_FIRST)
            .limit(query.limit + 1)
        )
        found = self._database.all(statement, _summary)
        if len(found) <= query.limit:
            return SessionsFound(sessions=found, next_cursor=None)
        found.pop()
        last = found[-1].session
        return SessionsFound(
            sessions=found, next_cursor=SessionCursor(last_created_at=last.created, last_session_id=last.session_id)
        )

    def _conditions(self, query: SessionQuery) -> list[sa.ColumnElement[bool]]:
        conditions: list[sa.ColumnElement[bool]] = []
        if query.session_id is not None:
            conditions.append(sessions.c.session_id == query.session_id)
        if query.project_ids is not None:
            conditions.append(sessions.c.project_id.in_(query.project_ids))
        if query.display_name is not None:
            conditions.append(sessions.c.display_name == query.display_name)
        if query.statuses is not None:
            conditions.append(sa.or_(sa.false(), *(_has_status(wanted) for wanted in query.statuses)))
        if query.cursor is not None:
            place = sa.tuple_(sessions.c.created, sessions.c.session_id)
            conditions.append(place < (query.cursor.last_created_at, query.cursor.last_session_id))
        conditions.extend(self._has_metadata(key, value) for key, value in query.user_metadata.items())
        return conditions

    def _has_metadata(self, key: str, value: str) -> sa.ColumnElement[bool]:
        # As rows of keys and values rather than by a JSON path, in which a key with a quote cannot be written.
        spread = sa.func.json_each if self._database.is_sqlite else sa.func.json_each_text
        pair = spread(sessions.c.user_metadata).table_valued("key", "value")
        return sa.select(sa.literal(1)).select_from(pair).where(pair.c.key == key, pair.c.value == value).exists()


def _has_status(wanted: StatusFilter) -> sa.ColumnElement[bool]:
    if not wanted.reasons:
        return sessions.c.state == wanted.state
    return sa.and_(sessions.c.state == wanted.state, sessions.c.finish_reason.in_(wanted.reasons))


def _stored_checkpoints() -> tuple[sa.ColumnElement[int], sa.ColumnElement[int]]:
    """How many checkpoints the models of a session have, and their bytes."""
    of_session = (
        sa.select(sa.func.count())
        .select_from(checkpoints.join(models, models.c.model_id == checkpoints.c.run_id))
        .where(models.c.session_id == sessions.c.session_id)
    )
    size = sa.cast(sa.func.coalesce(sa.func.sum(checkpoints.c.size_bytes), 0), sa.BigInteger)
    return (
        of_session.scalar_subquery().label("checkpoints_count"),
        of_session.with_only_columns(size).scalar_subquery().label("checkpoint_bytes"),
    )


def _session(row: Row) -> Session:
    values = {name: row._mapping[name] for name in Session.__struct_fields__}
    return Session(**{**values, "tags": tuple(row.tags)})


def _summary(row: Row) -> SessionSummary:
    return SessionSummary(
        session=_session(row), checkpoints_count=row.checkpoints_count, checkpoint_bytes=row.checkpoint_bytes
    )
