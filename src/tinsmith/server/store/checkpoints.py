"""Checkpoints: what was saved, under which name, whose it is and how long it is kept. The files are elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tinsmith.errors import InvalidInputError
from tinsmith.server.store.audit import note, noted
from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.models import insert_model, lora, lora_values, project
from tinsmith.server.store.records import (
    Checkpoint,
    CheckpointKey,
    CheckpointKind,
    NewCheckpoint,
    NewEvent,
    NewModel,
    Page,
    Storage,
)
from tinsmith.server.store.schema import checkpoints, models

_NEWEST_FIRST = (checkpoints.c.created.desc(), checkpoints.c.run_id, checkpoints.c.kind, checkpoints.c.name)


class Checkpoints:
    """One past its time is treated as gone, although its row waits for `expired` and `delete`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(
        self,
        checkpoint: NewCheckpoint,
        *,
        overwrite: bool = False,
        most_bytes: int | None = None,
        event: NewEvent | None = None,
        run: NewModel | None = None,
    ) -> Checkpoint:
        """Enter a checkpoint whose files are in place, together with the run that is made for it.

        A name that is taken is refused, unless `overwrite` says to replace it (metadata and time to live included, and
        it is no longer public) or the same job wrote it before. So is one with which its owner would keep more than
        `most_bytes`.
        """

        def write(connection: sa.Connection) -> Checkpoint:
            if most_bytes is not None:  # those in the same moment would pass the limit together
                self._database.one_at_a_time(connection, f"checkpoints of {checkpoint.owner}")
            present = connection.execute(self._of(checkpoint.key)).one_or_none()
            if present is not None and present.request_id == checkpoint.request_id:
                return _checkpoint(present)
            replaceable = sa.true() if overwrite else sa.not_(self._is_kept())
            connection.execute(sa.delete(checkpoints).where(_is(checkpoint.key), replaceable))
            insert = self._database.insert(checkpoints).on_conflict_do_nothing().returning(*checkpoints.c)
            row = connection.execute(insert, self._values(checkpoint)).one_or_none()
            if row is None:
                raise name_taken(checkpoint.key)
            if most_bytes is not None and (used := self._kept_bytes(connection, checkpoint.owner)) > most_bytes:
                raise NoRoomError(used - checkpoint.size_bytes, checkpoint.size_bytes, most_bytes)
            if run is not None:
                insert_model(self._database, connection, run, row.created)
            if event is not None:
                note(connection, event, row.created)
            return _checkpoint(row)

        return self._database.write(write)

    def get(self, key: CheckpointKey, reader: str) -> Checkpoint | None:
        """A checkpoint that this reader owns or that was published."""
        query = self._of(key).where(sa.or_(checkpoints.c.owner == reader, checkpoints.c.public))
        return self._database.first(query, _checkpoint)

    def is_still(self, checkpoint: Checkpoint, reader: str) -> bool:
        """Whether this reader would find the same one again: what was read of it since is its own, and may be shown."""
        now = self.get(checkpoint.key, reader)
        return now is not None and now.request_id == checkpoint.request_id

    def page(self, owner: str, *, limit: int, offset: int = 0) -> Page[Checkpoint]:
        """Everything an owner has, newest first."""
        condition = sa.and_(checkpoints.c.owner == owner, self._is_kept())
        page = sa.select(checkpoints).where(condition).order_by(*_NEWEST_FIRST).limit(limit).offset(offset)
        total = sa.select(sa.func.count()).select_from(checkpoints).where(condition)
        return self._database.read(
            lambda connection: Page(
                items=[_checkpoint(row) for row in connection.execute(page)], total=connection.scalar(total) or 0
            )
        )

    def writers(self) -> dict[str, str]:
        """Every checkpoint there is, of whoever it is, by its path, and the job that wrote it."""
        found = self._database.all(sa.select(checkpoints), _checkpoint)
        return {each.key.tinker_path: each.request_id for each in found}

    def of_run(self, run_id: str, reader: str) -> list[Checkpoint]:
        """Those of a training run that the reader may see, newest first."""
        query = (
            sa.select(checkpoints)
            .where(checkpoints.c.run_id == run_id, self._is_kept())
            .where(sa.or_(checkpoints.c.owner == reader, checkpoints.c.public))
            .order_by(*_NEWEST_FIRST)
        )
        return self._database.all(query, _checkpoint)

    def latest(self, run_ids: Collection[str], kind: CheckpointKind, reader: str) -> dict[str, Checkpoint]:
        """The newest one of a kind for each run that has one the reader may see."""
        place = sa.func.row_number().over(partition_by=checkpoints.c.run_id, order_by=_NEWEST_FIRST).label("place")
        ranked = (
            sa.select(checkpoints, place)
            .where(checkpoints.c.run_id.in_(run_ids), checkpoints.c.kind == kind, self._is_kept())
            .where(sa.or_(checkpoints.c.owner == reader, checkpoints.c.public))
            .subquery()
        )
        query = sa.select(ranked).where(ranked.c.place == 1)
        return self._database.read(lambda c: {row.run_id: _checkpoint(row) for row in c.execute(query)})

    def set_public(self, key: CheckpointKey, owner: str, public: bool, event: NewEvent | None = None) -> bool:
        """Publish or withdraw; False if the owner has no such checkpoint."""
        update = sa.update(checkpoints).where(_is(key), checkpoints.c.owner == owner, self._is_kept())
        return self._changed(update.values(public=public), event, must_fit=not public)

    def set_expiry(
        self, key: CheckpointKey, owner: str, expires: datetime | None, event: NewEvent | None = None
    ) -> bool:
        """Keep until then, or for ever; False if the owner has no such checkpoint."""
        update = sa.update(checkpoints).where(_is(key), checkpoints.c.owner == owner, self._is_kept())
        return self._changed(update.values(expires=expires), event)

    def delete(self, key: CheckpointKey, owner: str, event: NewEvent | None = None) -> bool:
        """Forget a checkpoint (its files are the caller's to remove); False if the owner has no such one."""
        delete = sa.delete(checkpoints).where(_is(key), checkpoints.c.owner == owner)
        return self._changed(delete, event, must_fit=True)

    def delete_expired(self, key: CheckpointKey, event: NewEvent | None = None) -> bool:
        """The same for one whose time is over; False if it was replaced or given more time meanwhile."""
        over = checkpoints.c.expires <= self._database.now()
        return self._changed(sa.delete(checkpoints).where(_is(key), over), event, must_fit=True)

    def _changed(self, statement: sa.Update | sa.Delete, event: NewEvent | None, *, must_fit: bool = False) -> bool:
        work = noted(lambda c: c.execute(statement).rowcount > 0, event, self._database.now())
        return self._database.write(work, must_fit=must_fit)

    def expired(self, limit: int = 100) -> list[Checkpoint]:
        """Those whose time is over: `delete_expired` them, and remove their files."""
        query = sa.select(checkpoints).where(checkpoints.c.expires <= self._database.now())
        page = query.order_by(checkpoints.c.expires).limit(limit)
        return self._database.all(page, _checkpoint)

    def kept_bytes(self, owner: str) -> int:
        """The size of all that an owner keeps."""
        return self._database.read(lambda connection: self._kept_bytes(connection, owner))

    def _kept_bytes(self, connection: sa.Connection, owner: str) -> int:
        kept = sa.and_(checkpoints.c.owner == owner, self._is_kept())
        return int(connection.scalar(sa.select(sa.func.sum(checkpoints.c.size_bytes)).where(kept)) or 0)

    def storage(self, owner: str) -> list[Storage]:
        """What an owner keeps, by project."""
        kept = (
            sa.select(project().label("project_id"), checkpoints.c.size_bytes)
            .select_from(checkpoints.outerjoin(models, models.c.model_id == checkpoints.c.run_id))
            .where(checkpoints.c.owner == owner, self._is_kept())
            .subquery()
        )
        size = sa.cast(sa.func.sum(kept.c.size_bytes), sa.BigInteger).label("size_bytes")
        query = (
            sa.select(kept.c.project_id, sa.func.count().label("count"), size)
            .group_by(kept.c.project_id)
            .order_by(kept.c.project_id)
        )
        return self._database.all(query, lambda row: Storage(**row._mapping))

    def _of(self, key: CheckpointKey) -> sa.Select[Any]:
        return sa.select(checkpoints).where(_is(key), self._is_kept())

    def _is_kept(self) -> sa.ColumnElement[bool]:
        return sa.or_(checkpoints.c.expires.is_(None), checkpoints.c.expires > self._database.now())

    def _values(self, checkpoint: NewCheckpoint) -> dict[str, Any]:
        return {
            "run_id": checkpoint.key.run_id,
            "kind": checkpoint.key.kind,
            "name": checkpoint.key.name,
            "owner": checkpoint.owner,
            "base_model": checkpoint.base_model,
            **lora_values(checkpoint.lora),
            "optimizer_config": checkpoint.optimizer_config,
            "user_metadata": checkpoint.user_metadata,
            "size_bytes": checkpoint.size_bytes,
            "request_id": checkpoint.request_id,
            "created": self._database.now(),
            "expires": checkpoint.expires,
        }


def name_taken(key: CheckpointKey) -> InvalidInputError:
    return InvalidInputError(
        f"{key.tinker_path} exists already. Use another name, or overwrite=True to replace it.",
        field="path",
        value=key.name,
    )


class NoRoomError(InvalidInputError):
    """Not an answer to come again: what is kept becomes less when its owner deletes something."""

    limit = "checkpoint_bytes"

    def __init__(self, used: int, more: int, most: int) -> None:
        super().__init__(_no_room(used, more, most), field="path")


def _no_room(used: int, more: int, most: int) -> str:
    if more > most:
        return (
            f"This checkpoint alone, {_gib(more)}, is over the limit of {_gib(most)}. Use a lower rank, or ask whoever "
            "runs the server for a higher --max-checkpoints-gib."
        )
    what = f"A checkpoint of {_gib(more)}" if more else "A checkpoint"
    return (
        f"{what} cannot be saved: the checkpoints of this owner take up {_gib(used)}, and {_gib(most)} at most may. "
        "Delete some, for example with `tinsmith checkpoint delete`, or save them with ttl_seconds."
    )


def _gib(size: int) -> str:
    """Exact enough to tell an amount from a limit that it is just above."""
    return f"{size / 2**30:.3g} GiB ({size:,} bytes)"


def _is(key: CheckpointKey) -> sa.ColumnElement[bool]:
    return sa.and_(checkpoints.c.run_id == key.run_id, checkpoints.c.kind == key.kind, checkpoints.c.name == key.name)


def _checkpoint(row: Row) -> Checkpoint:
    return Checkpoint(
        key=CheckpointKey(run_id=row.run_id, kind=row.kind, name=row.name),
        owner=row.owner,
        base_model=row.base_model,
        lora=lora(row),
        optimizer_config=row.optimizer_config,
        size_bytes=row.size_bytes,
        request_id=row.request_id,
        user_metadata=row.user_metadata,
        public=row.public,
        created=row.created,
        expires=row.expires,
    )
