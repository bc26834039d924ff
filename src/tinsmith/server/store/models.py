"""Models in training, which are training runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.records import AccessScope, Lora, Model, NewModel, Page
from tinsmith.server.store.schema import checkpoints, models, sessions, streams

_MODELS = sa.select(
    models,
    sa.func.coalesce(streams.c.last_request, models.c.created, type_=models.c.created.type).label("last_request"),
).select_from(models.outerjoin(streams, streams.c.stream == models.c.model_id))


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


class Models:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, model: NewModel) -> None:
        """Write a model that no job creates: a run for copied checkpoints. Its id may exist already."""
        self._database.write(lambda c: insert_model(self._database, c, model, self._database.now()))

    def get(self, model_id: str, owner: str, scope: AccessScope = "owned") -> Model | None:
        query = _MODELS.where(models.c.model_id == model_id, visible(owner, scope, self._database.now()))
        return self._database.first(query, _model)

    def page(
        self, owner: str, *, limit: int, offset: int = 0, scope: AccessScope = "owned", project_id: str | None = None
    ) -> Page[Model]:
        """Newest first."""
        condition = visible(owner, scope, self._database.now())
        if project_id is not None:
            of_project = sa.select(sessions.c.session_id).where(sessions.c.project_id == project_id)
            condition = sa.and_(condition, models.c.session_id.in_(of_project))
        page = _MODELS.where(condition).order_by(models.c.created.desc(), models.c.model_id.desc())
        total = sa.select(sa.func.count()).select_from(models).where(condition)

        def read(connection: sa.Connection) -> Page[Model]:
            rows = connection.execute(page.limit(limit).offset(offset))
            return Page(items=[_model(row) for row in rows], total=connection.scalar(total) or 0)

        return self._database.read(read)

    def mark_corrupted(self, model_id: str, reason: str) -> None:
        """The model cannot go on; its owner sees why. The first reason stands."""
        update = sa.update(models).where(models.c.model_id == model_id, models.c.corrupted.is_(None))
        self._database.write(lambda connection: connection.execute(update.values(corrupted=reason)))


def insert_model(database: Database, connection: sa.Connection, model: NewModel, now: datetime) -> None:
    values = {
        "model_id": model.model_id,
        "session_id": model.session_id,
        "owner": model.owner,
        "base_model": model.base_model,
        **lora_values(model.lora),
        "optimizer_config": model.optimizer_config,
        "user_metadata": model.user_metadata,
        "trainable": model.trainable,
        "created": now,
    }
    connection.execute(database.insert(models).on_conflict_do_nothing(), values)


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
    )
