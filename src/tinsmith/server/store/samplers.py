"""Sampling sessions, and the custom losses of sessions: written once, then only read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import sqlalchemy as sa

from tinsmith.server.store import ids
from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.records import Done, Loss, NewLoss, NewSampler, Outcome, Sampler
from tinsmith.server.store.schema import jobs, losses, samplers, sessions, streams

_SAMPLERS = sa.select(
    *(column for column in samplers.c if column.name != "clones"), sessions.c.state.label("session_state")
).select_from(samplers.outerjoin(sessions, sessions.c.session_id == samplers.c.session_id))
_AT_ONCE = 1000  # names in one query; databases have a limit
# Those that follow a model have no weights of their own. The first and the last condition are those of an index.
_KEPT_COPY = sa.and_(
    samplers.c.model_id.is_not(None), samplers.c.model_seq_id.is_not(None), samplers.c.removed.is_(None)
)
# Of the inflight samplers of a model, all draw with the weights of the newest: nobody asks for the others' any more. It
# is not removed before them. It is found by order, as PostgreSQL would read the table for any one that is newer.
_mates = samplers.alias("mates")
_OF_SAME_MODEL = (
    sa.select(_mates.c.model_seq_id)
    .where(_mates.c.inflight, _mates.c.removed.is_(None), _mates.c.model_id == samplers.c.model_id)
    .limit(1)
)
_NEWEST = _OF_SAME_MODEL.order_by(_mates.c.model_seq_id.desc()).scalar_subquery()
_OLDEST = _OF_SAME_MODEL.order_by(_mates.c.model_seq_id).scalar_subquery()
_IS_SUPERSEDED = sa.and_(samplers.c.inflight, samplers.c.model_seq_id < _NEWEST)
_IS_DRAWN_WITH = sa.and_(samplers.c.inflight, samplers.c.model_seq_id == _NEWEST, samplers.c.model_seq_id > _OLDEST)


def publish(connection: sa.Connection, done: Mapping[str, Outcome]) -> None:
    """Samplers that these jobs were to publish, within the transaction that records them as done.

    A worker makes its sampler before that, and may die in between; one that waited long to be made again may have been
    given up meanwhile.
    """
    published = [outcome.publishes for outcome in done.values() if isinstance(outcome, Done) and outcome.publishes]
    if published:
        update = sa.update(samplers).where(samplers.c.sampler_id.in_(published))
        connection.execute(update.values(inflight=True, removed=None))


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
            "saved_by": sampler.saved_by,
            "model_id": sampler.model_id,
            "model_seq_id": sampler.model_seq_id,
            "created": self._database.now(),
        }

        def write(connection: sa.Connection) -> Sampler:
            connection.execute(self._database.insert(samplers).on_conflict_do_nothing(), values)
            return _sampler(connection.execute(_SAMPLERS.where(samplers.c.sampler_id == sampler_id)).one())

        return self._database.write(write)

    def get(self, sampler_id: str, owner: str) -> Sampler | None:
        query = _SAMPLERS.where(samplers.c.sampler_id == sampler_id, samplers.c.owner == owner)
        return self._database.first(query, _sampler)

    def published(self, model_id: str, owner: str) -> Sampler | None:
        """The inflight sampler with the weights that all of this model draw with, if there is one: the newest."""
        kept = sa.and_(samplers.c.inflight, samplers.c.removed.is_(None))
        query = _SAMPLERS.where(kept, samplers.c.model_id == model_id, samplers.c.owner == owner)
        return self._database.first(query.order_by(samplers.c.model_seq_id.desc()).limit(1), _sampler)

    def source(self, sampler: Sampler) -> Sampler:
        """The sampler whose weights this one draws with: itself, unless it is inflight."""
        if not sampler.inflight or sampler.model_id is None:
            return sampler
        return self.published(sampler.model_id, sampler.owner) or sampler

    def join(self, sampler_id: str, owner: str) -> int | None:
        """A number for one more clone of the client, 1 or more and never given twice; `None` without such a sampler."""
        update = (
            sa.update(samplers)
            .where(samplers.c.sampler_id == sampler_id, samplers.c.owner == owner)
            .values(clones=samplers.c.clones + 1)
            .returning(samplers.c.clones)
        )
        return self._database.write(lambda connection: connection.execute(update).scalar_one_or_none())

    def remove_copies(self, idle_since: datetime, most: int, unused_since: datetime) -> list[str]:
        """Give up weights that were copied from a model: those of ended sessions, those idle for too long, and of the
        others those that an owner used longest ago, if they are more than `most` and nobody has used them lately.

        One that still has to answer somebody stays. So do weights that an older inflight sampler draws with. Those that
        draw with a newer one's have none of their own, and do not count.
        """
        in_use = sa.select(jobs.c.request_id).where(jobs.c.stream == samplers.c.sampler_id, jobs.c.finished.is_(None))
        ended = sa.select(sessions.c.session_id).where(
            sessions.c.session_id == samplers.c.session_id, sessions.c.state != "active"
        )
        asked = sa.select(streams.c.last_request).where(streams.c.stream == samplers.c.sampler_id)
        used = sa.func.coalesce(asked.scalar_subquery(), samplers.c.created)
        superseded = _IS_SUPERSEDED.label("superseded")
        place = sa.func.row_number().over(partition_by=[samplers.c.owner, superseded], order_by=used.desc())
        copies = (
            sa.select(
                *(samplers.c.sampler_id, used.label("used"), place.label("place"), superseded),
                ended.exists().label("ended"),
            )
            .where(_KEPT_COPY)
            .subquery()
        )
        too_many = sa.and_(copies.c.place > most, sa.not_(copies.c.superseded), copies.c.used < unused_since)
        unwanted = sa.or_(copies.c.ended, copies.c.used < idle_since, too_many)
        # Looking takes no lock: there may be many, and few of them to be removed.
        found = self._database.all(sa.select(copies.c.sampler_id).where(unwanted), lambda row: str(row.sampler_id))
        update = (
            sa.update(samplers)
            .where(samplers.c.sampler_id.in_(sa.bindparam("found", expanding=True)), _KEPT_COPY)
            .where(sa.or_(ended.exists(), used < unused_since), sa.not_(in_use.exists()), sa.not_(_IS_DRAWN_WITH))
            .values(removed=self._database.now())
            .returning(samplers.c.sampler_id)
        )

        def remove(names: Sequence[str]) -> list[str]:
            return self._database.write(lambda connection: [*connection.scalars(update, {"found": names})])

        return [name for start in range(0, len(found), _AT_ONCE) for name in remove(found[start : start + _AT_ONCE])]

    def copies_of(self, model_id: str, upto_seq: int) -> list[str]:
        """The samplers with weights of this model as it was after an operation up to this number."""
        query = sa.select(samplers.c.sampler_id).where(
            _KEPT_COPY, samplers.c.model_id == model_id, samplers.c.model_seq_id <= upto_seq
        )
        return self._database.all(query, lambda row: row.sampler_id)

    def kept(self, sampler_ids: Collection[str]) -> set[str]:
        """Those of these whose weights may still be asked for."""
        names, found = list(sampler_ids), set[str]()
        for start in range(0, len(names), _AT_ONCE):
            some = samplers.c.sampler_id.in_(names[start : start + _AT_ONCE])
            query = sa.select(samplers.c.sampler_id).where(some, _KEPT_COPY, sa.not_(_IS_SUPERSEDED))
            found.update(self._database.all(query, lambda row: row.sampler_id))
        return found


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
    return Sampler(**row._mapping)


def _loss(row: Row) -> Loss:
    return Loss(**row._mapping)
