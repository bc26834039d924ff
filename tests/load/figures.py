"""Figures of a load, with the bounds that they have to keep."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from tests.load.campaign import Seen
from tests.load.records import Record

MOST_TIMES_IDLE = 10.0
LEAST_FAIRNESS = 0.9
MOST_API_MIB = 400.0
MOST_WORKER_GROWTH_MIB = 500.0
"""The cache of the sampler is among it, of which 10,000 samples fill about 240 MiB."""
MOST_STALL_SECONDS = 15.0
LEAST_SHARE_OF_FASTEST = 0.4
_QUEUE_IS_LONG = 0.9
"""The time of load ends when so many samples are done: then the queue is short."""


class Figure(NamedTuple):
    name: str
    value: str
    bound: str = ""
    is_kept: bool = True


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def jain(amounts: Sequence[float]) -> float:
    """1 if all have the same, 1/n if one has everything."""
    squares = len(amounts) * sum(amount * amount for amount in amounts)
    return sum(amounts) ** 2 / squares if squares else 1.0


class Figures:
    def __init__(self, seen: Seen, *, samples: int, models: int) -> None:
        self._seen = seen
        self._samples, self._models = samples, models
        self._done = sorted((record for record in seen.crowd if record.kind == "done"), key=lambda record: record.time)
        self._sampled = [record for record in self._done if record.what == "sample"]
        self._steps = [record for record in self._done if record.what != "sample"]
        queued = [record.time for record in seen.crowd if record.kind == "queued"]
        self.begin = max(queued, default=self._done[0].time)
        self.end = self._sampled[int(_QUEUE_IS_LONG * (len(self._sampled) - 1))].time

    def all(self) -> list[Figure]:
        return [
            *self._work(),
            *self._acknowledgements(),
            *self._fairness(),
            *self._memory(),
        ]

    def _loaded(self, records: Iterable[Record]) -> list[Record]:
        """What began when the queue was full, and ended while it was long."""
        return [record for record in records if self.begin <= record.time - record.seconds and record.time <= self.end]

    def _work(self) -> list[Figure]:
        seconds, done = self.end - self.begin, len(self._sampled)
        waiting = self._samples - sum(record.time < self.begin for record in self._sampled)
        steps = self._loaded(self._steps)
        return [
            Figure("samples done", f"{done:,}", f"{self._samples:,}", done == self._samples),
            Figure("samples that waited when all were queued", f"{waiting:,}"),
            Figure("seconds of load", f"{seconds:.1f}"),
            Figure("samples a second", f"{len(self._loaded(self._sampled)) / seconds:.0f}"),
            Figure("training operations a second", f"{len(steps) / seconds:.0f}"),
            Figure("seconds without any training, at most", f"{self._longest(steps):.1f}"),
            Figure("seconds without any sample, at most", f"{self._longest(self._loaded(self._sampled)):.1f}"),
        ]

    def _longest(self, records: Sequence[Record]) -> float:
        times = [self.begin, *(record.time for record in records), self.end]
        return max(later - earlier for earlier, later in pairwise(times))

    # Acknowledgements

    def _acknowledgements(self) -> list[Figure]:
        alone = _seconds(self._seen.alone)
        loaded = _seconds(self._loaded(self._seen.probe))
        filling = [each.seconds for each in self._seen.crowd if each.kind == "acknowledged" and each.what == "asample"]
        others = _seconds(self._loaded(self._seen.crowd))
        ratio = percentile(loaded, 0.99) / percentile(alone, 0.99)
        return [
            Figure("acknowledgement alone, ms: p50, p99", _milliseconds(alone)),
            Figure("the same client under load, ms: p50, p99", _milliseconds(loaded)),
            Figure("p99 under load, times alone", f"{ratio:.1f}", f"< {MOST_TIMES_IDLE:.0f}", ratio < MOST_TIMES_IDLE),
            Figure("of the other models under load, ms: p50, p99", _milliseconds(others)),
            Figure("while all samples are sent at once, ms: p50, p99", _milliseconds(filling)),
        ]

    # Fairness

    def _fairness(self) -> list[Figure]:
        steps = Counter(record.what for record in self._loaded(self._steps))
        amounts = [*steps.values(), *[0] * (self._models - len(steps))]
        half = Counter(record.owner for record in self._sampled[: len(self._sampled) // 2])
        idle: list[list[Record]] = [[]] * (self._models - len(steps))
        stall = max(map(self._longest, [*self._by_model().values(), *idle]))
        least = min(amounts) / max(amounts)
        return [
            _at_least("fairness among models (Jain)", jain(amounts), LEAST_FAIRNESS),
            _at_least("operations of the slowest model, times the fastest's", least, LEAST_SHARE_OF_FASTEST),
            Figure("operations of a model: least, most", f"{min(amounts)}, {max(amounts)}"),
            Figure(
                "longest time of a model between two results, s",
                f"{stall:.1f}",
                f"< {MOST_STALL_SECONDS:.0f}",
                stall < MOST_STALL_SECONDS,
            ),
            _at_least("fairness among keys when half of the samples are done (Jain)", jain(list(half.values())), 0.9),
        ]

    def _by_model(self) -> dict[str, list[Record]]:
        by_model = defaultdict(list)
        for record in self._loaded(self._steps):
            by_model[record.what].append(record)
        return by_model

    # Memory and the rest

    def _memory(self) -> list[Figure]:
        first, last = self._seen.looks[0][1], self._seen.looks[-1][1]
        most = {name: max(vitals[name] for _, vitals in self._seen.looks) for name in first}
        grown = most["worker: memory"] - first["worker: memory"]
        return [
            Figure(
                "memory of the API, MiB: idle, most, end",
                f"{first['API: memory']:.0f}, {most['API: memory']:.0f}, {last['API: memory']:.0f}",
                f"< {MOST_API_MIB:.0f}",
                most["API: memory"] < MOST_API_MIB,
            ),
            Figure(
                "memory of the worker, MiB: idle, most, end",
                f"{first['worker: memory']:.0f}, {most['worker: memory']:.0f}, {last['worker: memory']:.0f}",
                f"+ {MOST_WORKER_GROWTH_MIB:.0f}",
                grown < MOST_WORKER_GROWTH_MIB,
            ),
            *(Figure(f"{name}, most", f"{value:.0f}") for name, value in most.items() if "memory" not in name),
            *(Figure(f"{name} at the end", f"{value:,.0f}") for name, value in self._seen.state.items()),
        ]


def _seconds(records: Iterable[Record]) -> list[float]:
    return [record.seconds for record in records if record.kind == "acknowledged"]


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * percentile(seconds, 0.5):.1f}, {1000 * percentile(seconds, 0.99):.1f} (of {len(seconds):,})"


def _at_least(name: str, value: float, bound: float) -> Figure:
    return Figure(name, f"{value:.3f}", f">= {bound}", value >= bound)


def table(figures: Sequence[Figure]) -> str:
    return "\n".join(
        f"{each.name:62}{each.value:>28}  {each.bound:10}{'' if each.is_kept else 'BROKEN'}".rstrip()
        for each in figures
    )
