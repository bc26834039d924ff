"""Sessions of which nothing is left: their rows, and those of all that was made in them, are removed.

Otherwise a server that is used every day would remember every client program that ever called it.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial

import sqlalchemy as sa

from tinsmith.server.store.curves import forget_curves
from tinsmith.server.store.database import Database
from tinsmith.server.store.records import SESSION_STREAMS
from tinsmith.server.store.schema import checkpoints, jobs, losses, models, samplers, sessions, streams

_AT_ONCE = 100  # sessions removed in one transaction, so that nobody waits long for the write lock
_NAMES = 1000  # in one query; databases have a limit
_SESSION_ID = sa.func.substr(streams.c.stream, 1, 36)  # with which the name of whatever is numbered in it begins


def forget_sessions(database: Database, idle_since: datetime) -> int:
    """Forget sessions that ended before that time, and gives back how many.

    Whatever can still be used keeps its session: a model, a checkpoint of one, and a result.
    """
    over = _over(idle_since).limit(_AT_ONCE)
    forgotten = 0
    while found := database.all(over, lambda row: str(row.session_id)):
        # Also of what never came to be: a model that was refused has a stream, and no other row.
        numbered = database.all(sa.select(streams.c.stream).where(_SESSION_ID.in_(found)), lambda row: str(row.stream))
        made = sa.select(models.c.model_id).where(models.c.session_id.in_(found))
        forget_curves(database, database.all(made, lambda row: str(row.model_id)))
        database.write(partial(_forget, session_ids=found, numbered=numbered), durable=False)
        forgotten += len(found)
    return forgotten


def _over(idle_since: datetime) -> sa.Select[str]:
    """Nothing can come back to life in them: an ended session takes no new models or samplers."""
    mine = models.c.session_id == sessions.c.session_id
    model = sa.select(models.c.model_id).where(
        mine, models.c.trainable, sa.or_(models.c.removed.is_(None), models.c.removed >= idle_since)
    )
    checkpoint = sa.select(checkpoints.c.name).join(models, models.c.model_id == checkpoints.c.run_id).where(mine)
    sample = (
        sa.select(jobs.c.request_id)
        .join(samplers, samplers.c.sampler_id == jobs.c.stream)
        .where(samplers.c.session_id == sessions.c.session_id)
    )
    beside = sa.select(jobs.c.request_id).where(
        jobs.c.stream.in_([sessions.c.session_id + f":{name}" for name in SESSION_STREAMS.values()])
    )
    kept = sa.or_(model.exists(), checkpoint.exists(), sample.exists(), beside.exists())
    return sa.select(sessions.c.session_id).where(
        sessions.c.state != "active", sessions.c.heartbeat < idle_since, sa.not_(kept)
    )


def _forget(connection: sa.Connection, session_ids: list[str], numbered: list[str]) -> None:
    for start in range(0, len(numbered), _NAMES):
        some = numbered[start : start + _NAMES]
        connection.execute(sa.delete(jobs).where(jobs.c.stream.in_(some)))
        connection.execute(sa.delete(streams).where(streams.c.stream.in_(some)))
    for table in (models, samplers, losses, sessions):
        connection.execute(sa.delete(table).where(table.c.session_id.in_(session_ids)))
