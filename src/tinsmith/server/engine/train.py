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
from tinsmith.server.engine.custom_graph import CustomLoss
from tinsmith.server.engine.head import score
from tinsmith.server.engine.losses import value_and_gradient
from tinsmith.server.engine.model import Transformer


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


def run_micro_batch(model: Transformer, batch: MicroBatch, *, recompute: bool) -> dict[int, RowOutput]:
    """Outputs by the index of the row; gradients are added to the adapters' buffers."""
    return _Pass(model, batch).run(recompute)


class _Pass:
    def __init__(self, model: Transformer, batch: MicroBatch) -> None:
        self.model = model
        self.batch = batch
        self.lora = batch.lora
        self.targets = batch.targets().to(model.device)
        self.placed = list(batch.placed())
        self.losses = dict.fromkeys((example.index for example in batch.examples), 0.0)
        self.metrics: dict[int, dict[str, float]] = {}

    def run(self, recompute: bool) -> dict[int, RowOutput]:
        tokens, positions = (part.to(self.model.device) for part in (self.batch.tokens(), self.batch.positions()))
        with torch.set_grad_enabled(self.batch.backward):
            hidden = self.model.hidden(tokens, positions, self.batch.attend, self.lora, recompute=recompute)
        with torch.no_grad():
            logprobs, dhidden = self._through_head(hidden.detach())
        # Without adapters below the head there is no way back to go.
        if hidden.requires_grad:
            hidden.backward(dhidden)
        return dict(self._outputs(logprobs.cpu()))

    def _through_head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [T, K] and, if there is a way back, the gradient of the hidden states."""
        logprobs = torch.empty(self.targets.shape, dtype=torch.float32, device=hidden.device)
        dhidden = torch.empty_like(hidden)
        for first, last, needs_whole_datum in self._runs():
            rows = slice(first, last)
            score_rows = partial(score, self.model, hidden[rows], self.targets[rows], self.lora.slice(first, last))
            if self.batch.backward and not needs_whole_datum:
                logprobs[rows], dhidden[rows] = score_rows(partial(self._gradient, first))
                continue
            logprobs[rows], _ = score_rows(None)
            gradient = self._gradient(first, 0, last - first, logprobs[rows])
            if self.batch.backward:
                _, dhidden[rows] = score_rows(partial(_part_of, gradient))
        return logprobs, dhidden

    def _runs(self) -> Iterator[tuple[int, int, bool]]:
        """Neighbouring examples that take the same number of passes through the head: first row, row after, which."""
        for needs_whole_datum, run in groupby(self.placed, key=lambda placed: placed[2].needs_whole_datum):
            members = list(run)
            yield members[0][0], members[-1][1], needs_whole_datum

    def _gradient(self, first: int, start: int, end: int, logprobs: Tensor) -> Tensor:
        """The gradient of the losses of rows first + start to first + end, whose sums are noted on the way."""
        logprobs = logprobs.to("cpu", torch.float64)
        gradient = torch.zeros_like(logprobs)
        start, end = first + start, first + end
        for begin, stop, example in self.placed:
            low, high = max(begin, start), min(stop, end)
            if low < high:
                part = slice(low - start, high - start), slice(example.targets.shape[1])
                gradient[part] = self._of_example(example, low - begin, high - begin, logprobs[part])
        return gradient

    def _of_example(self, example: Example, start: int, end: int, logprobs: Tensor) -> Tensor:
        try:
            if isinstance(example.loss, CustomLoss):
                shaped = logprobs.view(example.target_shape)
                value, self.metrics[example.index], gradient = example.loss.run(shaped, example.inputs)
                gradient = gradient.view(logprobs.shape)
            else:
                inputs = {name: values[start:end] for name, values in example.inputs.items()}
                value, gradient = value_and_gradient(example.loss, logprobs, inputs, example.config)
            _check_finite(value, gradient)
        except InvalidInputError as error:
            raise BadExampleError(example, error) from error
        self.losses[example.index] += value
        return gradient

    def _outputs(self, logprobs: Tensor) -> Iterator[tuple[int, RowOutput]]:
        for start, end, example in self.placed:
            own = logprobs[start:end, : example.targets.shape[1]].reshape(example.target_shape)
            index = example.index
            yield index, RowOutput(own.numpy().copy(), self.losses[index], self.metrics.get(index, {}))


def _part_of(gradient: Tensor, start: int, end: int, logprobs: Tensor) -> Tensor:
    return gradient[start:end]


def _check_finite(value: float, gradient: Tensor) -> None:
    if not (math.isfinite(value) and bool(gradient.isfinite().all())):
        raise InvalidInputError(
            f"The loss of a datum is {value}, or its gradient is not finite, so the datum was left out. Check that its "
            "logprobs are those of the target tokens, and its weights and advantages of moderate size; if the model "
            "itself has diverged, load an earlier checkpoint and lower the learning rate.",
            field="loss",
            value=value,
        )
