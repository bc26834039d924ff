"""What of an operation is kept for people to look at: points of curves, and some of the samples."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.train import RowOutput
from tinsmith.server.messages import SampleJob
from tinsmith.server.store.records import Job, Sampled, ShownCompletion, Stepped, TrainedOn
from tinsmith.types import (
    AdamParams,
    OptimStepRequest,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
)
from tinsmith.wire import json

SAMPLES_PER_SECOND = 20
OF_ONE_OWNER = 5
"""Nobody reads more in that time, and to write them down must cost nothing to speak of."""
LONGEST = 5000
"""Tokens of a prompt, and of a completion."""
COMPLETIONS = 4

# --- training --------------------------------------------------------------------------------------------------------


def trained_on(rows: Sequence[TrainRow], outputs: Sequence[RowOutput]) -> TrainedOn:
    return TrainedOn(
        loss=sum(output.loss for output in outputs),
        weight=sum(map(_weight, rows)),
        tokens=sum(len(row.tokens) for row in rows),
    )


def _weight(row: TrainRow) -> float:
    """What the loss of a datum is divided by, to make losses of different batches comparable.

    That is its targets, as far as they count: by their weights, or if they have an advantage. What a custom loss means
    is its author's to know: it is averaged over the data.
    """
    if "weights" in row.inputs:
        return float(np.abs(row.inputs["weights"]).sum())
    if "advantages" in row.inputs:
        return float(np.count_nonzero(row.inputs["advantages"]))
    return 1.0


def stepped(job: Job, response: OptimStepResponse) -> Stepped:
    params = json.decode(OptimStepRequest, job.payload).optim_params
    assert isinstance(params, AdamParams)  # else there would be no response
    return Stepped(metrics={"learning_rate": params.learning_rate, **(response.metrics or {})})


# --- sampling --------------------------------------------------------------------------------------------------------


class ShownSamples:
    """Chooses the samples that are shown: the first ones of every second."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._second = 0
        self._chosen: Counter[str] = Counter()

    def of(self, job: Job, response: SampleResponse) -> Sampled | None:
        """`None` for one too many, and for what was asked for its log-probabilities alone."""
        if not self._has_room(job.owner):
            return None
        request = json.decode(SampleJob, job.payload)
        if request.prompt_logprobs and request.sampling_params.max_tokens == 1:
            return None
        self._chosen[job.owner] += 1
        return Sampled(
            owner=job.owner,
            base_model=job.base_model,
            prompt=request.prompt.to_ints()[:LONGEST],
            completions=[*map(_completion, response.sequences[:COMPLETIONS])],
            reward=request.reward,
        )

    def _has_room(self, owner: str) -> bool:
        if int(self._now()) != self._second:
            self._second = int(self._now())
            self._chosen.clear()
        return self._chosen[owner] < OF_ONE_OWNER and self._chosen.total() < SAMPLES_PER_SECOND


def _completion(sequence: SampledSequence) -> ShownCompletion:
    return ShownCompletion(tokens=list(sequence.tokens[:LONGEST]), stop_reason=sequence.stop_reason)
