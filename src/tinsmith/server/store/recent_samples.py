"""What was sampled lately, for people to look at. The results themselves are their clients' to fetch, and then gone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial

import msgspec
import sqlalchemy as sa

from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.ids import stream_of
from tinsmith.server.store.records import CheckpointKey, Done, Outcome, RecentSample, Sampled
from tinsmith.server.store.schema import recent_samples, samplers

KEPT = 200
"""Of each owner, the newest."""

_ADD = sa.insert(recent_samples)


def add_samples(connection: sa.Connection, done: Mapping[str, Outcome], now: datetime) -> None:
    """Those of these requests that are to be shown, within the transaction that records them as done."""
    rows = [
        {
            "request_id": request_id,
            "owner": sampled.owner,
            "base_model": sampled.base_model,
            "sampler_id": stream_of(request_id),
            "time": now,
            "content": msgspec.msgpack.encode(sampled),
        }
        for request_id, outcome in done.items()
        if isinstance(outcome, Done) and isinstance(sampled := outcome.shown, Sampled)
    ]
    if rows:
        connection.execute(_ADD, rows)


class RecentSamples:
    def __init__(self, database: Database) -> None:
        self._database = database

    def newest(self, owner: str, *, limit: int, run_id: str | None = None) -> list[RecentSample]:
        """Newest first; with a run, those from its weights, whether copied or saved."""
        query = (
            sa.select(recent_samples, samplers.c.model_path, samplers.c.model_id)
            .select_from(recent_samples.outerjoin(samplers, samplers.c.sampler_id == recent_samples.c.sampler_id))
            .where(recent_samples.c.owner == owner)
            .order_by(recent_samples.c.sample_id.desc())
            .limit(limit)
        )
        if run_id is not None:
            saved = samplers.c.model_path.startswith(f"tinker://{run_id}/", autoescape=True)
            query = query.where(sa.or_(samplers.c.model_id == run_id, saved))
        return self._database.all(query, _recent)

    def forget(self, before: datetime) -> None:
        """Remove what is older, and of every owner what is not among the newest."""
        owners = self._database.all(sa.select(recent_samples.c.owner).distinct(), lambda row: str(row.owner))
        for owner in owners:
            self._database.write(partial(_forget, owner=owner, before=before), durable=False)


def _forget(connection: sa.Connection, owner: str, before: datetime) -> None:
    mine = recent_samples.c.owner == owner
    surplus = sa.select(recent_samples.c.sample_id).where(mine).order_by(recent_samples.c.sample_id.desc())
    first = connection.scalar(surplus.offset(KEPT).limit(1)) or 0
    old = sa.or_(recent_samples.c.sample_id <= first, recent_samples.c.time < before)
    connection.execute(sa.delete(recent_samples).where(mine, old))


def _recent(row: Row) -> RecentSample:
    sampled = msgspec.msgpack.decode(row.content, type=Sampled)
    run_id = row.model_id or (CheckpointKey.of(row.model_path).run_id if row.model_path else None)
    return RecentSample(
        request_id=row.request_id,
        base_model=row.base_model,
        model_path=row.model_path,
        run_id=run_id,
        time=row.time,
        prompt=sampled.prompt,
        completions=sampled.completions,
        reward=sampled.reward,
    )
