"""One micro-batch through the model, the head and the losses, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.batch import Example, MicroBatch
from tinsmith.server.engine.batch_losses import BatchLosses, PlacedExample
from tinsmith.server.engine.custom_graph import CustomLoss
from tinsmith.server.engine.head import Gradient, score
from tinsmith.server.engine.losses import terms_and_gradient
from tinsmith.server.engine.model import Transformer
from tinsmith.server.engine.transfer import download, upload


@dataclass(frozen=True, eq=False)
class RowOutput:
    """What one row gave, or why it was refused."""

    logprobs: NDArray[np.float32] | None = None
    """Shaped as its `target_tokens`."""
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of a custom loss; the ending of a name says how those of several rows are combined."""
    error: InvalidInputError | None = None


class BadExampleError(Exception):
    """An example that passed the checks turned out to be impossible: it must go, and the others run again."""

    def __init__(self, example: Example, error: InvalidInputError) -> None:
        super().__init__(error.message)
        self.example = example
        self.error = error


def run_micro_batch(model: Transformer, batch: MicroBatch, *, recompute: bool) -> Pass:
    """Start a pass: gradients are added to the adapters' buffers, and `outputs` says what came of it.

    They may be asked for after `wait_for` the device.
    """
    started = Pass(model, batch)
    started.run(recompute)
    return started


class Pass:
    """One micro-batch; on a GPU the host goes on while it is computed."""

    targets: Tensor
    logprobs: Tensor
    losses: BatchLosses

    def __init__(self, model: Transformer, batch: MicroBatch) -> None:
        self.model = model
        self.batch = batch
        self.lora = batch.lora
        self.placed = list(batch.placed())
        self.values: dict[int, float] = {}
        self.metrics: dict[int, dict[str, float]] = {}

    def run(self, recompute: bool) -> None:
        tokens, positions = (upload(part, self.model.device) for part in (self.batch.tokens(), self.batch.positions()))
        with torch.set_grad_enabled(self.batch.backward):
            hidden = self.model.hidden(tokens, positions, self.batch.attend, self.lora, recompute=recompute)
        self._prepare_head()
        with torch.no_grad():
            dhidden = self._through_head(hidden.detach())
        # Without adapters below the head there is no way back to go.
        if hidden.requires_grad:
            hidden.backward(dhidden)
        self.logprobs = download(self.logprobs)
        self.losses.fetch()

    def _prepare_head(self) -> None:
        """Not before the layers were asked for: a GPU is busy with them meanwhile."""
        device = self.model.device
        self.targets = upload(self.batch.targets(), device)
        self.logprobs = torch.empty(self.targets.shape, dtype=torch.float32, device=device)
        self.losses = BatchLosses(self._placed(needs_whole_datum=False), self.targets.shape, device)

    def outputs(self) -> dict[int, RowOutput]:
        """By the index of the row."""
        for example, value, is_finite in self.losses.values(self._placed(needs_whole_datum=False)):
            self._note(example, value, is_finite)
        return dict(self._outputs())

    def _through_head(self, hidden: Tensor) -> Tensor:
        """The gradient of the hidden states, if there is a way back; the log-probabilities are noted on the way."""
        dhidden = torch.empty_like(hidden)
        for first, last, needs_whole_datum in self._runs():
            rows = slice(first, last)
            score_rows = partial(score, self.model, hidden[rows], self.targets[rows], self.lora.slice(first, last))
            if self.batch.backward and not needs_whole_datum:
                gradient = partial(_of_rows, self.losses.gradient, first)
                self.logprobs[rows], dhidden[rows] = score_rows(gradient)
                continue
            self.logprobs[rows], _ = score_rows(None)
            compute = self._gradient if needs_whole_datum else self.losses.gradient
            whole = compute(first, last, self.logprobs[rows])
            if self.batch.backward:
                _, dhidden[rows] = score_rows(partial(_part_of, whole))
        return dhidden

    def _runs(self) -> Iterator[tuple[int, int, bool]]:
        """Neighbouring examples that take the same number of passes through the head: first row, row after, which."""
        for needs_whole_datum, run in groupby(self.placed, key=lambda placed: placed[2].needs_whole_datum):
            members = list(run)
            yield members[0][0], members[-1][1], needs_whole_datum

    def _placed(self, *, needs_whole_datum: bool) -> Iterator[PlacedExample]:
        return (placed for placed in self.placed if placed[2].needs_whole_datum == needs_whole_datum)

    def _gradient(self, start: int, end: int, logprobs: Tensor) -> Tensor:
        """The gradient of the losses of rows start to end, which need the whole datum; on the host."""
        logprobs = logprobs.to("cpu", torch.float64)
        gradient = torch.zeros_like(logprobs)
        for begin, stop, example in self._placed(needs_whole_datum=True):
            if start <= begin < end:
                part = slice(begin - start, stop - start), slice(example.targets.shape[1])
                gradient[part] = self._of_example(example, logprobs[part])
        return gradient

    def _of_example(self, example: Example, logprobs: Tensor) -> Tensor:
        try:
            if isinstance(example.loss, CustomLoss):
                shaped = logprobs.view(example.target_shape)
                value, self.metrics[example.index], gradient = example.loss.run(shaped, example.inputs)
                gradient = gradient.view(logprobs.shape)
            else:
                terms, gradient = terms_and_gradient(example.loss, logprobs, example.inputs, example.config)
                value = float(terms.sum())
        except InvalidInputError as error:
            raise BadExampleError(example, error) from error
        self._note(example, value, bool(gradient.isfinite().all()))
        return gradient

    def _note(self, example: Example, value: float, is_finite: bool) -> None:
        if not (is_finite and math.isfinite(value)):
            raise BadExampleError(example, _not_finite(value))
        self.values[example.index] = value

    def _outputs(self) -> Iterator[tuple[int, RowOutput]]:
        logprobs = self.logprobs.numpy()
        for start, end, example in self.placed:
            own = logprobs[start:end, : example.targets.shape[1]].reshape(example.target_shape)
            index = example.index
            yield index, RowOutput(own.copy(), self.values[index], self.metrics.get(index, {}))


def _of_rows(gradient: Gradient, first: int, start: int, end: int, logprobs: Tensor) -> Tensor:
    """A part of a run of rows, as a part of the batch."""
    return gradient(first + start, first + end, logprobs)


def _part_of(gradient: Tensor, start: int, end: int, logprobs: Tensor) -> Tensor:
    return gradient[start:end]


def _not_finite(value: float) -> InvalidInputError:
    return InvalidInputError(
        f"The loss of a datum is {value}, or its gradient is not finite, so the datum was left out. Check that its "
        "logprobs are those of the target tokens, and its weights and advantages of moderate size; if the model "
        "itself has diverged, load an earlier checkpoint and lower the learning rate.",
        field="loss",
        value=value,
    )
