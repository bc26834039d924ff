"""Which training jobs run next: a pure function from what waits to the next batch.

A model's jobs run in the order of their numbers. `forward_backward` jobs of one model in a row only add up, so they may
run together, and together with those of other models. Everything else (an optimizer step, a load, a save) is a barrier
for its own model: it runs alone, after all that came before it. Owners are served in turn by what they have had so far,
then models by the same rule, then the oldest job.

The barriers that end a step pass this line: whoever was just served is last in it, so that with many owners each step
would wait for all others three times, for its data, its optimizer step and its new weights, of which only the data take
time. They are counted, so that nobody can keep others waiting with barriers alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import NamedTuple

BATCHED_KIND = "forward_backward"
REMEMBERED = 0.9
"""What was served counts less with every later turn: a long night alone must not cost the whole next day."""
NEGLIGIBLE = 1e-6
REMEMBERED_SECONDS = 5.0
"""How long it counts which kind of work had the engine: so long at most one kind may have it after a time without."""
BARRIERS_OF_A_STEP = 2
"""An optimizer step, and the new weights for a sampler."""
MAX_BEGUN = 1024
"""Models whose steps are known to be begun; of more, those that began first have to wait in the line."""


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
    to_finish: Mapping[str, int] = MappingProxyType({})
    """How many barriers of a model may pass the line, as part of the step that its data have begun."""


def schedule(jobs: Iterable[TrainingJob], served: Served, token_budget: int) -> tuple[TrainingJob, ...]:
    """The next batch: one barrier, or data jobs of any models within the token budget (at least one)."""
    fronts = [_front(queue) for queue in _queues(jobs).values()]
    fronts.sort(key=lambda front: _rank(front[0], served))
    if not fronts:
        return ()
    if fronts[0][0].is_barrier:
        return (fronts[0][0],)
    return _fill([front for front in fronts if not front[0].is_barrier], token_budget)


def note_served(served: dict[str, float], amounts: Iterable[tuple[str, float]]) -> None:
    """Adds to what each name was served lately, after forgetting a little of what it was served before."""
    for name, amount in list(served.items()):
        served[name] = amount * REMEMBERED
        if served[name] < NEGLIGIBLE:
            del served[name]
    for name, amount in amounts:
        served[name] = served.get(name, 0.0) + amount


def note_spent(spent: dict[str, float], kind: str, seconds: float) -> None:
    """Adds to the time that a kind of work had lately. What was before fades with time, not with turns.

    Else the long turns of one kind would be forgotten after a few short ones of the other.
    """
    for name in spent:
        spent[name] *= math.exp(-seconds / REMEMBERED_SECONDS)
    spent[kind] = spent.get(kind, 0.0) + seconds


def note_begun(to_finish: dict[str, int], batch: Sequence[TrainingJob]) -> None:
    """Data pay for the barriers that follow them, whatever of that is left from earlier data."""
    for job in batch:
        left = to_finish.pop(job.model_id, 0) - 1 if job.is_barrier else BARRIERS_OF_A_STEP
        if left > 0:
            to_finish[job.model_id] = left
    for model_id in list(to_finish)[: max(0, len(to_finish) - MAX_BEGUN)]:
        del to_finish[model_id]


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


def _rank(job: TrainingJob, served: Served) -> tuple[bool, float, float, float]:
    finishes = job.is_barrier and served.to_finish.get(job.model_id, 0) > 0
    return not finishes, served.by_owner.get(job.owner, 0.0), served.by_model.get(job.model_id, 0.0), job.created


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
