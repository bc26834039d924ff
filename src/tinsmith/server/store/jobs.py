"""The life of a job: queued, claimed by a worker, done, failed or cancelled."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from tinsmith.errors import InvalidInputError
from tinsmith.server.store.audit import note
from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.ids import stream_of
from tinsmith.server.store.leading import Lead
from tinsmith.server.store.models import check_count, insert_model
from tinsmith.server.store.outcomes import outcome_values, result_values
from tinsmith.server.store.posts import Post
from tinsmith.server.store.queue import Arrivals, Queue
from tinsmith.server.store.recent_samples import add_samples
from tinsmith.server.store.records import (
    Abandoned,
    Cancelled,
    Done,
    Enqueued,
    Failed,
    Job,
    Lane,
    NewEvent,
    NewJob,
    NewModel,
    Outcome,
    Queued,
    QueueDepth,
    Stray,
    Submission,
)
from tinsmith.server.store.samplers import publish
from tinsmith.server.store.schema import jobs, models, payloads, results, sessions, streams, turns

# Written out rather than bound, because that is how the databases see that a partial index applies.
_QUEUED = jobs.c.state == sa.literal_column("'queued'")
_RUNNING = jobs.c.state == sa.literal_column("'running'")


def _owners_with_work() -> sa.Select[str]:
    """The owners after one of them, each once and in order, `count` at most.

    Each is found by one step in the index however many jobs the owner has, and no more steps are taken than asked for.
    """
    first = jobs.alias()
    found = sa.select(_first_owner(first, first.c.owner > sa.bindparam("after")).label("owner"))
    owners = found.cte("found", recursive=True)
    later = jobs.alias()
    following = _first_owner(later, later.c.owner > owners.c.owner)
    owners = owners.union_all(sa.select(following).where(owners.c.owner.is_not(None)))
    return sa.select(owners.c.owner).where(owners.c.owner.is_not(None)).limit(sa.bindparam("count"))


def _first_owner(table: sa.FromClause, *conditions: sa.ColumnElement[bool]) -> sa.ScalarSelect[str]:
    # Not min(), for which PostgreSQL may read all entries of the index.
    query = sa.select(table.c.owner).where(_ready(table), *conditions).order_by(table.c.owner).limit(1)
    return query.scalar_subquery()


def _ready(table: sa.FromClause, lane: Lane | None = None) -> sa.ColumnElement[bool]:
    return sa.and_(
        table.c.base_model == sa.bindparam("base_model"),
        table.c.lane == (sa.bindparam("lane") if lane is None else lane),
        table.c.replica == sa.bindparam("replica"),
        table.c.state == sa.literal_column("'queued'"),
        table.c.turn.is_not(None),
    )


_OWNERS = _owners_with_work()
_LANES = sa.union_all(
    *(sa.select(sa.literal(lane)).where(sa.exists().where(_ready(jobs, lane))) for lane in ("train", "sample"))
)
_PICK = (
    sa.select(jobs.c.request_id, jobs.c.turn, jobs.c.samples, sa.func.length(payloads.c.data).label("size_bytes"))
    .join(payloads)
    .where(_ready(jobs), jobs.c.owner == sa.bindparam("owner"))
    .order_by(jobs.c.turn, jobs.c.created)
    .limit(sa.bindparam("share"))
    .offset(sa.bindparam("skip"))
    .with_for_update(of=jobs)
)
_START = (
    sa.update(jobs)
    .where(jobs.c.request_id.in_(sa.bindparam("picked", expanding=True)))
    .values(state="running", worker=sa.bindparam("by"), started=sa.bindparam("now"))
)
_JOB_COLUMNS = (
    *(jobs.c[name] for name in ("request_id", "kind", "owner", "session_id", "base_model", "model_id", "sampler_id")),
    jobs.c.seq_id,
    jobs.c.size,
    jobs.c.samples,
    jobs.c.created,
    jobs.c.attempts,
    jobs.c.key_id,
    payloads.c.data.label("payload"),
)
_LOAD = sa.select(*_JOB_COLUMNS).join(payloads).where(jobs.c.request_id.in_(sa.bindparam("picked", expanding=True)))

_BEGIN = (
    sa.update(jobs)
    .where(jobs.c.request_id.in_(sa.bindparam("begun", expanding=True)), _RUNNING, jobs.c.worker == sa.bindparam("by"))
    .values(attempts=jobs.c.attempts + sa.bindparam("more"))
)

_FORGIVE = (
    sa.update(jobs)
    .where(jobs.c.request_id.in_(sa.bindparam("begun", expanding=True)), _RUNNING, jobs.c.attempts > 0)
    .values(attempts=jobs.c.attempts - 1)
)

_RESERVE_SERIALS = (
    sa.update(streams)
    .where(streams.c.stream.in_(sa.bindparam("names", expanding=True)))
    .values(done_serial=streams.c.done_serial + sa.bindparam("count"))
    .returning(streams.c.stream, streams.c.done_serial)
)
_CANDIDATES = (
    sa.select(jobs.c.request_id, jobs.c.stream, jobs.c.model_id)
    .where(jobs.c.request_id.in_(sa.bindparam("ids", expanding=True)))
    .with_for_update()
)
_RUNNING_ANYWHERE = _CANDIDATES.where(_RUNNING)
_RUNNING_HERE = _CANDIDATES.where(_RUNNING, jobs.c.worker == sa.bindparam("worker"))
# What has loaded weights is in a snapshot before it counts as done, and its worker may have died in between.
_IN_SNAPSHOT = sa.exists().where(models.c.model_id == jobs.c.model_id, models.c.snapshot_seq >= jobs.c.seq_id)
_STILL_QUEUED = _CANDIDATES.where(_QUEUED, jobs.c.owner == sa.bindparam("owner"), sa.not_(_IN_SNAPSHOT))
_UNFINISHED = _CANDIDATES.where(jobs.c.finished.is_(None))
_SETTLE = (
    sa.update(jobs)
    .where(jobs.c.request_id == sa.bindparam("id"))
    .values({name: sa.bindparam(name) for name in ("state", "error", "category", "finished", "done_serial", "shown")})
)
_KEEP_RESULTS = sa.insert(results)
_DROP_PAYLOADS = sa.delete(payloads).where(payloads.c.request_id.in_(sa.bindparam("ids", expanding=True)))


class _Room(NamedTuple):
    """What a worker can take of one kind of jobs."""

    amount: int
    num_bytes: int
    of_owner: int = sys.maxsize
    held: Mapping[str, int] = MappingProxyType({})
    """By owner, what counts towards that."""

    @property
    def is_there(self) -> bool:
        return self.amount > 0 and self.num_bytes > 0

    @property
    def full_owners(self) -> list[str]:
        return [owner for owner, count in self.held.items() if count >= self.of_owner]


_WITH_FILES = ("load_weights", "save_weights", "save_weights_for_sampler", "save_weights_external")
"""Operations that are in a snapshot or have written a checkpoint before they count as done."""

_NO_EVENTS: Mapping[str, NewEvent] = MappingProxyType({})
_AT_ONCE = 500  # jobs settled in one transaction, so that nobody waits long for the write lock


PLACE_END = "/"
"""Between a worker's place, where it has one, and the rest of its name."""


class Jobs:
    def __init__(self, database: Database, lead: Lead) -> None:
        self._database = database
        self._lead = lead
        self._queue = Queue(database)
        insert_turn = database.insert(turns)
        self._advance_turn = insert_turn.on_conflict_do_update(
            index_elements=["base_model", "lane", "owner"],
            set_={"turn": insert_turn.excluded.turn},
            where=turns.c.turn < insert_turn.excluded.turn,
        )
        self._last_owner: dict[tuple[str, str], str] = {}
        self._post = Post(database, lead)

    # Submitting

    def enqueue(self, job: NewJob, *, outcome: Outcome | None = None, model: NewModel | None = None) -> Enqueued:
        """Write a submission down; when this returns, it outlives a power cut.

        A number that was submitted before finds its first submission, and nothing changes. With an `outcome` the job
        is over on arrival, its number used up: that is how a refused submission is recorded. `model` is what a
        `create_model` job creates.
        """
        return self.enqueue_many([Submission(job=job, outcome=outcome, model=model)])[0]

    def enqueue_many(self, submissions: Sequence[Submission]) -> list[Enqueued]:
        """The same for several at once, of any owners and streams: they share the wait for the disk."""
        for submission in submissions:
            if submission.outcome is None and submission.job.base_model is None:
                raise InvalidInputError("A job without a base model has no worker.", field="base_model")
        return self._database.write(lambda connection: self._add_all(connection, submissions))

    def _add_all(self, connection: sa.Connection, submissions: Sequence[Submission]) -> list[Enqueued]:
        now = self._database.now()
        answers: dict[int, Enqueued] = {}
        # Requests in the same moment, here or at another server, would pass the limit together. These are held before
        # the rows of streams, and in the same order by all.
        for owner in sorted({submission.model.owner for submission in submissions if submission.model is not None}):
            self._database.one_at_a_time(connection, f"models of {owner}")
        arrivals = Arrivals(self._queue, connection, now)
        # Sorted, so that two transactions lock the rows of their streams in the same order.
        for place, submission in sorted(enumerate(submissions), key=lambda item: item[1].job.stream):
            answers[place] = arrivals.add(submission.job, submission.outcome)
            if submission.model is not None and answers[place].is_new:
                insert_model(self._database, connection, submission.model, now)
                check_count(connection, submission.model.owner, submission.most_models)
            if submission.event is not None and answers[place].is_new:
                note(connection, submission.event, now)
        arrivals.finish()
        return [answers[place] for place in range(len(submissions))]

    # Working

    def claim(
        self,
        base_model: str,
        worker: str,
        *,
        train: int = 0,
        sample: int = 0,
        train_bytes: int = sys.maxsize,
        sample_bytes: int = sys.maxsize,
        sample_of_owner: int = sys.maxsize,
        held: Mapping[str, int] = MappingProxyType({}),
        without: Collection[str] = (),
        replica: str = "",
    ) -> list[Job]:
        """Take jobs of each kind that may run, marked as running for this worker.

        No more are taken once they are `train` jobs, once they ask for `sample` samples together, or once their
        payloads have so many bytes. The last one may be larger than what was left, as otherwise one that is larger than
        the whole would never run. None are taken of the models and samplers `without` which we work for now, nor of an
        owner who has `sample_of_owner` samples with those that the worker has `held` from before.

        A model's jobs come in the order of their numbers and without holes. Owners get equal parts of the room, and
        within an owner the streams take turns. One worker at a time claims training for a base model, and one what is
        for a `replica`.
        """
        rooms: dict[Lane, _Room] = {
            "train": _Room(train, train_bytes),
            "sample": _Room(sample, sample_bytes, sample_of_owner, held),
        }
        where = {"base_model": base_model, "replica": replica}
        # Looking takes no lock: a worker that looks in vain keeps nobody from submitting.
        waiting = self._database.read(lambda connection: self._waiting(connection, where, rooms))
        wanted = {lane: rooms[lane] for lane in waiting}
        if not wanted:
            return []

        def write(connection: sa.Connection) -> list[Job]:
            self._post.check(connection)
            pick = _PICK if not without else _PICK.where(jobs.c.stream.not_in(without))
            claims = (self._claim(connection, where, worker, lane, room, pick) for lane, room in wanted.items())
            return [job for claim in claims for job in claim]

        return self._database.write(write, durable=False)

    def take_post(self, base_model: str, place: str) -> None:
        """From now on nobody works there who began before: one that is out of reach of all but the database, say.

        Done once by a process: who was replaced while the database was away does not come back.
        """
        self._post.take(base_model, place)

    def _waiting(self, connection: sa.Connection, where: Mapping[str, str], rooms: Mapping[Lane, _Room]) -> list[Lane]:
        """The kinds of which there is something to take."""
        self._lead.check(connection)
        ready = set(connection.scalars(_LANES, where))
        with_room = [lane for lane, room in rooms.items() if lane in ready and room.is_there]
        return [lane for lane in with_room if self._has_other(connection, {**where, "lane": lane}, rooms[lane])]

    def _has_other(self, connection: sa.Connection, where: Mapping[str, str], room: _Room) -> bool:
        """Whether something waits that is not of an owner who has enough."""
        if not room.full_owners:
            return True
        found = connection.scalars(_OWNERS, {**where, "after": "", "count": len(room.full_owners) + 1})
        return not set(found) <= set(room.full_owners)

    def _claim(
        self,
        connection: sa.Connection,
        where: Mapping[str, str],
        worker: str,
        lane: Lane,
        room: _Room,
        pick: sa.Select[Any],
    ) -> list[Job]:
        reached = self._pick(connection, {**where, "lane": lane}, room, pick)
        if not reached:
            return []
        picked = list(reached)
        connection.execute(_START, {"picked": picked, "by": worker, "now": self._database.now()})
        loaded = {row.request_id: _job(row) for row in connection.execute(_LOAD, {"picked": picked})}
        claimed = [loaded[request_id] for request_id in picked]
        clock: dict[str, int] = {}
        for job in claimed:
            clock[job.owner] = max(clock.get(job.owner, 0), reached[job.request_id])
        connection.execute(
            self._advance_turn,
            [
                {"base_model": where["base_model"], "lane": lane, "owner": owner, "turn": turn}
                for owner, turn in sorted(clock.items())
            ],
        )
        return claimed

    def _pick(
        self,
        connection: sa.Connection,
        where: Mapping[str, str],
        given: _Room,
        pick: sa.Select[Any],
    ) -> dict[str, int]:
        """Requests and their turns: rounds over the owners, equal parts each round, until there is no room or the end.

        A part is counted in samples, as the room is, and no job asks for less than one.
        """
        place = where["base_model"], where["lane"]
        room, room_bytes = given.amount, given.num_bytes
        owners = self._in_turn(connection, where, self._last_owner.get(place, ""), room + len(given.full_owners))
        left = {owner: given.of_owner - given.held.get(owner, 0) for owner in owners}
        owners = [owner for owner in owners if left[owner] > 0]
        taken = dict.fromkeys(owners, 0)
        picked: dict[str, int] = {}
        while owners:
            share = math.ceil(room / len(owners))
            unexhausted = []
            for owner in owners:
                self._last_owner[place] = owner
                part = min(share, room, left[owner])
                rows = connection.execute(pick, {**where, "owner": owner, "share": part, "skip": taken[owner]}).all()
                for row in rows:
                    picked[row.request_id] = row.turn
                    taken[owner] += 1
                    part -= row.samples
                    left[owner] -= row.samples
                    room -= row.samples
                    room_bytes -= row.size_bytes
                    if room <= 0 or room_bytes <= 0:
                        return picked
                    if part <= 0:
                        if left[owner] > 0:
                            unexhausted.append(owner)
                        break
            owners = unexhausted
        return picked

    def _in_turn(self, connection: sa.Connection, where: Mapping[str, str], last: str, count: int) -> list[str]:
        """Owners with work, as many as can get something: with thousands of them, most have to wait for later claims.

        They begin after the owner who came last, so that nobody is left out for ever.
        """
        owners = list(connection.scalars(_OWNERS, {**where, "after": last, "count": count}))
        if last and len(owners) < count:
            # Not compared with the last one here: a database may have an order of its own.
            again = connection.scalars(_OWNERS, {**where, "after": "", "count": count})
            owners = list(dict.fromkeys([*owners, *again]))[:count]
        return owners

    def complete(
        self, worker: str, outcomes: Mapping[str, Outcome], events: Mapping[str, NewEvent] = _NO_EVENTS
    ) -> list[str]:
        """Record what became of claimed jobs, in one transaction, and give back the ids that were accepted.

        A job that is no longer this worker's (it was taken for dead, and its jobs went to another) is left alone.
        `events` are for the audit trail, by job.
        """

        def write(connection: sa.Connection) -> list[str]:
            accepted = self._settle(connection, outcomes, _RUNNING_HERE, worker=worker)
            for request_id in events.keys() & accepted:
                note(connection, events[request_id], self._database.now())
            done = {request_id: outcomes[request_id] for request_id in accepted}
            add_samples(connection, done, self._database.now())
            publish(connection, done)
            return accepted

        return self._database.write(write, durable=False)

    def begin(self, worker: str, request_ids: Collection[str]) -> None:
        """Count a try of jobs that this worker has claimed, before they can do it any harm."""
        values = {"begun": list(request_ids), "by": worker, "more": 1}

        def write(connection: sa.Connection) -> None:
            self._post.check(connection)
            connection.execute(_BEGIN, values)

        self._database.write(write, durable=False)

    def release(
        self, base_model: str, worker: str, begun: Collection[str], requests: Collection[str] | None = None
    ) -> list[str]:
        """Put back what a worker had claimed, all of it or these; a try that it had begun does not count.

        Gives back the jobs that are over instead, because nobody wants them any more.
        """
        mine = sa.and_(_RUNNING, jobs.c.base_model == base_model, jobs.c.worker == worker)
        if requests is not None:
            mine = sa.and_(mine, jobs.c.request_id.in_(requests))

        def write(connection: sa.Connection) -> list[str]:
            connection.execute(_BEGIN, {"begun": list(begun), "by": worker, "more": -1})
            return self._put_back(connection, mine, sa.true())

        return self._database.write(write)

    def requeue(
        self, base_model: str, *, max_attempts: int, error: str, forgiven: Collection[str] = (), place: str = ""
    ) -> list[str]:
        """Put back whatever a dead worker had claimed, in its old place; the last try of the forgiven does not count.

        Where a base model has several workers, `place` is that of the dead one, with which its name begins.

        Gives back the jobs that are over instead: those nobody wants any more, unless they may have left files behind,
        and those that were begun as often as `max_attempts`, which fail with `error`.
        """
        lost = sa.and_(_RUNNING, jobs.c.base_model == base_model)
        if place:
            lost = sa.and_(lost, jobs.c.worker.startswith(f"{place}{PLACE_END}", autoescape=True))
        hopeless = sa.select(jobs.c.request_id).where(lost, jobs.c.attempts >= max_attempts)
        failed = Failed(error=error, category="server")

        def write(connection: sa.Connection) -> list[str]:
            self._post.check(connection)
            connection.execute(_FORGIVE, {"begun": list(forgiven)})
            given_up = dict.fromkeys(connection.scalars(hopeless), failed)
            # Of what is left of an operation, nobody knows; so it is done to its end, as by a worker that lives.
            unmade = jobs.c.kind.not_in(_WITH_FILES)
            return self._settle(connection, given_up, _RUNNING_ANYWHERE) + self._put_back(connection, lost, unmade)

        return self._database.write(write)

    def _put_back(
        self, connection: sa.Connection, which: sa.ColumnElement[bool], cancellable: sa.ColumnElement[bool]
    ) -> list[str]:
        """Those that were to be cancelled, and can be, are, and given back; the others wait again where they were."""
        asked = sa.select(jobs.c.request_id).where(which, cancellable, jobs.c.cancel_asked, sa.not_(_IN_SNAPSHOT))
        unwanted = connection.scalars(asked).all()
        cancelled = self._settle(connection, dict.fromkeys(unwanted, Cancelled()), _RUNNING_ANYWHERE)
        connection.execute(sa.update(jobs).where(which).values(state="queued", worker=None, started=None))
        return cancelled

    def still_open(self, request_ids: Collection[str]) -> set[str]:
        """Which of these have no outcome yet."""
        found = set[str]()
        asked = list(request_ids)
        for some in (asked[first : first + _AT_ONCE] for first in range(0, len(asked), _AT_ONCE)):
            query = sa.select(jobs.c.request_id).where(jobs.c.finished.is_(None), jobs.c.request_id.in_(some))
            found.update(self._database.all(query, lambda row: str(row.request_id)))
        return found

    def is_busy(self, base_model: str, place: str) -> bool:
        """Whether a worker in this place has claimed anything that is not done."""
        mine = jobs.c.worker.startswith(f"{place}{PLACE_END}", autoescape=True)
        query = sa.select(jobs.c.request_id).where(_RUNNING, jobs.c.base_model == base_model, mine).limit(1)
        return self._database.first(query, lambda row: True) or False

    def strays(self, base_model: str, replicas: Collection[str]) -> list[Stray]:
        """Samples that wait for none of these replicas, the oldest of them: theirs is gone, or they never had one."""
        query = (
            sa.select(jobs.c.request_id, jobs.c.owner, jobs.c.sampler_id, jobs.c.samples)
            .where(_QUEUED, jobs.c.turn.is_not(None), jobs.c.base_model == base_model, jobs.c.lane == "sample")
            .where(jobs.c.replica.not_in(list(replicas)))
            .order_by(jobs.c.created)
            .limit(_AT_ONCE)
        )
        return self._database.all(query, lambda row: Stray(**row._mapping))

    def deal(self, replicas: Mapping[str, str]) -> set[str]:
        """From now on these samples are for these replicas; gives back those that still wait, of which it is true."""
        by_replica: dict[str, list[str]] = {}
        for request_id, replica in replicas.items():
            by_replica.setdefault(replica, []).append(request_id)

        def write(connection: sa.Connection) -> set[str]:
            self._lead.check(connection)
            dealt = set[str]()
            for replica, request_ids in sorted(by_replica.items()):
                mine = sa.and_(_QUEUED, jobs.c.request_id.in_(request_ids))
                update = sa.update(jobs).where(mine).values(replica=replica).returning(jobs.c.request_id)
                dealt.update(connection.scalars(update))
            return dealt

        return self._database.write(write, durable=False)

    def fail_all(self, base_model: str, error: str) -> list[str]:
        """There will be no worker: everything that waits for one fails, and is given back."""
        waiting = sa.select(jobs.c.request_id).where(jobs.c.finished.is_(None), jobs.c.base_model == base_model)
        failed = Failed(error=error, category="server")

        def write(connection: sa.Connection) -> list[str]:
            self._lead.check(connection)
            some = connection.scalars(waiting.limit(_AT_ONCE)).all()
            return self._settle(connection, dict.fromkeys(some, failed), _UNFINISHED)

        over: list[str] = []
        while some := self._database.write(write):
            over += some
        return over

    def cancel(self, request_id: str, owner: str) -> Literal["cancelled", "asked", "finished"] | None:
        """Cancel a queued job at once and ask the worker of a running one; `None` if there is no such job.

        One whose work is done already, and has only to be told, counts as finished.
        """
        return self._database.write(lambda connection: self._cancel(connection, request_id, owner), must_fit=True)

    def _cancel(
        self, connection: sa.Connection, request_id: str, owner: str
    ) -> Literal["cancelled", "asked", "finished"] | None:
        if self._settle(connection, {request_id: Cancelled()}, _STILL_QUEUED, owner=owner):
            return "cancelled"
        mine = sa.and_(jobs.c.request_id == request_id, jobs.c.owner == owner)
        if connection.execute(sa.update(jobs).where(mine, _RUNNING).values(cancel_asked=True)).rowcount:
            return "asked"
        return "finished" if connection.scalar(sa.select(sa.literal(1)).select_from(jobs).where(mine)) else None

    def cancel_abandoned(self) -> Abandoned:
        """Cancel the samples of sessions that the server has ended, as `cancel` would each of them."""
        ended = sa.select(sessions.c.session_id).where(
            sessions.c.session_id == jobs.c.session_id, sessions.c.state == "cancelled"
        )
        return self._cancel_samples(ended.exists())

    def cancel_samples(self, session_id: str) -> Abandoned:
        """The same for one session, as it is now; another client of its samplers may ask for more later."""
        return self._cancel_samples(jobs.c.session_id == session_id)

    def _cancel_samples(self, whose: sa.ColumnElement[bool]) -> Abandoned:
        unwanted = sa.and_(jobs.c.finished.is_(None), jobs.c.lane == "sample", whose)
        waiting = sa.select(jobs.c.request_id).where(unwanted, _QUEUED).limit(_AT_ONCE)
        ask = (
            sa.update(jobs)
            .where(unwanted, _RUNNING, sa.not_(jobs.c.cancel_asked))
            .values(cancel_asked=True)
            .returning(jobs.c.base_model)
        )

        def write(connection: sa.Connection) -> list[str]:
            some = connection.scalars(waiting).all()
            return self._settle(connection, dict.fromkeys(some, Cancelled()), _UNFINISHED)

        cancelled: list[str] = []
        while some := self._database.write(write):
            cancelled += some
        asked = self._database.write(lambda connection: {*connection.scalars(ask)})
        return Abandoned(cancelled=cancelled, asked=sorted(asked))

    def cancel_asked(self, base_model: str, worker: str) -> list[str]:
        """The jobs of this worker whose clients have lost interest."""
        query = sa.select(jobs.c.request_id).where(
            _RUNNING, jobs.c.base_model == base_model, jobs.c.worker == worker, jobs.c.cancel_asked
        )
        return self._database.all(query, lambda row: row.request_id)

    def _settle(
        self, connection: sa.Connection, outcomes: Mapping[str, Outcome], candidates: sa.Select[Any], **where: str
    ) -> list[str]:
        """Give jobs their outcomes if they are still among the candidates.

        The serial of a finished job rises within its stream. It is drawn under the lock of the stream's row: whoever
        has seen a serial has seen all lower ones. Some may be left unused.
        """
        if not outcomes:
            return []
        count = len(outcomes)
        names = sorted({stream_of(request_id) for request_id in outcomes})
        reserved = connection.execute(_RESERVE_SERIALS, {"names": names, "count": count})
        serials = {row.stream: itertools.count(row.done_serial - count + 1) for row in reserved}
        rows = connection.execute(candidates, {"ids": list(outcomes), **where}).all()
        if not rows:
            return []
        now = self._database.now()
        connection.execute(
            _SETTLE,
            [
                {"id": row.request_id, **outcome_values(outcomes[row.request_id], now, next(serials[row.stream]))}
                for row in rows
            ],
        )
        self._keep_bytes(connection, outcomes, rows)
        return [row.request_id for row in rows]

    def _keep_bytes(self, connection: sa.Connection, outcomes: Mapping[str, Outcome], rows: Sequence[Row]) -> None:
        """Results are kept, and the payloads of training that changed a model: they may have to be replayed."""
        done = {row.request_id: outcome for row in rows if isinstance(outcome := outcomes[row.request_id], Done)}
        if done:
            connection.execute(_KEEP_RESULTS, [result_values(*item) for item in done.items()])
        kept = {request_id for request_id, outcome in done.items() if outcome.is_replayed}
        spent = [row.request_id for row in rows if row.model_id is None or row.request_id not in kept]
        if spent:
            connection.execute(_DROP_PAYLOADS, {"ids": spent})

    # Replaying

    def history(self, model_id: str, after_seq: int, limit: int) -> list[Job]:
        """The training jobs of a model that were done after number `after_seq`, in order, as far as not forgotten."""
        query = (
            sa.select(*_JOB_COLUMNS)
            .join(payloads)
            .where(jobs.c.stream == model_id, jobs.c.seq_id > after_seq, jobs.c.state == "done")
            .order_by(jobs.c.seq_id)
            .limit(limit)
        )
        return self._database.all(query, _job)

    def count_history(self, model_id: str, after_seq: int, before_seq: int) -> int:
        """How many jobs `history` has between these numbers."""
        query = (
            sa.select(sa.func.count())
            .select_from(jobs.join(payloads))
            .where(jobs.c.stream == model_id, jobs.c.seq_id > after_seq, jobs.c.seq_id < before_seq)
            .where(jobs.c.state == "done")
        )
        return self._database.read(lambda connection: connection.scalar(query) or 0)

    def forget_payloads(self, model_id: str, upto_seq: int) -> None:
        """Training up to this number, inclusive, is in snapshots and need not be replayed."""
        over = sa.select(jobs.c.request_id).where(
            jobs.c.stream == model_id, jobs.c.seq_id <= upto_seq, jobs.c.finished.is_not(None)
        )
        delete = sa.delete(payloads).where(payloads.c.request_id.in_(over))
        self._database.write(lambda connection: connection.execute(delete), durable=False)

    # Watching

    def queued(self) -> list[Queued]:
        """What waits and what runs, by owner."""
        size = sa.func.coalesce(sa.func.sum(sa.func.length(payloads.c.data)), 0)
        query = (
            sa.select(jobs.c.owner, sa.func.count().label("requests"), size.label("size_bytes"))
            .select_from(jobs.outerjoin(payloads))
            .where(jobs.c.finished.is_(None))
            .group_by(jobs.c.owner)
        )
        return self._database.all(query, lambda row: Queued(**row._mapping))

    def is_awaited(self, stream: str, seq_id: int) -> bool:
        """Whether this is the number that later ones of its stream, which have arrived, wait for."""
        query = sa.select(sa.literal(True)).where(
            streams.c.stream == stream, streams.c.frontier == seq_id, streams.c.highest > seq_id
        )
        return self._database.read(lambda connection: bool(connection.scalar(query)))

    def first_missing(self, stream: str) -> int:
        """The lowest number of a stream that has not arrived."""
        query = sa.select(streams.c.frontier).where(streams.c.stream == stream)
        return self._database.read(lambda connection: connection.scalar(query) or 0)

    def first_unfinished(self, stream: str) -> int:
        """The operation of a model that is done next, or else the lowest number that has not arrived."""
        query = sa.select(sa.func.min(jobs.c.seq_id)).where(jobs.c.stream == stream, jobs.c.finished.is_(None))
        unfinished = self._database.read(lambda connection: connection.scalar(query))
        missing = self.first_missing(stream)
        return missing if unfinished is None else min(unfinished, missing)

    def at_work(self, model_ids: Collection[str]) -> set[str]:
        """Those of these models for which something waits or runs.

        A job without a turn does not count: it waits for a number that may never come.
        """
        mine = sa.and_(jobs.c.stream.in_(model_ids), jobs.c.done_serial.is_(None))  # an index finds these
        query = sa.select(jobs.c.stream).distinct().where(mine, jobs.c.finished.is_(None), jobs.c.turn.is_not(None))
        return set(self._database.all(query, lambda row: str(row.stream)))

    def depths(self, owner: str | None = None) -> list[QueueDepth]:
        """What waits and what runs, of one owner or of all, by base model and kind."""
        group = (jobs.c.base_model, jobs.c.kind, jobs.c.state)
        query = (
            sa.select(*group, sa.func.count().label("count"), sa.func.min(jobs.c.created).label("oldest"))
            .where(jobs.c.finished.is_(None))
            .group_by(*group)
            .order_by(*group)
        )
        if owner is not None:
            query = query.where(jobs.c.owner == owner)
        return self._database.all(query, lambda row: QueueDepth(**row._mapping))


def _job(row: Row) -> Job:
    return Job(**row._mapping)
