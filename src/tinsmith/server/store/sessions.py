"""Sessions: one per client program, from its first call to its last."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import sqlalchemy as sa

from tinsmith.server.store.audit import note
from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.models import visible
from tinsmith.server.store.records import (
    AccessScope,
    FinishReason,
    Heartbeat,
    NewEvent,
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

# Written out rather than bound, because that is how the databases see that a partial index applies.
_ACTIVE = sessions.c.state == sa.literal_column("'active'")
_NEWEST_FIRST = (sessions.c.created.desc(), sessions.c.session_id.desc())

# Made once: a statement refers to itself, so that those of each heartbeat would wait for Python's search for rubbish.
_BEATING = sa.select(sessions.c.session_id, sessions.c.owner, sessions.c.state).where(
    sessions.c.session_id.in_(sa.bindparam("ids", expanding=True))
)
_BEAT = (
    sa.update(sessions)
    .where(sessions.c.session_id.in_(sa.bindparam("known", expanding=True)))
    .values(heartbeat=sa.bindparam("now"))
)


class Sessions:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.last_unheard: datetime | None = None
        """When a heartbeat came here last that could not be written down."""

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

    def display_names(self, session_ids: Collection[str]) -> dict[str, str]:
        """Of those that have one; whose they are, the caller has asked before."""
        named = sa.and_(sessions.c.session_id.in_(session_ids), sessions.c.display_name.is_not(None))
        query = sa.select(sessions.c.session_id, sessions.c.display_name).where(named)
        return dict(self._database.all(query, lambda row: (row.session_id, row.display_name)))

    def active(self, session_ids: Collection[str]) -> set[str]:
        """Those of these that have not ended."""
        query = sa.select(sessions.c.session_id).where(
            sessions.c.session_id.in_(session_ids), sessions.c.state == "active"
        )
        return set(self._database.all(query, lambda row: str(row.session_id)))

    def get(self, session_id: str, reader: str, scope: AccessScope = "owned") -> Session | None:
        query = sa.select(sessions).where(sessions.c.session_id == session_id, self._visible(reader, scope))
        return self._database.first(query, _session)

    def _visible(self, reader: str, scope: AccessScope) -> sa.ColumnElement[bool]:
        """Accessible is what the reader has, and what has a model with a published checkpoint."""
        if scope == "owned":
            return sessions.c.owner == reader
        readable = sa.select(models.c.model_id).where(
            models.c.session_id == sessions.c.session_id, visible(reader, scope, self._database.now())
        )
        return sa.or_(sessions.c.owner == reader, readable.exists())

    def heartbeats(self, beats: Sequence[Heartbeat]) -> list[SessionState | None]:
        """Note that these clients live; gives back the state of each session, `None` where there is no such session."""

        def write(connection: sa.Connection) -> list[SessionState | None]:
            rows = connection.execute(_BEATING, {"ids": [beat.session_id for beat in beats]})
            states = {Heartbeat(row.session_id, row.owner): row.state for row in rows}
            known = [beat.session_id for beat in beats if beat in states]
            connection.execute(_BEAT, {"known": known, "now": self._database.now()})
            return [states.get(beat) for beat in beats]

        try:
            return self._database.write(write, durable=False)
        except sa.exc.OperationalError:
            self.last_unheard = self._database.now()
            raise

    def finish(
        self,
        session_id: str,
        owner: str,
        reason: FinishReason,
        detail: str | None = None,
        event: NewEvent | None = None,
    ) -> bool:
        """The client says how it ended. The first end of a session stands; False if there is no such session."""
        values = {"state": "client_finished", "finish_reason": reason, "finish_detail": detail}
        return self._change(session_id, owner, sa.update(sessions).where(_ACTIVE).values(values), event)

    def heard(self) -> dict[str, datetime]:
        """The last heartbeat of each session that is active, by the clock of the server that heard it."""
        query = sa.select(sessions.c.session_id, sessions.c.heartbeat).where(_ACTIVE)
        return dict(self._database.all(query, lambda row: (row.session_id, row.heartbeat)))

    def end_silent(self, last_heard: Mapping[str, datetime]) -> list[str]:
        """End these sessions, unless their clients were heard of again since; gives back the ids of those that did."""
        values = {"state": "cancelled", "finish_detail": "Its client was not heard of any more."}
        update = sa.update(sessions).where(_ACTIVE).values(values).returning(sessions.c.session_id, sessions.c.owner)

        def write(connection: sa.Connection) -> list[str]:
            ended: list[Row] = []
            for session_id, heartbeat in last_heard.items():
                silent = sa.and_(sessions.c.session_id == session_id, sessions.c.heartbeat == heartbeat)
                ended.extend(connection.execute(update.where(silent)).all())
            for row in ended:
                details = {"session_id": row.session_id, "reason": "silence"}
                event = NewEvent(owner=row.owner, event="session_end", details=details)
                note(connection, event, self._database.now())
            return [row.session_id for row in ended]

        return self._database.write(write) if last_heard else []

    def set_project(self, session_id: str, owner: str, project_id: str, event: NewEvent | None = None) -> bool:
        """False if there is no such session. To move it to where it is already is no event."""
        move = sa.update(sessions).where(sessions.c.project_id.is_distinct_from(project_id))
        return self._change(session_id, owner, move.values(project_id=project_id), event)

    def _change(self, session_id: str, owner: str, change: sa.Update, event: NewEvent | None) -> bool:
        """The event is noted if there was something to change; False if there is no such session."""
        mine = sa.and_(sessions.c.session_id == session_id, sessions.c.owner == owner)

        def write(connection: sa.Connection) -> bool:
            has_changed = connection.execute(change.where(mine)).rowcount > 0
            if event is not None and has_changed:
                note(connection, event, self._database.now())
            return connection.scalar(sa.select(sa.literal(1)).select_from(sessions).where(mine)) is not None

        return self._database.write(write)

    def page(self, reader: str, *, limit: int, offset: int = 0, scope: AccessScope = "owned") -> list[str]:
        """The ids, newest first."""
        query = sa.select(sessions.c.session_id).where(self._visible(reader, scope)).order_by(*_NEWEST_FIRST)
        return self._database.all(query.limit(limit).offset(offset), lambda row: row.session_id)

    def members(self, session_id: str, reader: str) -> SessionMembers:
        """What was made in a session, as far as the reader may see it, oldest first."""
        now = self._database.now()
        runs = sa.select(models.c.model_id).where(models.c.session_id == session_id, visible(reader, "accessible", now))
        made = sa.select(samplers.c.sampler_id).where(samplers.c.session_id == session_id, samplers.c.owner == reader)
        return self._database.read(
            lambda connection: SessionMembers(
                model_ids=[*connection.scalars(runs.order_by(models.c.created))],
                sampler_ids=[*connection.scalars(made.order_by(samplers.c.created))],
            )
        )

    def search(self, query: SessionQuery) -> SessionsFound:
        """Newest first. `next_cursor` continues after the last one found, and is `None` at the end."""
        statement = (
            sa.select(sessions, *_stored_checkpoints(query.reader))
            .where(self._visible(query.reader, query.scope), *self._conditions(query))
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
        if query.owners is not None:
            conditions.append(sessions.c.owner.in_(query.owners))
        names = self._names(query)
        if names:
            conditions.append(sa.or_(*names))
        if query.project_ids is not None:
            conditions.append(sa.and_(sessions.c.owner == query.reader, sessions.c.project_id.in_(query.project_ids)))
        if query.statuses is not None:
            conditions.append(sa.or_(sa.false(), *(_has_status(wanted) for wanted in query.statuses)))
        if query.cursor is not None:
            place = sa.tuple_(sessions.c.created, sessions.c.session_id)
            conditions.append(place < (query.cursor.last_created_at, query.cursor.last_session_id))
        conditions.extend(
            sa.and_(sessions.c.owner == query.reader, self._has_metadata(key, value))
            for key, value in query.user_metadata.items()
        )
        return conditions

    def _names(self, query: SessionQuery) -> list[sa.ColumnElement[bool]]:
        """By id and by words of the name."""
        names: list[sa.ColumnElement[bool]] = []
        if query.session_id is not None:
            names.append(sessions.c.session_id == query.session_id)
        if query.display_name is not None:
            words = query.display_name.split()
            occur = (sessions.c.display_name.icontains(word, autoescape=True) for word in words)
            names.append(sa.and_(sessions.c.owner == query.reader, *occur))
        return names

    def _has_metadata(self, key: str, value: str) -> sa.ColumnElement[bool]:
        # As rows of keys and values rather than by a JSON path, in which a key with a quote cannot be written.
        spread = sa.func.json_each if self._database.is_sqlite else sa.func.json_each_text
        pair = spread(sessions.c.user_metadata).table_valued("key", "value")
        return sa.select(sa.literal(1)).select_from(pair).where(pair.c.key == key, pair.c.value == value).exists()


def _has_status(wanted: StatusFilter) -> sa.ColumnElement[bool]:
    if not wanted.reasons:
        return sessions.c.state == wanted.state
    return sa.and_(sessions.c.state == wanted.state, sessions.c.finish_reason.in_(wanted.reasons))


def _stored_checkpoints(reader: str) -> tuple[sa.ColumnElement[int], sa.ColumnElement[int]]:
    """How many checkpoints the models of a session have that the reader may see, and their bytes."""
    of_session = (
        sa.select(sa.func.count())
        .select_from(checkpoints.join(models, models.c.model_id == checkpoints.c.run_id))
        .where(models.c.session_id == sessions.c.session_id)
        .where(sa.or_(checkpoints.c.owner == reader, checkpoints.c.public))
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
