"""The curves of training runs: a point for every optimizer step, and one for every time that a client logs its own.

A point holds all numbers of its moment, by name. What an operation adds is written down with its outcome, at no cost to
the worker, and gathered from there when somebody looks, or within a minute. An operation has one outcome however often
it is done, so it counts once. The data between two steps belong to the point of the step.

The newest points are kept as they are; of older ones, ten become their mean, and of those ten again. So a million
points have some 29,000 rows, and ten times as many take 10,500 more at most.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec
import sqlalchemy as sa

from tinsmith.errors import InvalidInputError
from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.records import Curve, RunProgress, Stepped, TrainedOn
from tinsmith.server.store.schema import curves, jobs, models, points, streams

KEPT = 10_000
"""The newest points that are kept as they are, and of those means that stand for as many each."""
PIECE = 500
"""How many are gathered, or become a tenth, in one transaction, so that nobody waits long for the write lock."""
TENTH = 10
CLIENT = "client/"
"""The names of what clients log begin with this; no name of ours does."""

Source: TypeAlias = Literal["steps", "client"]
Metrics: TypeAlias = Mapping[str, float | None]

_OF_STEPS = curves.c.source == "steps"
_CURVE = (
    sa.select(curves)
    .where(curves.c.model_id == sa.bindparam("model_id"), curves.c.source == sa.bindparam("source"))
    .with_for_update()
)
_NEWS = (
    sa.select(streams.c.stream)
    .join(models, models.c.model_id == streams.c.stream)
    .outerjoin(curves, sa.and_(curves.c.model_id == streams.c.stream, _OF_STEPS))
    .where(streams.c.done_serial > sa.func.coalesce(curves.c.gathered, 0))
)
_NEWEST = sa.select(streams.c.done_serial).where(streams.c.stream == sa.bindparam("model_id"))
_DONE = (
    sa.select(jobs.c.done_serial, jobs.c.finished, jobs.c.shown)
    .where(jobs.c.stream == sa.bindparam("model_id"), jobs.c.done_serial > sa.bindparam("gathered"))
    .order_by(jobs.c.done_serial)
    .limit(sa.bindparam("most"))
)
_ADD_POINTS = sa.insert(points)
_MICROSECONDS = sa.type_coerce(points.c.time, sa.BigInteger)  # as they are: to make dates of them takes half the time


class _Growing:
    """A curve whose row is locked, and the points that it gets."""

    def __init__(self, row: Row) -> None:
        self.curve_id: int = row.curve_id
        self.count: int = row.count
        self.last: dict[str, float | None] = row.last
        self.gathered: int = row.gathered
        self._stepped: datetime | None = row.stepped
        self._loss: float = row.loss
        self._weight: float = row.weight
        self._tokens: int = row.tokens
        self._new: list[dict[str, Any]] = []

    def gather(self, job: Row) -> None:
        self.gathered = job.done_serial
        shown = None if job.shown is None else msgspec.msgpack.decode(job.shown, type=TrainedOn | Stepped)
        if isinstance(shown, TrainedOn):
            self._loss += shown.loss
            self._weight += shown.weight
            self._tokens += shown.tokens
        elif isinstance(shown, Stepped):
            self.add(self.count, {**self._of_data(job.finished), **shown.metrics}, job.finished)
            self._stepped, self._loss, self._weight, self._tokens = job.finished, 0.0, 0.0, 0

    def _of_data(self, now: datetime) -> dict[str, float]:
        """What is known of the data since the last step; of a step without data, nothing."""
        if not self._tokens:
            return {}
        found: dict[str, float] = {"loss": self._loss / self._weight} if self._weight > 0 else {}
        found["tokens"] = self._tokens
        if self._stepped is not None and now > self._stepped:
            found["tokens_per_second"] = self._tokens / (now - self._stepped).total_seconds()
        return found

    def add(self, step: int, metrics: Mapping[str, float], now: datetime) -> None:
        self.count += 1
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self.last = {**self.last, **finite}
        point = {"number": self.count, "span": 1, "step": step, "time": now, "metrics": finite}
        self._new.append({"curve_id": self.curve_id, **point})

    def write(self, connection: sa.Connection) -> None:
        update = sa.update(curves).where(curves.c.curve_id == self.curve_id)
        done = {"count": self.count, "last": self.last, "gathered": self.gathered, "stepped": self._stepped}
        data = {"loss": self._loss, "weight": self._weight, "tokens": self._tokens}
        connection.execute(update.values(**done, **data))
        if self._new:
            connection.execute(_ADD_POINTS, self._new)


class Curves:
    """Whose a model is, the caller has asked before. What is shown is what was gathered."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._begin = database.insert(curves).on_conflict_do_nothing()

    # Growing

    def gather(self, model_ids: Collection[str]) -> None:
        """Add what was done since the last time."""
        self._gather(_NEWS.where(streams.c.stream.in_(model_ids)))

    def gather_all(self) -> None:
        self._gather(_NEWS)

    def _gather(self, news: sa.Select[str]) -> None:
        for model_id in self._database.all(news, lambda row: str(row.stream)):
            while self._database.write(partial(self._gather_piece, model_id=model_id), durable=False):
                pass

    def _gather_piece(self, connection: sa.Connection, model_id: str) -> bool:
        """Whether there may be more."""
        curve = self._curve(connection, model_id, "steps")
        # The newest serial is read first: all jobs up to it are then there to be seen.
        newest = connection.scalar(_NEWEST, {"model_id": model_id}) or 0
        done = connection.execute(_DONE, {"model_id": model_id, "gathered": curve.gathered, "most": PIECE}).all()
        for job in done:
            curve.gather(job)
        is_full = len(done) == PIECE
        if not is_full:
            curve.gathered = max(curve.gathered, newest)  # some serials are left unused
        curve.write(connection)
        return is_full

    def _curve(self, connection: sa.Connection, model_id: str, source: Source) -> _Growing:
        """Made if there is none."""
        where = {"model_id": model_id, "source": source}
        found = connection.execute(_CURVE, where).first()
        if found is None:
            connection.execute(self._begin, {**where, "count": 0, "last": {}})
            found = connection.execute(_CURVE, where).one()
        return _Growing(found)

    def log(
        self,
        model_id: str,
        metrics: Mapping[str, float],
        step: int | None = None,
        seq_id: int | None = None,
        *,
        most_names: int,
    ) -> None:
        """A point of a client's own, by default at the step that is next; `InvalidInputError` for too many names.

        A number that is not above those before it is that of a call which was sent twice.
        """
        named = {f"{CLIENT}{name}": value for name, value in metrics.items()}
        if step is None:
            self.gather([model_id])

        def write(connection: sa.Connection) -> None:
            curve = self._curve(connection, model_id, "client")
            if seq_id is not None:
                if seq_id <= curve.gathered:
                    return
                curve.gathered = seq_id
            new = named.keys() - curve.last.keys()
            if new and len(new) + len(curve.last) > most_names:
                raise _too_many_names(new, len(curve.last), most_names)
            at = _steps(connection, model_id) if step is None else step
            curve.add(at, named, self._database.now())
            curve.write(connection)

        self._database.write(write, durable=False)

    # Looking

    def names(self, model_id: str) -> list[str]:
        """Of all that can be drawn of a model, first what the server knows itself."""
        query = sa.select(curves.c.last).where(curves.c.model_id == model_id).order_by(curves.c.source.desc())
        return [name for last in self._database.all(query, lambda row: row.last) for name in last]

    def points(self, model_id: str, name: str, *, after: int = 0) -> Curve:
        """All that is kept of a curve, or what was added after the cursor."""
        query = (
            sa.select(points.c.number, points.c.step, _MICROSECONDS.label("microseconds"), points.c.metrics)
            .join(curves, curves.c.curve_id == points.c.curve_id)
            .where(curves.c.model_id == model_id, curves.c.source == _source(name), points.c.number > after)
            .order_by(points.c.number)
        )
        rows = self._database.read(lambda connection: connection.execute(query).all())
        found = [
            (step, microseconds / 1e6, metrics[name]) for _, step, microseconds, metrics in rows if name in metrics
        ]
        return Curve(points=found, cursor=rows[-1].number if rows else after)

    def progress(self, model_ids: Collection[str]) -> dict[str, RunProgress]:
        """How far each of these models is; one that was never trained is left out."""
        query = sa.select(curves.c.model_id, curves.c.source, curves.c["count"].label("steps"), curves.c.last).where(
            curves.c.model_id.in_(model_ids)
        )
        found: dict[str, RunProgress] = {}
        for row in self._database.read(lambda connection: connection.execute(query).all()):
            known = found.get(row.model_id, RunProgress())
            steps = row.steps if row.source == "steps" else known.steps
            found[row.model_id] = RunProgress(steps=steps, last={**known.last, **row.last})
        return found

    # Growing old

    def thin(self) -> int:
        """Put means in the place of old points, and gives back how many rows that saved."""
        due = sa.select(curves.c.curve_id).where(curves.c["count"] - curves.c.thinned >= KEPT + PIECE)
        saved = 0
        for curve_id in self._database.all(due, lambda row: int(row.curve_id)):
            span = 1
            while pieces := self._thin_level(curve_id, span):
                saved += pieces * (PIECE - PIECE // TENTH)
                span *= TENTH
        return saved

    def _thin_level(self, curve_id: int, span: int) -> int:
        pieces = 0
        while self._database.write(partial(_thin_piece, curve_id=curve_id, span=span), durable=False):
            pieces += 1
        return pieces


def _thin_piece(connection: sa.Connection, curve_id: int, span: int) -> bool:
    """Of the rows that stand for so many points each, the oldest become a tenth; False if there are few enough."""
    level = sa.and_(points.c.curve_id == curve_id, points.c.span == span)
    if (connection.scalar(sa.select(sa.func.count()).where(level)) or 0) < KEPT + PIECE:
        return False
    oldest = connection.execute(sa.select(points).where(level).order_by(points.c.number).limit(PIECE)).all()
    connection.execute(sa.delete(points).where(level, points.c.number <= oldest[-1].number))
    connection.execute(_ADD_POINTS, [*_means(oldest)])
    if span == 1:
        update = sa.update(curves).where(curves.c.curve_id == curve_id)
        connection.execute(update.values(thinned=curves.c.thinned + PIECE))
    return True


def _means(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Each stands where the first of its ten did, so that a curve begins where it always began."""
    for start in range(0, len(rows), TENTH):
        ten = rows[start : start + TENTH]
        metrics = _mean([row.metrics for row in ten])
        yield {**ten[0]._mapping, "span": ten[0].span * TENTH, "metrics": metrics}


def _mean(several: Sequence[Metrics]) -> Metrics:
    """By name, of those values that are numbers."""
    names = dict.fromkeys(name for metrics in several for name in metrics)
    numbers = {name: [value for one in several if (value := one.get(name)) is not None] for name in names}
    return {name: sum(values) / len(values) if values else None for name, values in numbers.items()}


def forget_curves(database: Database, model_ids: Collection[str]) -> None:
    """Some at a time: each may have tens of thousands of points."""
    mine = curves.c.model_id.in_(model_ids)
    for curve_id in database.all(sa.select(curves.c.curve_id).where(mine), lambda row: int(row.curve_id)):
        database.write(partial(_forget, curve_id=curve_id), durable=False)


def _forget(connection: sa.Connection, curve_id: int) -> None:
    for table in (points, curves):
        connection.execute(sa.delete(table).where(table.c.curve_id == curve_id))


def _source(name: str) -> Source:
    return "client" if name.startswith(CLIENT) else "steps"


def _steps(connection: sa.Connection, model_id: str) -> int:
    return connection.scalar(sa.select(curves.c["count"]).where(curves.c.model_id == model_id, _OF_STEPS)) or 0


def _too_many_names(new: Collection[str], known: int, most: int) -> InvalidInputError:
    example = min(new).removeprefix(CLIENT)
    return InvalidInputError(
        f"metrics has {len(new)} new names, such as {example!r}, but this model has {known} of at most {most}. Log "
        "under names that it has, and put what changes from step to step into the value.",
        field="metrics",
        value=example,
    )
