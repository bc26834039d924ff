"""Submissions in: every number once, and ready to run when no lower number of its model is missing.

A stream is whatever numbers its jobs: a model, a sampling session, the custom losses of a session. Its row is locked
while one of its jobs is written, so that two submissions to one stream see each other also on PostgreSQL.

A job becomes ready by getting a *turn*. Within one owner, jobs are claimed in the order of their turns. A stream's next
job may not take its turn before the work already queued in the stream would have had its share; a stream that was idle
starts at the turn the owner's jobs have reached by now. So of an owner's two models, one with a long queue and one with
a single job, the single job does not wait for the queue. (This is start-time fair queueing.)
"""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa

from tinsmith.errors import InvalidInputError
from tinsmith.server.store import ids
from tinsmith.server.store.database import Database
from tinsmith.server.store.outcomes import outcome_values, result_values
from tinsmith.server.store.records import Done, Enqueued, NewJob, Outcome
from tinsmith.server.store.schema import jobs, payloads, results, streams, turns

_TURN = sa.select(turns.c.turn).where(
    turns.c.base_model == sa.bindparam("base_model"),
    turns.c.lane == sa.bindparam("lane"),
    turns.c.owner == sa.bindparam("owner"),
)
_ARRIVED = (
    sa.select(jobs.c.request_id, jobs.c.seq_id, jobs.c.state, jobs.c.size)
    .where(jobs.c.stream == sa.bindparam("stream"), jobs.c.seq_id > sa.bindparam("after"))
    .order_by(jobs.c.seq_id)
)
_KIND = sa.select(jobs.c.kind).where(jobs.c.request_id == sa.bindparam("id"))
_SET_TURN = sa.update(jobs).where(jobs.c.request_id == sa.bindparam("id")).values(turn=sa.bindparam("turn"))
_INSERT_PAYLOAD = sa.insert(payloads)
_INSERT_RESULT = sa.insert(results)
_SET_STREAM = (
    sa.update(streams)
    .where(streams.c.stream == sa.bindparam("id"))
    .values({name: sa.bindparam(name) for name in ("frontier", "highest", "next_turn", "done_serial")})
)


class Queue:
    """Writes submissions, inside a transaction that the caller holds."""

    def __init__(self, database: Database) -> None:
        touch = database.insert(streams).values(stream=sa.bindparam("stream"), last_request=sa.bindparam("now"))
        self.touch = touch.on_conflict_do_update(
            index_elements=["stream"], set_={"last_request": touch.excluded.last_request}
        ).returning(streams.c.frontier, streams.c.highest, streams.c.next_turn, streams.c.done_serial)
        self.insert_job = database.insert(jobs).on_conflict_do_nothing().returning(jobs.c.request_id)

    def add(self, connection: sa.Connection, job: NewJob, outcome: Outcome | None, now: datetime) -> Enqueued:
        return _Arrival(self, connection, job, outcome, now).enter()


class _Arrival:
    """One submission on its way into its stream."""

    def __init__(
        self, queue: Queue, connection: sa.Connection, job: NewJob, outcome: Outcome | None, now: datetime
    ) -> None:
        self.queue = queue
        self.connection = connection
        self.job = job
        self.outcome = outcome
        self.now = now
        row = connection.execute(queue.touch, {"stream": job.stream, "now": now}).one()
        self.frontier, self.highest, self.next_turn, self.done_serial = row
        self.seq_id = self._number()
        self.request_id = ids.request_id(job.stream, self.seq_id)

    def enter(self) -> Enqueued:
        # Below the frontier every number has been used, even if its job was removed since.
        if self._is_ordered and self.seq_id < self.frontier:
            return self._repeated()
        is_ready = not self._is_ordered or self.seq_id == self.frontier
        if not self._insert(is_ready):
            return self._repeated()
        if self._is_ordered and is_ready:
            self.frontier += 1
            self._admit_followers()
        self.highest = max(self.highest, self.seq_id)
        self._save_stream()
        return Enqueued(request_id=self.request_id, is_new=True)

    def _repeated(self) -> Enqueued:
        """The first submission stands. A client that repeats itself would not ask for another kind of operation."""
        kind = self.connection.scalar(_KIND, {"id": self.request_id})
        if kind not in (None, self.job.kind):
            raise InvalidInputError(
                f"seq_id {self.seq_id} of {self.job.stream} is a {kind} already, so this {self.job.kind} is not done. "
                "Two clients cannot work on one model: make a model for each.",
                field="seq_id",
                value=self.seq_id,
            )
        return Enqueued(request_id=self.request_id, is_new=False)

    @property
    def _is_ordered(self) -> bool:
        return self.job.model_id is not None

    def _number(self) -> int:
        if self.job.seq_id is not None:
            if self.job.seq_id < 0:
                raise InvalidInputError(
                    f"seq_id is {self.job.seq_id}; count from 0.", field="seq_id", value=self.job.seq_id
                )
            return self.job.seq_id
        return int(self.highest) + 1

    def _insert(self, is_ready: bool) -> bool:
        job = self.job
        values = {
            "request_id": self.request_id,
            "stream": job.stream,
            "seq_id": self.seq_id,
            "kind": job.kind,
            "lane": job.lane,
            "owner": job.owner,
            "key_id": job.key_id,
            "session_id": job.session_id,
            "base_model": job.base_model,
            "model_id": job.model_id,
            "sampler_id": job.sampler_id,
            "size": job.size,
            "replica": job.replica,
            "created": self.now,
            **self._progress(is_ready),
        }
        if self.connection.execute(self.queue.insert_job, values).first() is None:
            return False
        if self.outcome is None:
            self.connection.execute(_INSERT_PAYLOAD, {"request_id": self.request_id, "data": job.payload})
        elif isinstance(self.outcome, Done):
            self.connection.execute(_INSERT_RESULT, result_values(self.request_id, self.outcome))
        return True

    def _progress(self, is_ready: bool) -> dict[str, object]:
        if self.outcome is None:
            return {"state": "queued", "turn": self._take_turn(self.job.size) if is_ready else None}
        self.done_serial += 1
        return {**outcome_values(self.outcome, self.now, self.done_serial), "turn": None}

    def _take_turn(self, size: int) -> int:
        reached = self.connection.scalar(
            _TURN, {"base_model": self.job.base_model, "lane": self.job.lane, "owner": self.job.owner}
        )
        turn: int = max(self.next_turn, reached or 0)
        self.next_turn = turn + max(1, size)
        return turn

    def _admit_followers(self) -> None:
        """Later numbers that came earlier have waited for this one."""
        if self.highest < self.frontier:
            return
        for row in self.connection.execute(_ARRIVED, {"stream": self.job.stream, "after": self.seq_id}).all():
            if row.seq_id != self.frontier:
                return
            if row.state == "queued":
                self.connection.execute(_SET_TURN, {"id": row.request_id, "turn": self._take_turn(row.size)})
            self.frontier += 1

    def _save_stream(self) -> None:
        self.connection.execute(
            _SET_STREAM,
            {
                "id": self.job.stream,
                "frontier": self.frontier,
                "highest": self.highest,
                "next_turn": self.next_turn,
                "done_serial": self.done_serial,
            },
        )
