"""Sampling sessions, and the custom losses of sessions: written once, then only read."""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith.server.store import ids
from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.records import Loss, NewLoss, NewSampler, Sampler
from tinsmith.server.store.schema import losses, samplers


class Samplers:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, sampler: NewSampler) -> Sampler:
        """Open a sampling session. A number that was used before in this session finds its first sampler."""
        sampler_id = ids.sampler_id(sampler.session_id, sampler.sampling_session_seq_id)
        values = {
            "sampler_id": sampler_id,
            "session_id": sampler.session_id,
            "owner": sampler.owner,
            "base_model": sampler.base_model,
            "model_path": sampler.model_path,
            "model_id": sampler.model_id,
            "model_seq_id": sampler.model_seq_id,
            "created": self._database.now(),
        }

        def write(connection: sa.Connection) -> Sampler:
            connection.execute(self._database.insert(samplers).on_conflict_do_nothing(), values)
            return _sampler(connection.execute(sa.select(samplers).where(samplers.c.sampler_id == sampler_id)).one())

        return self._database.write(write)

    def get(self, sampler_id: str, owner: str) -> Sampler | None:
        query = sa.select(samplers).where(samplers.c.sampler_id == sampler_id, samplers.c.owner == owner)
        return self._database.first(query, _sampler)

    def join(self, sampler_id: str, owner: str) -> int | None:
        """A number for one more clone of the client, 1 or more and never given twice; `None` without such a sampler."""
        update = (
            sa.update(samplers)
            .where(samplers.c.sampler_id == sampler_id, samplers.c.owner == owner)
            .values(clones=samplers.c.clones + 1)
            .returning(samplers.c.clones)
        )
        return self._database.write(lambda connection: connection.execute(update).scalar_one_or_none())


class Losses:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, loss: NewLoss) -> Loss:
        """Keep a custom loss. A number that was used before in this session finds its first loss."""
        loss_id = ids.loss_id(loss.session_id, loss.custom_loss_seq_id)
        values = {
            "loss_id": loss_id,
            "session_id": loss.session_id,
            "owner": loss.owner,
            "name": loss.name,
            "definition": loss.definition,
            "created": self._database.now(),
        }

        def write(connection: sa.Connection) -> Loss:
            connection.execute(self._database.insert(losses).on_conflict_do_nothing(), values)
            return _loss(connection.execute(sa.select(losses).where(losses.c.loss_id == loss_id)).one())

        return self._database.write(write)

    def get(self, loss_id: str, owner: str) -> Loss | None:
        query = sa.select(losses).where(losses.c.loss_id == loss_id, losses.c.owner == owner)
        return self._database.first(query, _loss)


def _sampler(row: Row) -> Sampler:
    values = dict(row._mapping)
    del values["clones"]
    return Sampler(**values)


def _loss(row: Row) -> Loss:
    return Loss(**row._mapping)
