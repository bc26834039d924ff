"""Sends training steps to the server so that it always has the next one before the last one is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tinsmith.recipes.rendering import Sequence as TokenSequence
from tinsmith.types import AdamParams

if TYPE_CHECKING:
    from tinsmith.client.futures import APIFuture
    from tinsmith.client.training import TrainingClient
    from tinsmith.types import ForwardBackwardOutput, OptimStepResponse, SaveWeightsResponse

STEPS_AHEAD = 1
"""Besides the one that runs. One is enough to keep the server busy; all of them are finished before a run is left."""


class Step(NamedTuple):
    number: int
    batch: Sequence[TokenSequence]
    """Empty for a measurement before the first step."""
    learning_rate: float
    held_out: Sequence[TokenSequence] = ()
    """Evaluated after the step."""
    save_as: str | None = None


class Done(NamedTuple):
    step: Step
    loss: float | None
    """Per token of the answers, before the step changed the weights."""
    eval_loss: float | None
    state_path: str | None


class _Sent(NamedTuple):
    step: Step
    forward_backward: APIFuture[ForwardBackwardOutput] | None
    optim_step: APIFuture[OptimStepResponse] | None
    evaluation: APIFuture[ForwardBackwardOutput] | None
    save: APIFuture[SaveWeightsResponse] | None


def run_steps(trainer: TrainingClient, steps: Iterable[Step]) -> Iterator[Done]:
    """What became of each step, in their order. What was sent is finished when `steps` ends early."""
    sent: deque[_Sent] = deque()
    for step in steps:
        sent.append(_send(trainer, step))
        if len(sent) > STEPS_AHEAD:
            yield _finish(sent.popleft())
    yield from map(_finish, sent)


def _send(trainer: TrainingClient, step: Step) -> _Sent:
    forward_backward = optim_step = evaluation = save = None
    if step.batch:
        forward_backward = trainer.forward_backward([each.datum() for each in step.batch], "cross_entropy")
        optim_step = trainer.optim_step(AdamParams(learning_rate=step.learning_rate))
    if step.held_out:
        evaluation = trainer.forward([each.datum() for each in step.held_out], "cross_entropy")
    if step.save_as:
        save = trainer.save_state(step.save_as)
    return _Sent(step, forward_backward, optim_step, evaluation, save)


def _finish(sent: _Sent) -> Done:
    loss = _loss_per_token(sent.forward_backward, sent.step.batch)
    if sent.optim_step is not None:
        sent.optim_step.result()
    eval_loss = _loss_per_token(sent.evaluation, sent.step.held_out)
    return Done(sent.step, loss, eval_loss, sent.save.result().path if sent.save else None)


def _loss_per_token(
    future: APIFuture[ForwardBackwardOutput] | None, sequences: Sequence[TokenSequence]
) -> float | None:
    if future is None:
        return None
    return float(future.result().metrics["loss:sum"]) / sum(each.num_answer_tokens for each in sequences)
