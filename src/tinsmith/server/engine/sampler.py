"""From logits to tokens: the same token for the same seed, whatever else is in the batch.

    keys_of       one random number for each (seed, sample, position), by hashing, without a state
    Settings      temperature, top-k and top-p of the rows of a batch
    draw          one token for each row, with its log-probability
    best          the most likely tokens of each row

A token is drawn by a race: each weighs in with its probability, divided by an exponentially distributed random number
of its own, and the largest wins. In other company the logits of a row are rounded otherwise; then another token wins
only if the race was almost a tie. To need few random numbers, the first race is between chunks of the vocabulary, and
the second one within a chunk. The order of the filters is temperature, top-k, top-p; tokens of equal logits are ordered
by their id, so that every filter has one answer.

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

_FIRST_CANDIDATES = 256
_KEYS_AT_ONCE = 32
"""Of one row: each of them needs some hundred random numbers."""
_LARGEST_CHUNK = 4096
_SHARPEST, _FLATTEST = 1e30, 1e-30
"""Of inverse temperatures: float32 has to hold them."""


def keys_of(seeds: npt.ArrayLike, streams: npt.ArrayLike, positions: npt.ArrayLike) -> Tensor:
    """Random numbers, int64, that depend on nothing but the three arguments."""
    state = torch.zeros((), dtype=torch.int64)
    for part in (seeds, streams, positions):
        state = _mixed(torch.from_numpy(np.array(part, np.uint64).view(np.int64)) ^ state)
    return state


def chunk_size(vocab_size: int) -> int:
    """A power of two near the square root, so that both races are about as long. With another, seeds mean others."""
    return min(1 << ((vocab_size.bit_length() + 1) // 2), _LARGEST_CHUNK)


def exponentials(keys: Tensor, count: int) -> Tensor:
    """So many random numbers of each key, greater than 0, with a mean of 1: float64 [..., count]."""
    mixed = _mixed(keys[..., None] ^ torch.arange(count, device=keys.device))
    return ((_shifted(mixed, 12).double() + 0.5) * 2.0**-52).log_().neg_()


def _mixed(x: Tensor) -> Tensor:
    """One step of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right; zeros come in from the left, and not the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def inverse_of(temperature: float) -> float:
    """0 stands for the most likely token."""
    return min(max(1 / temperature, _FLATTEST), _SHARPEST) if temperature else 0.0


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
        inverse = [inverse_of(params.temperature) or 1.0 for params in rows]
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


def draw(logits: Tensor, settings: Settings, keys: Tensor) -> Drawn:
    """One token for each row of float32 logits [N, V], by the keys [N]."""
    scaled = _Scaled(logits, settings.inverse_temperature)
    if settings.all_greedy:
        tokens = logits.argmax(-1)
    else:
        if settings.filtered is not None:
            rows = settings.filtered
            scaled.weights[rows] = _filtered(scaled.select(rows), settings.top_k, settings.top_p)
        tokens = race(scaled.weights, keys[:, None])[:, 0]
        if settings.greedy is not None:
            tokens = torch.where(settings.greedy, logits.argmax(-1), tokens)
    return Drawn(tokens, logits.gather(1, tokens[:, None])[:, 0] - scaled.log_sum)


def draw_many(logits: Tensor, temperature: float, keys: Tensor) -> Tensor:
    """Several tokens for each row, with replacement and without filters: keys [N, k] -> tokens [N, k]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True).expand(keys.shape)
    weights = (logits - logits.amax(-1, keepdim=True)).mul_(inverse_of(temperature)).exp_()
    return torch.cat([race(weights, part) for part in keys.split(_KEYS_AT_ONCE, dim=1)], dim=1)


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


def race(weights: Tensor, keys: Tensor) -> Tensor:
    """A token for each of the keys [N, k], in proportion to the weights [N, V]: int64 [N, k].

    A row with NaN gives any token; its log-probability tells that it is broken.
    """
    size = weights.shape[1]
    length = chunk_size(size)
    whole = size // length * length
    sums = weights[:, :whole].unflatten(1, (-1, length)).sum(-1)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1)
    num_chunks = sums.shape[1]
    noise = exponentials(keys.to(weights.device), num_chunks + length)
    chunk = (sums[:, None] / noise[:, :, :num_chunks]).argmax(-1)  # [N, k]
    inside = chunk[:, :, None] * length + torch.arange(length, device=weights.device)  # [N, k, length]
    part = weights.gather(1, inside.clamp(max=size - 1).flatten(1)).view(inside.shape).masked_fill_(inside >= size, 0.0)
    return chunk * length + (part / noise[:, :, num_chunks:]).argmax(-1)


def _filtered(scaled: _Scaled, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The weights of tokens that are kept, and 0 for all others.

    Few candidates are looked at first: sorting a vocabulary is slow.
    """
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
    return torch.zeros_like(scaled.weights).scatter_(1, ids, weights.masked_fill_(~kept, 0.0).float())


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
