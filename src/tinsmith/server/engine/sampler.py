"""From logits to tokens: the same token for the same seed, whatever else is in the batch.

    uniforms      one random number for each (seed, sample, position), by hashing, without a state
    Settings      temperature, top-k and top-p of the rows of a batch
    draw          one token for each row, with its log-probability
    best          the most likely tokens of each row

A token is drawn by walking along the cumulative distribution up to the row's random number. The order of the filters
is temperature, top-k, top-p; tokens of equal logits are ordered by their id, so that every filter has one answer.

Log-probabilities are those of the model itself: temperature, top-k and top-p change what is drawn and not what is
reported, which therefore equals what a forward pass computes for the same token.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.types import SamplingParams

_ONE_STRIDE = 4096
_CHUNK = 256
_FIRST_CANDIDATES = 256
_GOLDEN = 0x9E3779B97F4A7C15


def uniforms(seeds: npt.ArrayLike, streams: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) that depend on nothing but the three arguments; 53 random bits each."""
    state = np.zeros((), np.uint64)
    for part in (seeds, streams, positions):
        state = _mixed(np.asarray(part, np.uint64) ^ state)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One step of SplitMix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def is_filtered(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)


def top_k_of(params: SamplingParams, vocab_size: int) -> int:
    """How many tokens are looked at, all if no number is given."""
    return min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size


@dataclass(frozen=True, eq=False)
class Settings:
    """How each row is drawn, as tensors that last as long as the rows stay the same."""

    inverse_temperature: Tensor | None
    """[N, 1]; None if all are 1."""

    greedy: Tensor | None
    """[N]; None if no row is."""

    filtered: Tensor | None
    """The rows with a top-k or top-p."""

    top_k: Tensor
    top_p: Tensor
    """Of the filtered rows."""

    all_greedy: bool

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Settings:
        greedy = [params.temperature == 0 for params in rows]
        inverse = [1.0 if params.temperature == 0 else 1 / params.temperature for params in rows]
        filtered = [index for index, params in enumerate(rows) if is_filtered(params)]
        top_k = [top_k_of(rows[index], vocab_size) for index in filtered]
        return cls(
            None if all(value == 1 for value in inverse) else torch.tensor(inverse, device=device)[:, None],
            torch.tensor(greedy, device=device) if any(greedy) else None,
            torch.tensor(filtered, device=device) if filtered else None,
            torch.tensor(top_k, device=device),
            torch.tensor([rows[index].top_p for index in filtered], dtype=torch.float64, device=device),
            all(greedy),
        )


class Drawn(NamedTuple):
    tokens: Tensor  # [N] int64
    logprobs: Tensor  # [N] float32


def draw(logits: Tensor, settings: Settings, numbers: Tensor) -> Drawn:
    """One token for each row of float32 logits [N, V], by the random numbers [N], float64."""
    scaled = _Scaled(logits, settings.inverse_temperature)
    if settings.all_greedy:
        tokens = logits.argmax(-1)
    else:
        tokens = walk(scaled.weights, numbers[:, None])[:, 0]
        if settings.filtered is not None:
            rows = settings.filtered
            tokens[rows] = _draw_filtered(scaled.select(rows), settings.top_k, settings.top_p, numbers[rows])
        if settings.greedy is not None:
            tokens = torch.where(settings.greedy, logits.argmax(-1), tokens)
    return Drawn(tokens, logits.gather(1, tokens[:, None])[:, 0] - scaled.log_sum)


def draw_many(logits: Tensor, temperature: float, numbers: Tensor) -> Tensor:
    """Several tokens for each row, with replacement and without filters: numbers [N, k] -> tokens [N, k]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True).expand(numbers.shape)
    return walk((logits - logits.amax(-1, keepdim=True)).div_(temperature).exp_(), numbers)


class _Scaled:
    """Logits with what drawing needs of them."""

    def __init__(self, logits: Tensor, inverse_temperature: Tensor | None) -> None:
        self.logits = logits
        self.inverse_temperature = inverse_temperature
        self.peak = logits.amax(-1, keepdim=True)
        self.weights = (logits - self.peak).exp_()
        """Proportional to the probabilities at the row's temperature; the largest is 1."""
        self.log_sum = self.weights.sum(-1).log_() + self.peak[:, 0]
        """Of the logits as they are, without temperature."""
        if inverse_temperature is not None:
            self.weights = (logits - self.peak).mul_(inverse_temperature).exp_()

    def select(self, rows: Tensor) -> _Scaled:
        part = object.__new__(_Scaled)
        part.logits, part.peak = self.logits[rows], self.peak[rows]
        part.weights, part.log_sum = self.weights[rows], self.log_sum[rows]
        part.inverse_temperature = None if self.inverse_temperature is None else self.inverse_temperature[rows]
        return part


def walk(weights: Tensor, numbers: Tensor) -> Tensor:
    """Where the cumulative sum of weights [N, V] passes the numbers [N, k]: int64 [N, k].

    In two strides, if the vocabulary is not short: over sums of chunks, then within one chunk. Sums are float64.
    """
    num_rows, size = weights.shape
    if size <= _ONE_STRIDE:
        ends = weights.double().cumsum(-1)
        return _passed(ends, numbers * ends[:, -1:])
    whole = size // _CHUNK * _CHUNK
    sums = weights[:, :whole].unflatten(1, (-1, _CHUNK)).sum(-1)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1)
    ends = sums.double().cumsum(-1)
    goal = numbers * ends[:, -1:]
    chunk = _passed(ends, goal)
    goal = goal - torch.where(chunk > 0, ends.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    inside = chunk[:, :, None] * _CHUNK + torch.arange(_CHUNK, device=weights.device)  # [N, k, chunk]
    part = weights.gather(1, inside.clamp(max=size - 1).flatten(1)).view(inside.shape).masked_fill_(inside >= size, 0.0)
    step = _passed(part.double().cumsum(-1).flatten(0, 1), goal.reshape(-1, 1))
    return (chunk * _CHUNK + step.view(num_rows, -1)).clamp_(max=size - 1)


def _passed(ends: Tensor, goal: Tensor) -> Tensor:
    """The first place whose end lies beyond the goal; rounding must not lead past the last weight that is not zero.

    Rows that are not numbers lead to the last place; their log-probability tells that they are broken.
    """
    last = torch.nextafter(ends[:, -1:], torch.zeros_like(ends[:, -1:]))
    return torch.searchsorted(ends, torch.minimum(goal, last), right=True).clamp_(max=ends.shape[1] - 1)


def _draw_filtered(scaled: _Scaled, top_k: Tensor, top_p: Tensor, numbers: Tensor) -> Tensor:
    """Draw among the most likely tokens. Few candidates are looked at first: sorting a vocabulary is slow."""
    vocab_size = scaled.logits.shape[1]
    has_top_k = top_k < vocab_size
    everything = scaled.weights.double().sum(-1)
    count = min(max(int(torch.where(has_top_k, top_k, _FIRST_CANDIDATES).max()), 1), vocab_size)
    while True:
        logits, ids = best(scaled.logits, count)
        exponents = logits - scaled.peak
        if scaled.inverse_temperature is not None:
            exponents = exponents * scaled.inverse_temperature
        weights = exponents.exp_().double()
        weights = weights.masked_fill_(torch.arange(count, device=ids.device) >= top_k[:, None], 0.0)
        ends = weights.cumsum(-1)
        wanted = top_p * torch.where(has_top_k, ends[:, -1], everything)
        if count == vocab_size or bool(((ends[:, -1] >= wanted) | has_top_k).all()):
            break
        count = min(count * 8, vocab_size)
    kept = ends - weights < wanted[:, None]
    kept[:, 0] = True
    place = walk(weights.masked_fill_(~kept, 0.0), numbers[:, None])
    return ids.gather(1, place)[:, 0]


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row with their tokens, largest first; of equals the lower id comes first."""
    values, ids = logits.topk(count, dim=-1)
    # Which of several equals at the end of the list topk takes is not defined; then all tokens are ordered exactly.
    if bool(((logits >= values[:, -1:]).sum(-1) > count).any()):
        values, ids = logits, torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    return _ordered(values, ids, count)


def _ordered(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` by falling value and rising id, as one integer comparison."""
    bits = (values + 0.0).view(torch.int32)  # adding zero makes -0.0 the same number as 0.0
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    places = ((rank << 32) + (0xFFFFFFFF - ids)).topk(count, dim=-1).indices
    return values.gather(1, places), ids.gather(1, places)


def log_sums(logits: Tensor) -> Tensor:
    """What turns logits into log-probabilities: [N, V] -> [N]."""
    return logits.logsumexp(-1)
