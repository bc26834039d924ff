"""What became of jobs: for those who wait, and until it was kept long enough."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Literal

import sqlalchemy as sa

from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.outcomes import STATUS_COLUMNS, status
from tinsmith.server.store.records import Completion, Completions, Status
from tinsmith.server.store.schema import jobs, payloads, results, streams

_CLONE = 1_000_000_000  # a clone of a sampling client counts from its own multiple of this
_PAGE = 1000  # completions in one answer
_AT_ONCE = 500  # rows removed in one transaction, so that nobody waits long for the write lock

_STATUSES = (
    sa.select(*STATUS_COLUMNS)
    .select_from(jobs.outerjoin(results))
    .where(jobs.c.request_id.in_(sa.bindparam("ids", expanding=True)))
)
_COMPLETIONS = (
    sa.select(jobs.c.request_id, jobs.c.state, jobs.c.done_serial, results.c.size)
    .select_from(jobs.outerjoin(results))
    .where(
        jobs.c.stream == sa.bindparam("sampler_id"),
        jobs.c.done_serial > sa.bindparam("cursor"),
        jobs.c.seq_id >= sa.bindparam("first"),
        jobs.c.seq_id < sa.bindparam("end"),
    )
    .order_by(jobs.c.done_serial)
    .limit(_PAGE)
)
_NEWEST = sa.select(streams.c.done_serial).where(streams.c.stream == sa.bindparam("sampler_id"))


class Results:
    def __init__(self, database: Database) -> None:
        self._database = database

    def statuses(self, request_ids: Collection[str]) -> dict[str, Status]:
        """One query for all who wait. A request that is unknown, or was removed long after it ended, is left out."""
        return self._database.read(
            lambda connection: {
                row.request_id: status(row) for row in connection.execute(_STATUSES, {"ids": list(request_ids)})
            }
        )

    def newest(self, sampler_ids: Collection[str]) -> dict[str, int]:
        """The highest cursor of each sampling session: one query tells which of them have news."""
        query = sa.select(streams.c.stream, streams.c.done_serial).where(streams.c.stream.in_(sampler_ids))
        return self._database.read(
            lambda connection: {row.stream: row.done_serial for row in connection.execute(query)}
        )

    def completions(self, sampler_id: str, clone: int, cursor: int) -> Completions:
        """What finished in a sampling session after the cursor, in the order of finishing, for one clone of it.

        The new cursor is `newest` of that moment, unless there is more than one answer holds.
        """
        # Both ends are counted here: PostgreSQL would add up what fits 32 bits in as many, and the sum may not.
        where = {"sampler_id": sampler_id, "cursor": cursor, "first": clone * _CLONE, "end": (clone + 1) * _CLONE}

        def read(connection: sa.Connection) -> tuple[int, Sequence[Row]]:
            # The newest serial is read first: all jobs up to it are then there to be seen.
            newest = connection.scalar(_NEWEST, where) or 0
            return newest, connection.execute(_COMPLETIONS, where).all()

        newest, rows = self._database.read(read)
        items = [_completion(row) for row in rows if row.state != "done" or row.size is not None]
        last = rows[-1].done_serial if rows else cursor
        return Completions(items=items, cursor=last if len(rows) == _PAGE else max(last, newest))

    def free(self, owner: str, request_ids: Collection[str]) -> None:
        """Their client has these samples and will not ask again. The numbers stay used."""
        names = list(request_ids)
        for start in range(0, len(names), _AT_ONCE):
            self._free(owner, names[start : start + _AT_ONCE])

    def _free(self, owner: str, request_ids: Sequence[str]) -> None:
        mine = sa.select(jobs.c.request_id).where(
            jobs.c.request_id.in_(request_ids), jobs.c.owner == owner, jobs.c.lane == "sample"
        )
        delete = sa.delete(results).where(results.c.request_id.in_(mine))
        self._database.write(lambda connection: connection.execute(delete), durable=False)

    def expire(self, finished_before: datetime) -> int:
        """Remove jobs that finished earlier, and gives back how many results and jobs were removed.

        A job that may have to be replayed, or that holds the place of a number ahead of a missing one, stays without
        its result.
        """
        old = jobs.c.finished < finished_before
        # A model's numbers below its frontier are known to be used; a job beyond it is the only trace of its number.
        passed = sa.or_(jobs.c.model_id.is_(None), jobs.c.seq_id < streams.c.frontier)
        removable = (
            sa.select(jobs.c.request_id)
            .select_from(jobs.join(streams, streams.c.stream == jobs.c.stream).outerjoin(payloads))
            .where(old, passed, payloads.c.request_id.is_(None))
        )
        kept = sa.select(results.c.request_id).join(jobs).where(old)
        return self._remove(jobs, removable) + self._remove(results, kept)

    def _remove(self, table: sa.Table, query: sa.Select[str]) -> int:
        statement = sa.delete(table).where(table.c.request_id.in_(query.limit(_AT_ONCE)))
        removed = 0
        while count := self._database.write(lambda c: c.execute(statement).rowcount, durable=False):
            removed += count
        return removed


def _completion(row: Row) -> Completion:
    state: Literal["finished", "failed"] = "finished" if row.state == "done" else "failed"
    return Completion(request_id=row.request_id, state=state, size=row.size or 0)
