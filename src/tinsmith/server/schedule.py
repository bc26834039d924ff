"""Which training jobs run next: a pure function from what waits to the next batch.

A model's jobs run in the order of their numbers. `forward_backward` jobs of one model in a row only add up, so they may
run together, and together with those of other models. Everything else (an optimizer step, a load, a save) is a barrier
for its own model: it runs alone, after all that came before it. Owners are served in turn by what they have had so far,
then models by the same rule, then the oldest job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

BATCHED_KIND = "forward_backward"


class TrainingJob(NamedTuple):
    request_id: str
    kind: str
    owner: str
    model_id: str
    seq_id: int
    tokens: int
    created: float

    @property
    def is_barrier(self) -> bool:
        return self.kind != BATCHED_KIND


class Served(NamedTuple):
    """What was done so far, in tokens; whoever had the least is next."""

    by_owner: Mapping[str, float]
    by_model: Mapping[str, float]


def schedule(jobs: Iterable[TrainingJob], served: Served, token_budget: int) -> tuple[TrainingJob, ...]:
    """The next batch: one barrier, or data jobs of any models within the token budget (at least one)."""
    fronts = [_front(queue) for queue in _queues(jobs).values()]
    fronts.sort(key=lambda front: _rank(front[0], served))
    if not fronts:
        return ()
    if fronts[0][0].is_barrier:
        return (fronts[0][0],)
    return _fill([front for front in fronts if not front[0].is_barrier], token_budget)


def _queues(jobs: Iterable[TrainingJob]) -> Mapping[str, list[TrainingJob]]:
    queues: dict[str, list[TrainingJob]] = defaultdict(list)
    for job in jobs:
        queues[job.model_id].append(job)
    for queue in queues.values():
        queue.sort(key=lambda job: job.seq_id)
    return queues


def _front(queue: Sequence[TrainingJob]) -> list[TrainingJob]:
    """What of a model may run now: its first job, or its data jobs up to the next barrier."""
    if queue[0].is_barrier:
        return [queue[0]]
    return list(takewhile(lambda job: not job.is_barrier, queue))


def _rank(job: TrainingJob, served: Served) -> tuple[float, float, float]:
    return served.by_owner.get(job.owner, 0.0), served.by_model.get(job.model_id, 0.0), job.created


def _fill(fronts: Sequence[Sequence[TrainingJob]], token_budget: int) -> tuple[TrainingJob, ...]:
    """One job of each model, then the next of each, so that a small job shares a batch with a long queue."""
    batch: list[TrainingJob] = []
    tokens = 0
    for depth in range(max(map(len, fronts))):
        for front in fronts:
            if depth >= len(front):
                continue
            job = front[depth]
            if batch and tokens + job.tokens > token_budget:
                return tuple(batch)
            batch.append(job)
            tokens += job.tokens
    return tuple(batch)
