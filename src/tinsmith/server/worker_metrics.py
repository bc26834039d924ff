"""What a worker counts, and how that reaches the page of metrics, which is in another process.

A worker counts from its own start. It tells its figures once a second at most, and only those that have changed; the
API process adds them to what the workers before it had told, so that no counter goes back when one dies. What a worker
that was killed had counted in its last second is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from tinsmith.server.messages import Figure, Role
from tinsmith.server.reasons import LIMITS
from tinsmith.server.store.records import Failed, Job, JobKind, Outcome

if TYPE_CHECKING:
    from tinsmith.server.engine.engine import EngineUsage

TELL_SECONDS = 1.0
KINDS = {"train": "training", "sample": "sampling"}
"""What a lane is called where people read it."""

REFUSALS = "tinsmith_quota_refusals_total"
"""What is over a limit shows in a worker or before it comes to one."""

_Figures: TypeAlias = dict[tuple[str, ...], Figure]
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class WorkerMetrics:
    """All that one worker process counts. `tell` gets what has changed; `engine` is what was counted before."""

    def __init__(
        self, tell: Callable[[Sequence[Figure]], None] = lambda figures: None, engine: EngineUsage | None = None
    ) -> None:
        self._tell = tell
        self._told: dict[tuple[str, ...], float] = {}
        self._tell_again = 0.0
        self._engine = engine
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tinsmith_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tinsmith_{name}", text, labels, registry=registry)

        self._waits = Histogram(
            "tinsmith_wait_seconds",
            "From the acknowledgement of a job to its start.",
            ["kind"],
            buckets=_WAITS,
            registry=registry,
        )
        self._finished = counter("jobs_finished", "Jobs that have an outcome.", "operation", "outcome")
        self._given_up = counter("jobs_given_up", "Jobs that killed their worker too often.")
        self._work = counter("work_seconds", "Time that the worker was busy.", "operation")
        self._batches = counter("training_batches", "Micro-batches of training.")
        self._rows = counter("training_rows", "Examples in them.")
        self._tokens = counter("training_tokens", "Tokens in them.")
        self._budget = gauge("training_batch_tokens", "Tokens that a micro-batch may hold.")
        self._prompts = counter("prompt_tokens", "Tokens of prompts: computed, or found in the cache.", "source")
        self._sampled = counter("sampled_tokens", "Tokens drawn.")
        self._steps = counter("decode_steps", "Steps of sampling, each a token for every sample under way.")
        self._decoded = counter("decoded_samples", "Samples in those steps, counted anew in each.")
        self._kv_blocks = gauge("kv_blocks", "Blocks of the sampler's cache.", "state")
        self._models = gauge("models", "Models in training.", "place")
        self._replays = counter("replays", "Models that were built again.")
        self._replayed = counter("replayed_operations", "Operations that were done once more for that.")
        self._replay_seconds = counter("replay_seconds", "Time that took.")
        self._snapshots = counter("snapshots", "Snapshots of models.", "outcome")
        self._snapshot_bytes = counter("snapshot_bytes", "Bytes in them.")
        self._snapshot_seconds = counter("snapshot_seconds", "Time that writing them took.")
        counter("worker_restarts", "How often a worker was started anew.")  # counted by who starts them
        self._held_up = counter("held_up", "How often all work stopped until there was a remedy.", "cause")
        self._refusals = counter("quota_refusals", "What was refused because of a limit.", "limit")
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """A rate over a counter that appears with its first event does not show that event."""
        for kind in KINDS.values():
            self._waits.labels(kind)
        for operation, word in product(get_args(JobKind), ("done", "failed", "cancelled")):
            self._work.labels(operation)
            self._finished.labels(operation, word)
        for outcome in ("written", "failed"):
            self._snapshots.labels(outcome)
        for cause in ("disk", "database"):
            self._held_up.labels(cause)

    # Counting

    def begun(self, jobs: Iterable[Job]) -> None:
        """Jobs are about to be run. What is run a second time has waited for other reasons."""
        now = datetime.now(UTC)
        for job in jobs:
            if not job.attempts:
                self._waits.labels(KINDS[job.lane]).observe(max(0.0, (now - job.created).total_seconds()))

    def finished(self, operation: str, outcome: Outcome) -> None:
        self._finished.labels(operation, _word(outcome)).inc()
        if isinstance(outcome, Failed) and outcome.reason in LIMITS:
            self._refusals.labels(outcome.reason).inc()

    def worked(self, operation: str, seconds: float) -> None:
        self._work.labels(operation).inc(seconds)

    def gave_up(self, count: int) -> None:
        self._given_up.inc(count)

    def was_held_up(self, cause: str) -> None:
        self._held_up.labels(cause).inc()
        self.tell()

    def replaying(self, is_replaying: bool) -> None:
        """Told at once, because a replay may take long and nothing else is told meanwhile."""
        self._models.labels("replayed").set(is_replaying)
        self.tell()

    def replayed(self, operations: int, seconds: float) -> None:
        if operations:  # else the model was as its snapshot is, and was only read
            self._replays.inc()
            self._replayed.inc(operations)
            self._replay_seconds.inc(seconds)

    def wrote_snapshot(self, size_bytes: int, seconds: float) -> None:
        self._snapshots.labels("written").inc()
        self._snapshot_bytes.inc(size_bytes)
        self._snapshot_seconds.inc(seconds)

    def could_not_write_snapshot(self) -> None:
        self._snapshots.labels("failed").inc()

    def look(self, models_in_memory: int, engine: EngineUsage) -> None:
        """Take over what is counted elsewhere."""
        before, self._engine = self._engine, engine
        self._models.labels("memory").set(models_in_memory)
        self._budget.set(engine.token_budget)
        self._kv_blocks.labels("used").set(engine.kv_blocks_used)
        self._kv_blocks.labels("free").set(engine.kv_blocks - engine.kv_blocks_used)
        for counter, name in (
            (self._batches, "micro_batches"),
            (self._rows, "trained_rows"),
            (self._tokens, "trained_tokens"),
            (self._prompts.labels("computed"), "computed_prompt_tokens"),
            (self._prompts.labels("cache"), "found_prompt_tokens"),
            (self._sampled, "sampled_tokens"),
            (self._steps, "decode_steps"),
            (self._decoded, "decoded_samples"),
        ):
            counter.inc(getattr(engine, name) - getattr(before, name, 0))

    # Telling

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._tell_again

    def tell(self) -> None:
        self._tell_again = time.monotonic() + TELL_SECONDS
        changed = [figure for figure in self._figures() if self._told.get(figure.place) != figure.value]
        if changed:
            self._told.update((figure.place, figure.value) for figure in changed)
            self._tell(changed)

    def _figures(self) -> Iterable[Figure]:
        for family in self.registry.collect():
            for sample in family.samples:
                yield Figure(sample.name, sample.labels, sample.value)


def _word(outcome: Outcome) -> str:
    """`done`, `failed` or `cancelled`."""
    return type(outcome).__name__.lower()


class Told:
    """What the workers of one base model have told so far, one after the other. It may be read from another thread."""

    def __init__(self) -> None:
        self._lives: tuple[_Figures, _Figures] = {}, {}
        """What the workers before had told, and what this one has: one value, so that nobody sees half a change."""

    def hear(self, figures: Iterable[Figure]) -> None:
        past, now = self._lives
        self._lives = past, now | {figure.place: figure for figure in figures}

    def add(self, name: str, more: float = 1.0) -> None:
        """Count what happened to a worker, which cannot tell."""
        past, now = self._lives
        before = past[name,].value if (name,) in past else 0.0
        self._lives = past | {(name,): Figure(name, {}, before + more)}, now

    def begin_anew(self) -> None:
        """Another worker counts from zero; of the last one, what it had is gone, and what it did stays."""
        self._lives = {figure.place: figure for figure in self.figures() if figure.name not in _LEVELS}, {}

    def figures(self) -> list[Figure]:
        past, now = self._lives
        return [
            Figure(one.name, one.labels, sum(told[place].value for told in (past, now) if place in told))
            for place, one in (past | now).items()
        ]


_FAMILIES = [family for family in WorkerMetrics().registry.collect() if family.name != "tinsmith_quota_refusals"]
_LEVELS = {family.name for family in _FAMILIES if family.type == "gauge"}


class WorkerState(NamedTuple):
    """One of the workers of a base model, for those who watch."""

    name: str
    role: Role
    where: str
    process: int
    """The machine that it is on, and its process there; empty if it is one of this server's own."""
    is_ready: bool
    problem: str | None
    samples: int | None
    """Samples that it was given and that are not done; `None` if it is not chosen for them."""
    held_up: str | None = None
    """What it waits for."""
    is_leaving: bool = False
    """It gets no more samples, and ends when it has drawn those that it has begun."""


def added_up(trainer: Iterable[Figure], replicas: Iterable[Iterable[Figure]]) -> list[Figure]:
    """What the workers of one base model have told, in one. How large batches may be, only the trainer knows."""
    total: _Figures = {figure.place: figure for figure in trainer}
    for figures in replicas:
        for figure in figures:
            if figure.name != "tinsmith_training_batch_tokens":
                before = total[figure.place].value if figure.place in total else 0.0
                total[figure.place] = Figure(figure.name, figure.labels, before + figure.value)
    return list(total.values())


class Worked(NamedTuple):
    """What workers did, and how long they were busy with it."""

    seconds: float
    jobs: float


def worked(figures: Iterable[Figure]) -> Worked:
    seconds = jobs = 0.0
    for figure in figures:
        if figure.name == "tinsmith_work_seconds_total":
            seconds += figure.value
        elif figure.name == "tinsmith_jobs_finished_total":
            jobs += figure.value
    return Worked(seconds, jobs)


def families(figures: Mapping[str, Iterable[Figure]]) -> Iterable[Metric]:
    """Figures by base model, as Prometheus has them; without refusals, which the API process counts too."""
    metrics = [Metric(family.name, family.documentation, family.type) for family in _FAMILIES]
    endings = ("", "_total", "_bucket", "_sum", "_count")
    by_sample = {f"{metric.name}{ending}": metric for metric in metrics for ending in endings}
    for base_model, those in figures.items():
        for figure in those:
            if figure.name == REFUSALS:
                continue
            labels = {"base_model": base_model, **figure.labels}
            by_sample[figure.name].add_sample(figure.name, labels, figure.value)
    return metrics
