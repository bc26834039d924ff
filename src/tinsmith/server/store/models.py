"""Models in training, which are training runs."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tinsmith.errors import InvalidInputError
from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.records import AccessScope, Lora, Model, NewModel, Page, SnapshotChange, Snapshots
from tinsmith.server.store.schema import checkpoints, jobs, models, payloads, sessions, streams

_MODELS = sa.select(
    models,
    sa.func.coalesce(streams.c.last_request, models.c.created, type_=models.c.created.type).label("last_request"),
).select_from(models.outerjoin(streams, streams.c.stream == models.c.model_id))


_AT_ONCE = 100  # models removed in one transaction


def visible(owner: str, scope: AccessScope, now: datetime) -> sa.ColumnElement[bool]:
    """Accessible is what the owner has, and what has a published checkpoint."""
    if scope == "owned":
        return models.c.owner == owner
    published = (
        sa.select(checkpoints.c.run_id)
        .where(checkpoints.c.public, sa.or_(checkpoints.c.expires.is_(None), checkpoints.c.expires > now))
        .where(checkpoints.c.run_id == models.c.model_id)
    )
    return sa.or_(models.c.owner == owner, published.exists())


def project() -> sa.ColumnElement[str | None]:
    """The project of a model: its own, or that of its session."""
    of_session = sa.select(sessions.c.project_id).where(sessions.c.session_id == models.c.session_id)
    return sa.func.coalesce(models.c.project_id, of_session.scalar_subquery())


class Models:
    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, model_id: str, owner: str, scope: AccessScope = "owned") -> Model | None:
        query = _MODELS.where(models.c.model_id == model_id, visible(owner, scope, self._database.now()))
        return self._database.first(query, _model)

    def kept(self) -> dict[str, int]:
        """How many models can be worked on, by base model."""
        query = sa.select(models.c.base_model, sa.func.count().label("count"))
        mine = query.where(models.c.trainable, models.c.removed.is_(None)).group_by(models.c.base_model)
        return dict(self._database.all(mine, lambda row: (row.base_model, row.count)))

    def page(
        self, owner: str, *, limit: int, offset: int = 0, scope: AccessScope = "owned", project_id: str | None = None
    ) -> Page[Model]:
        """Newest first; of a project, those that its owner has put there."""
        condition = visible(owner, scope, self._database.now())
        if project_id is not None:
            condition = sa.and_(models.c.owner == owner, project() == project_id)
        page = _MODELS.where(condition).order_by(models.c.created.desc(), models.c.model_id.desc())
        total = sa.select(sa.func.count()).select_from(models).where(condition)

        def read(connection: sa.Connection) -> Page[Model]:
            rows = connection.execute(page.limit(limit).offset(offset))
            return Page(items=[_model(row) for row in rows], total=connection.scalar(total) or 0)

        return self._database.read(read)

    def set_snapshot(self, model_id: str, seq_id: int) -> SnapshotChange:
        """A snapshot of the model after this operation is on the disk; the one that was the last is now the previous.

        When this call is on the disk too, so are the outcomes of the operations that are in the snapshot.
        """

        def write(connection: sa.Connection) -> SnapshotChange:
            known = _locked_snapshots(connection, model_id)
            if known is None:
                return SnapshotChange(is_newest=False, kept=Snapshots())
            if known.last is not None and known.last >= seq_id:
                return SnapshotChange(is_newest=known.last == seq_id, kept=known)
            kept = Snapshots(last=seq_id, previous=known.last)
            _set_snapshots(connection, model_id, kept)
            return SnapshotChange(is_newest=True, kept=kept)

        return self._database.write(write)

    def forget_snapshots(self, model_id: str, damaged: Collection[int]) -> None:
        """Snapshots after these operations cannot be read, and the model was built without them."""

        def write(connection: sa.Connection) -> None:
            known = _locked_snapshots(connection, model_id) or Snapshots()
            left = [seq_id for seq_id in (known.last, known.previous) if seq_id not in damaged]
            _set_snapshots(connection, model_id, Snapshots(**dict(zip(("last", "previous"), left, strict=False))))

        self._database.write(write)

    def snapshots(self) -> dict[str, Snapshots]:
        """Those of each model that can be worked on: it may have none, and yet files that its replay needs."""
        columns = (models.c.snapshot_seq, models.c.previous_snapshot_seq)
        query = sa.select(models.c.model_id, *columns).where(models.c.trainable, models.c.removed.is_(None))
        return dict(self._database.all(query, lambda row: (row.model_id, _snapshots(row))))

    def remove_idle(self, idle_since: datetime) -> list[str]:
        """Give up some models whose sessions have ended and that nobody has worked on for long; checkpoints stay.

        Gives back their ids; the files of their snapshots are the caller's to remove.
        """
        ended = sa.select(sessions.c.session_id).where(
            sessions.c.session_id == models.c.session_id, sessions.c.state != "active"
        )
        asked = sa.select(streams.c.stream).where(
            streams.c.stream == models.c.model_id, streams.c.last_request >= idle_since
        )
        # A job without a turn waits for a number that never came.
        in_use = sa.select(jobs.c.request_id).where(
            jobs.c.stream == models.c.model_id, jobs.c.finished.is_(None), jobs.c.turn.is_not(None)
        )
        idle = (
            sa.select(models.c.model_id)
            .where(models.c.trainable, models.c.removed.is_(None), models.c.created < idle_since)
            .where(ended.exists(), sa.not_(asked.exists()), sa.not_(in_use.exists()))
            .limit(_AT_ONCE)
        )

        def write(connection: sa.Connection) -> list[str]:
            found = list(connection.scalars(idle))
            if found:
                now = self._database.now()
                update = sa.update(models).where(models.c.model_id.in_(found))
                connection.execute(update.values(removed=now, snapshot_seq=None, previous_snapshot_seq=None))
                data = sa.select(jobs.c.request_id).where(jobs.c.stream.in_(found))
                connection.execute(sa.delete(payloads).where(payloads.c.request_id.in_(data)))
                stranded = sa.update(jobs).where(jobs.c.stream.in_(found), jobs.c.finished.is_(None))
                connection.execute(stranded.values(state="cancelled", finished=now))
            return found

        return self._database.write(write)

    def base_models(self) -> set[str]:
        """Those that somebody has trained on."""
        query = sa.select(models.c.base_model).distinct().where(models.c.trainable, models.c.removed.is_(None))
        return set(self._database.all(query, lambda row: row.base_model))

    def mark_corrupted(self, model_id: str, reason: str) -> None:
        """The model cannot go on; its owner sees why. The first reason stands."""
        update = sa.update(models).where(models.c.model_id == model_id, models.c.corrupted.is_(None))
        self._database.write(lambda connection: connection.execute(update.values(corrupted=reason)))

    def clear_corrupted(self, model_id: str) -> None:
        """What was damaged was mended, and the model goes on."""
        update = sa.update(models).where(models.c.model_id == model_id)
        self._database.write(lambda connection: connection.execute(update.values(corrupted=None)))


def _locked_snapshots(connection: sa.Connection, model_id: str) -> Snapshots | None:
    """`None` if the model was removed."""
    query = sa.select(models.c.snapshot_seq, models.c.previous_snapshot_seq).where(
        models.c.model_id == model_id, models.c.removed.is_(None)
    )
    row = connection.execute(query.with_for_update()).first()
    return None if row is None else _snapshots(row)


def _set_snapshots(connection: sa.Connection, model_id: str, kept: Snapshots) -> None:
    values = {"snapshot_seq": kept.last, "previous_snapshot_seq": kept.previous}
    connection.execute(sa.update(models).where(models.c.model_id == model_id).values(**values))


def _snapshots(row: Row) -> Snapshots:
    return Snapshots(last=row.snapshot_seq, previous=row.previous_snapshot_seq)


def insert_model(database: Database, connection: sa.Connection, model: NewModel, now: datetime) -> None:
    """Its id may exist already: whoever asks twice asks for the same."""
    values = {
        "model_id": model.model_id,
        "session_id": model.session_id,
        "project_id": model.project_id,
        "owner": model.owner,
        "base_model": model.base_model,
        **lora_values(model.lora),
        "optimizer_config": model.optimizer_config,
        "user_metadata": model.user_metadata,
        "trainable": model.trainable,
        "created": now,
    }
    connection.execute(database.insert(models).on_conflict_do_nothing(), values)


class TooManyModelsError(InvalidInputError):
    """An owner has as many models as may be."""


def check_count(connection: sa.Connection, owner: str, most: int | None) -> None:
    """Of the models that can be worked on, the one included that was made just now."""
    mine = sa.and_(models.c.owner == owner, models.c.trainable, models.c.removed.is_(None))
    query = sa.select(sa.func.count()).select_from(models).where(mine)
    if most is not None and (connection.scalar(query) or 0) > most:
        raise TooManyModelsError(f"There are {most} models of this owner already.")


def lora_values(lora: Lora) -> dict[str, Any]:
    return {
        "lora_rank": lora.rank,
        "lora_seed": lora.seed,
        "train_attn": lora.train_attn,
        "train_mlp": lora.train_mlp,
        "train_unembed": lora.train_unembed,
    }


def lora(row: Row) -> Lora:
    return Lora(
        rank=row.lora_rank,
        seed=row.lora_seed,
        train_attn=row.train_attn,
        train_mlp=row.train_mlp,
        train_unembed=row.train_unembed,
    )


def _model(row: Row) -> Model:
    return Model(
        model_id=row.model_id,
        owner=row.owner,
        base_model=row.base_model,
        lora=lora(row),
        optimizer_config=row.optimizer_config,
        session_id=row.session_id,
        user_metadata=row.user_metadata,
        trainable=row.trainable,
        created=row.created,
        last_request=row.last_request,
        corrupted=row.corrupted,
        snapshots=_snapshots(row),
        removed=row.removed,
    )
