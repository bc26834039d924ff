"""The page of metrics, for Prometheus: what the API process counts, what the workers have told, what the store knows.

No label holds what a client can choose, nor an id: there is an end to how many series there are.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Counted
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.server.messages import Figure
from tinsmith.server.reasons import LIMITS
from tinsmith.server.recent import Latest
from tinsmith.server.routes._call import Endpoint, Services
from tinsmith.server.store import StoreUnavailableError
from tinsmith.server.store.records import QueueDepth
from tinsmith.server.worker_metrics import KINDS, REFUSALS, families
from tinsmith.types import UntypedAPIFuture

UNKNOWN_ROUTE = "unknown"

_TOGETHER_SECONDS = 0.1
"""Who asks for the page within this time gets the same one."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._registry = CollectorRegistry()
        self._requests = Counted(
            "tinsmith_requests", "Requests.", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "tinsmith_request_seconds", "Time until the answer.", ["route"], buckets=_SECONDS, registry=self._registry
        )
        self._submissions = Histogram(
            "tinsmith_submission_seconds",
            "Time until a submission was acknowledged.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._database_errors = Counted(
            "tinsmith_database_errors",
            "Requests that met a database out of reach or full.",
            registry=self._registry,
        )
        waiting = Gauge("tinsmith_waiting", "Open long polls.", registry=self._registry)
        waiting.set_function(lambda: len(services.waiting))
        disk = Gauge("tinsmith_disk_free_bytes", "Room on the disk of the state folder.", registry=self._registry)
        disk.set_function(lambda: shutil.disk_usage(services.config.state).free)
        self._registry.register(self)
        self._written = Latest(self._write)

    def count(self, endpoint: Endpoint, status: int, seconds: float) -> None:
        self._requests.labels(endpoint.method, endpoint.path, str(status)).inc()
        self._seconds.labels(endpoint.path).observe(seconds)
        if endpoint.gives is UntypedAPIFuture and status == 200:
            self._submissions.observe(seconds)

    def count_unknown(self, status: int) -> None:
        """A request for which there is no route, of whatever method."""
        self._requests.labels(UNKNOWN_ROUTE, UNKNOWN_ROUTE, str(status)).inc()

    def count_database_error(self) -> None:
        self._database_errors.inc()

    async def page(self, request: Request) -> Response:
        """Written for all who ask together, one after the other: it takes no key, and counts all that waits."""
        return Response(await self._written.get(), media_type=CONTENT_TYPE_LATEST)

    async def _write(self) -> bytes:
        await asyncio.sleep(_TOGETHER_SECONDS)
        return await asyncio.to_thread(generate_latest, self._registry)

    # What is looked up when somebody asks

    def collect(self) -> Iterable[Metric]:
        yield self._ready()
        yield from self._workers()
        yield self._refusals()
        try:
            depths, kept = self._services.store.jobs.depths(), self._services.store.models.kept()
        except StoreUnavailableError:
            self.count_database_error()
            depths, kept = [], {}
        yield from _queue(depths)
        yield from families({name: self._of_workers(name, kept.get(name)) for name in self._services.models})

    def _ready(self) -> Metric:
        ready = GaugeMetricFamily("tinsmith_ready", "Whether a base model is loaded.", labels=["base_model"])
        for name in self._services.models:
            ready.add_metric([name], self._services.workers.is_ready(name))
        return ready

    def _workers(self) -> Iterable[Metric]:
        labels = ["base_model", "worker", "kind", "node"]
        ready = GaugeMetricFamily("tinsmith_worker_ready", "Whether a worker has loaded its model.", labels=labels)
        samples = GaugeMetricFamily(
            "tinsmith_worker_samples",
            "Samples that a replica was given and that are not done.",
            labels=["base_model", "worker"],
        )
        for name in self._services.models:
            for state in self._services.workers.states(name):
                kind = KINDS.get(state.role, state.role)
                ready.add_metric([name, state.name, kind, state.where], state.is_ready)
                if state.samples is not None:
                    samples.add_metric([name, state.name], state.samples)
        yield ready
        yield samples

    def _refusals(self) -> Metric:
        refusals = CounterMetricFamily(
            "tinsmith_quota_refusals", "What was refused because of a limit.", labels=["limit"]
        )
        counts = Counter(dict(self._services.refusals))  # others may be added meanwhile
        for name in self._services.models:
            for figure in self._services.workers.figures(name):
                if figure.name == REFUSALS:
                    counts[figure.labels["limit"]] += int(figure.value)
        for limit in LIMITS:
            refusals.add_metric([limit], counts[limit])
        return refusals

    def _of_workers(self, base_model: str, kept: int | None) -> Sequence[Figure]:
        """The worker knows which models are in memory; how many there are is in the store."""
        figures = list(self._services.workers.figures(base_model))
        if kept is not None:
            in_memory = sum(one.value for one in figures if one.place == ("tinsmith_models", "memory"))
            figures.append(Figure("tinsmith_models", {"place": "disk"}, max(0.0, kept - in_memory)))
        return figures


def _queue(depths: Sequence[QueueDepth]) -> Iterable[Metric]:
    jobs = GaugeMetricFamily(
        "tinsmith_jobs", "Jobs that wait or run.", labels=["base_model", "kind", "operation", "state"]
    )
    ages: defaultdict[tuple[str, str], float] = defaultdict(float)
    now = datetime.now(UTC)
    for depth in depths:
        kind = KINDS["sample" if depth.kind == "sample" else "train"]
        jobs.add_metric([depth.base_model, kind, depth.kind, depth.state], depth.count)
        if depth.state == "queued":
            age = (now - depth.oldest).total_seconds()
            ages[depth.base_model, kind] = max(ages[depth.base_model, kind], age)
    yield jobs
    oldest = GaugeMetricFamily(
        "tinsmith_oldest_job_seconds",
        "How long the oldest job has waited that still does.",
        labels=["base_model", "kind"],
    )
    for place, age in ages.items():
        oldest.add_metric(place, age)
    yield oldest
