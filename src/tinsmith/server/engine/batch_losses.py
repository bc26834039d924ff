"""The losses of a micro-batch whose terms depend on one target each: many examples at once, where the numbers are.

Neighbours with the same loss, settings and inputs are one computation. On a GPU nothing waits for its outcome: it is
fetched when the whole batch is through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from tinsmith.server.engine.batch import Example
from tinsmith.server.engine.custom_graph import CustomLoss
from tinsmith.server.engine.losses import Config, Inputs, Loss, terms_and_gradient
from tinsmith.server.engine.transfer import download, upload

PlacedExample = tuple[int, int, Example]


@dataclass(frozen=True, eq=False)
class _Run:
    """Rows first to last have the same loss, with inputs [rows, width]."""

    first: int
    last: int
    width: int
    loss: Loss
    config: Config
    inputs: Inputs


class BatchLosses:
    def __init__(self, placed: Iterable[PlacedExample], shape: torch.Size, device: torch.device) -> None:
        # Float64 is what an exponential of a difference deserves, and not every kind of GPU has it.
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._runs = [_run(list(examples), self._device) for _, examples in groupby(placed, key=_kind)]
        self._terms = torch.zeros(shape, dtype=torch.float64, device=self._device)
        self._is_finite = torch.ones(shape[0], dtype=torch.bool, device=self._device)

    def gradient(self, start: int, end: int, logprobs: Tensor) -> Tensor:
        """That of the losses of rows start to end with respect to their log-probabilities [n, K], float64."""
        logprobs = logprobs.to(self._device, torch.float64)
        gradient = torch.zeros_like(logprobs)
        for run in self._runs:
            low, high = max(run.first, start), min(run.last, end)
            if low >= high:
                continue
            part = slice(low - start, high - start), slice(run.width)
            inputs = {name: values[low - run.first : high - run.first] for name, values in run.inputs.items()}
            self._terms[low:high, : run.width], gradient[part] = terms_and_gradient(
                run.loss, logprobs[part], inputs, run.config
            )
        self._is_finite[start:end] = gradient.isfinite().all(dim=1)
        return gradient

    def fetch(self) -> None:
        """To be called when all gradients were asked for; the values are there after `wait_for` the device."""
        self._terms, self._is_finite = download(self._terms), download(self._is_finite)

    def values(self, placed: Iterable[PlacedExample]) -> Iterator[tuple[Example, float, bool]]:
        """The loss of each example, and whether its gradient is finite."""
        terms, is_finite = self._terms.numpy(), self._is_finite.numpy()
        for start, end, example in placed:
            yield example, float(terms[start:end].sum()), bool(is_finite[start:end].all())


def _kind(placed: PlacedExample) -> tuple[object, ...]:
    example = placed[2]
    return id(example.loss), example.targets.shape[1], tuple(example.config.items()), tuple(example.inputs)


def _run(placed: list[PlacedExample], device: torch.device) -> _Run:
    (first, _, example), (_, last, _) = placed[0], placed[-1]
    assert not isinstance(example.loss, CustomLoss)
    inputs = {name: upload(torch.cat([each.inputs[name] for _, _, each in placed]), device) for name in example.inputs}
    return _Run(first, last, example.targets.shape[1], example.loss, example.config, inputs)
