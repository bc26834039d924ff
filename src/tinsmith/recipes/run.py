"""A training run from the step where it stands to its end, or to where it is stopped."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.recipes import plan
from tinsmith.recipes.listener import Listener, Progress
from tinsmith.recipes.rendering import Sequence as TokenSequence
from tinsmith.recipes.run_folder import RunFolder, RunState
from tinsmith.recipes.settings import Settings
from tinsmith.recipes.steps import Done, Step, run_steps

if TYPE_CHECKING:
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.training import TrainingClient
    from tinsmith.recipes.sinks import Sink

PACE_STEPS = 10


@dataclass
class Run:
    """The part of a run that this process does: steps, records, saved states."""

    service: ServiceClient
    trainer: TrainingClient
    settings: Settings
    training: Sequence[TokenSequence]
    held_out: Sequence[TokenSequence]
    folder: RunFolder
    state: RunState
    sinks: Sequence[Sink]
    listener: Listener

    def __post_init__(self) -> None:
        size = self.settings.batch_size
        self._num_steps = self.settings.steps or plan.count_steps(len(self.training), size, self.settings.epochs)
        self._eval_every = self.settings.eval_every or plan.count_steps(len(self.training), size, 1)
        self._eval_loss: float | None = None

    def go(self) -> RunState:
        """Trains to the end, or until the listener stops it; gives how the run then stands."""
        self._check_warmup()
        for sink in self.sinks:
            sink.start(self.settings.name, self.state.run_id, self.state.settings)
        try:
            with self.listener.stops() as should_stop:
                last = self._train(should_stop)
                if last == self._num_steps:
                    self._save_for_sampling()
                else:
                    self._save_unless_saved(last)
        finally:
            if self.state.step and not self.state.is_finished:
                self.listener.tell(f"Step {self.state.step} is saved; the same command goes on from there.")
        return self.state

    def _check_warmup(self) -> None:
        if self.settings.warmup >= self._num_steps:
            raise InvalidInputError(
                f"warmup is {self.settings.warmup}; it must be less than the {self._num_steps} steps.", field="warmup"
            )

    def _train(self, should_stop: Callable[[], bool]) -> int:
        """Gives the last step that is done."""
        first = last = self.state.step
        started, pace = time.monotonic(), _Pace()
        for done in run_steps(self.trainer, self._steps(should_stop)):
            last = done.step.number
            num_tokens = sum(len(each.tokens) - 1 for each in done.step.batch)
            rate = pace.add(num_tokens)
            self._record(done, num_tokens, rate)
            if done.step.batch:
                left = (time.monotonic() - started) / (last - first) * (self._num_steps - last)
                self.listener.report(Progress(last, self._num_steps, done.loss, self._eval_loss, rate, left))
        return last

    def _steps(self, should_stop: Callable[[], bool]) -> Iterator[Step]:
        if self.state.step == 0 and self.held_out:
            yield Step(0, (), 0.0, self.held_out)
        for number in range(self.state.step + 1, self._num_steps + 1):
            if should_stop():
                return
            yield self._step(number)

    def _step(self, number: int) -> Step:
        settings, is_last = self.settings, number == self._num_steps
        indices = plan.batch(number, len(self.training), settings.batch_size, settings.seed, self._last_sequence)
        rate = plan.learning_rate(
            number, self._num_steps, peak=settings.learning_rate, schedule=settings.schedule, warmup=settings.warmup
        )
        evaluates = is_last or number % self._eval_every == 0
        saves = is_last or number % settings.save_every == 0
        return Step(
            number,
            [self.training[index] for index in indices],
            rate,
            self.held_out if evaluates else (),
            self._state_name(number) if saves else None,
        )

    @property
    def _last_sequence(self) -> int | None:
        """Where the last epoch ends, perhaps within a batch."""
        return None if self.settings.steps else len(self.training) * self.settings.epochs

    def _state_name(self, step: int) -> str:
        return f"{self.settings.name}-{step:06d}"

    def _record(self, done: Done, num_tokens: int, tokens_per_second: float) -> None:
        check_finite(done)
        step = done.step
        record: dict[str, Any] = {"step": step.number, "epoch": self._epoch(step.number)}
        if done.loss is not None:
            record |= {
                "loss": done.loss,
                "learning_rate": step.learning_rate,
                "tokens": num_tokens,
                "tokens_per_second": round(tokens_per_second, 1),
            }
        if done.eval_loss is not None:
            self._eval_loss = record["eval_loss"] = done.eval_loss
        record["time"] = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self.folder.add_metrics(record)
        for sink in self.sinks:
            sink.log(record)
        if done.state_path:
            self._saved(step.number, done.state_path)

    def _epoch(self, step: int) -> float:
        position = step * self.settings.batch_size
        end = self._last_sequence
        return round((position if end is None else min(position, end)) / len(self.training), 4)

    # Saving

    def _saved(self, step: int, path: str) -> None:
        """Only the latest state is kept, and the one before goes when the folder knows the new one."""
        before = self.state.state_path
        self.state = msgspec.structs.replace(self.state, step=step, state_path=path)
        self.folder.write(self.state)
        if before is not None and before != path:
            self._delete(before)

    def _delete(self, path: str) -> None:
        try:
            self.service.rest.delete_checkpoint_from_tinker_path(path).result()
        except TinkerError as error:
            self.listener.tell(f"The older state {path} could not be deleted: {error}")

    def _save_unless_saved(self, step: int) -> None:
        if step > self.state.step:
            self._saved(step, self.trainer.save_state(self._state_name(step)).result().path)

    def _save_for_sampling(self) -> None:
        saved = self.trainer.save_weights_for_sampler(self.settings.name).result()
        self.state = msgspec.structs.replace(self.state, sampler_path=saved.path)
        self.folder.write(self.state)


def check_finite(done: Done) -> None:
    for loss in (done.loss, done.eval_loss):
        if loss is not None and not math.isfinite(loss):
            raise InvalidInputError(
                f"The loss of step {done.step.number} is {loss}: training has gone astray. "
                "Begin anew with --restart and a lower --learning-rate.",
                field="learning_rate",
            )


class _Pace:
    """Tokens per second over the last steps. Of one alone it would jump: after an evaluation, results come at once."""

    def __init__(self) -> None:
        self._marks = deque([(time.monotonic(), 0)], maxlen=PACE_STEPS + 1)

    def add(self, num_tokens: int) -> float:
        self._marks.append((time.monotonic(), self._marks[-1][1] + num_tokens))
        (began, before), (now, total) = self._marks[0], self._marks[-1]
        return (total - before) / max(now - began, 1e-9)
