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
from tinsmith.server.store.database import Database, Row
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
    """The statements that depend on the database."""

    def __init__(self, database: Database) -> None:
        touch = database.insert(streams).values(stream=sa.bindparam("stream"), last_request=sa.bindparam("now"))
        self.touch = touch.on_conflict_do_update(
            index_elements=["stream"], set_={"last_request": touch.excluded.last_request}
        ).returning(streams.c.frontier, streams.c.highest, streams.c.next_turn, streams.c.done_serial)
        self.insert_job = database.insert(jobs).on_conflict_do_nothing().returning(jobs.c.request_id)


class _Stream:
    """Where a stream stands, with what this transaction has added to it."""

    def __init__(self, row: Row) -> None:
        self.frontier, self.highest, self.next_turn, self.done_serial = row


class Arrivals:
    """Submissions that enter together, inside a transaction that the caller holds.

    What no later one of them needs to see is written by `finish`, with one statement for all.
    """

    def __init__(self, queue: Queue, connection: sa.Connection, now: datetime) -> None:
        self.queue = queue
        self.connection = connection
        self.now = now
        self.payloads: list[dict[str, object]] = []
        self.results: list[dict[str, object]] = []
        self._streams: dict[str, _Stream] = {}
        self._turns: dict[tuple[str | None, str, str], int] = {}

    def add(self, job: NewJob, outcome: Outcome | None) -> Enqueued:
        return _Arrival(self, job, outcome).enter()

    def finish(self) -> None:
        moved = [{"id": name, **vars(stream)} for name, stream in self._streams.items()]
        for statement, rows in ((_INSERT_PAYLOAD, self.payloads), (_INSERT_RESULT, self.results), (_SET_STREAM, moved)):
            if rows:
                self.connection.execute(statement, rows)

    def stream(self, name: str) -> _Stream:
        """Nobody else adds to it from now on, until the transaction ends."""
        if name not in self._streams:
            self._streams[name] = _Stream(
                self.connection.execute(self.queue.touch, {"stream": name, "now": self.now}).one()
            )
        return self._streams[name]

    def reached(self, job: NewJob) -> int:
        """The turn that the owner's jobs have reached by now."""
        key = job.base_model, job.lane, job.owner
        if key not in self._turns:
            names = ("base_model", "lane", "owner")
            self._turns[key] = self.connection.scalar(_TURN, dict(zip(names, key, strict=True))) or 0
        return self._turns[key]


class _Arrival:
    """One submission on its way into its stream."""

    def __init__(self, arrivals: Arrivals, job: NewJob, outcome: Outcome | None) -> None:
        self.arrivals = arrivals
        self.connection = arrivals.connection
        self.job = job
        self.outcome = outcome
        self.stream = arrivals.stream(job.stream)
        self.seq_id = self._number()
        self.request_id = ids.request_id(job.stream, self.seq_id)

    def enter(self) -> Enqueued:
        stream = self.stream
        # Below the frontier every number has been used, even if its job was removed since.
        if self._is_ordered and self.seq_id < stream.frontier:
            return self._repeated()
        is_ready = not self._is_ordered or self.seq_id == stream.frontier
        if not self._insert(is_ready):
            return self._repeated()
        if self._is_ordered and is_ready:
            stream.frontier += 1
            self._admit_followers()
        stream.highest = max(stream.highest, self.seq_id)
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
        return int(self.stream.highest) + 1

    def _insert(self, is_ready: bool) -> bool:
        job, next_turn, done_serial = self.job, self.stream.next_turn, self.stream.done_serial
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
            "samples": job.samples,
            "replica": job.replica,
            "created": self.arrivals.now,
            **self._progress(is_ready),
        }
        if self.connection.execute(self.arrivals.queue.insert_job, values).first() is None:
            self.stream.next_turn, self.stream.done_serial = next_turn, done_serial
            return False
        if self.outcome is None:
            self.arrivals.payloads.append({"request_id": self.request_id, "data": job.payload})
        elif isinstance(self.outcome, Done):
            self.arrivals.results.append(result_values(self.request_id, self.outcome))
        return True

    def _progress(self, is_ready: bool) -> dict[str, object]:
        if self.outcome is None:
            return {"state": "queued", "turn": self._take_turn(self.job.size) if is_ready else None}
        self.stream.done_serial += 1
        return {**outcome_values(self.outcome, self.arrivals.now, self.stream.done_serial), "turn": None}

    def _take_turn(self, size: int) -> int:
        turn: int = max(self.stream.next_turn, self.arrivals.reached(self.job))
        self.stream.next_turn = turn + max(1, size)
        return turn

    def _admit_followers(self) -> None:
        """Later numbers that came earlier have waited for this one."""
        if self.stream.highest < self.stream.frontier:
            return
        for row in self.connection.execute(_ARRIVED, {"stream": self.job.stream, "after": self.seq_id}).all():
            if row.seq_id != self.stream.frontier:
                return
            if row.state == "queued":
                self.connection.execute(_SET_TURN, {"id": row.request_id, "turn": self._take_turn(row.size)})
            self.stream.frontier += 1
