"""One token for each row of logits, drawn on the device: what `sampler.draw` does, without a word to the host.

    DrawRows    what the kernels know of each row, and change: its last token, its place, its seed, its filters
    draw        the next token of every row, into `rows` itself and into `drawn`

The random numbers are those of `sampler.uniforms`: a seed gives the same tokens in any batch. Two kernels share the
work: the first reads every logit once and sums up each chunk of the vocabulary, the second walks over the chunks and
then within one. Rows with a top-k or top-p are looked through before, by halving the range of logits until the one
is found that the filter ends at; ties count by their id. Sums that decide are float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096

# Columns of the integers and floats of a row.
TOKEN, POSITION, SEED, STREAM, NUM_DRAWN, TOP_K = range(6)
INVERSE_TEMPERATURE, TOP_P = range(2)


@dataclass(frozen=True, eq=False)
class DrawRows:
    """An inverse temperature of 0 means the most likely token; a top-k of the vocabulary's size means all."""

    ints: Tensor  # int64 [N, 6]
    floats: Tensor  # float64 [N, 2]

    @classmethod
    def of(cls, state: Tensor) -> DrawRows:
        """Both side by side in one tensor of eight columns, int64."""
        return cls(state[:, :6], state.view(torch.float64)[:, 6:])

    def first(self, count: int) -> DrawRows:
        return DrawRows(self.ints[:count], self.floats[:count])


def draw(logits: Tensor, rows: DrawRows, drawn: Tensor, *, filtered: bool) -> None:
    """Logits [N, V]; `drawn` [N, 2], float64, gets token and log-probability. `filtered`: if any row has a filter."""
    num_rows, size = logits.shape
    num_chunks = triton.cdiv(size, CHUNK)
    sums = torch.empty(num_rows, num_chunks, 4, dtype=torch.float64, device=logits.device)
    ends = torch.empty(num_rows, 2, dtype=torch.float64, device=logits.device)
    strides = (logits.stride(0), rows.ints.stride(0), rows.floats.stride(0))
    if filtered:
        _find_filters[(num_rows,)](logits, rows.ints, rows.floats, ends, size, *strides, CHUNK=CHUNK, num_warps=8)
    _sum_chunks[(num_rows, num_chunks)](
        logits, rows.floats, ends, sums, size, num_chunks, *strides, filtered, CHUNK=CHUNK, num_warps=8
    )
    _walk[(num_rows,)](
        logits, rows.ints, rows.floats, ends, sums, drawn, size, num_chunks, *strides, filtered,
        CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(num_chunks), num_warps=8,
    )  # fmt: skip


@triton.jit
def _is_kept(values, ids, end_value, end_id):
    """Whether a filter that ends with these ties keeps a token."""
    return (values > end_value) | ((values == end_value) & (ids < end_id))


@triton.jit
def _mixed(x):
    """One step of SplitMix64, as in `sampler.uniforms`."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, stream, number):
    state = _mixed(seed.to(tl.uint64, bitcast=True))
    state = _mixed(stream.to(tl.uint64, bitcast=True) ^ state)
    state = _mixed(number.to(tl.uint64, bitcast=True) ^ state)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _sum_chunks(
    logits, floats, ends, sums, size, num_chunks, stride, ints_stride, floats_stride,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr,
) -> Any:  # fmt: skip
    """Of one chunk: its largest logit, its place, and the sums of exponentials as they are and as they are drawn."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    peak, place = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    # A chunk of nothing but minus infinity is possible; it weighs nothing.
    shifted = values - tl.where(peak == float("-inf"), 0.0, peak)
    inverse = tl.load(floats + row * floats_stride).to(tl.float32)
    weights = tl.exp(shifted * inverse)
    if FILTERED:
        kept = _is_kept(values, ids, tl.load(ends + row * 2).to(tl.float32), tl.load(ends + row * 2 + 1).to(tl.int64))
        weights = tl.where(kept, weights, 0.0)
    weights = tl.where(values > float("-inf"), weights, 0.0)
    to = sums + (row * num_chunks + chunk) * 4
    tl.store(to, peak.to(tl.float64))
    tl.store(to + 1, (chunk * CHUNK + place).to(tl.float64))
    tl.store(to + 2, tl.sum(tl.exp(shifted).to(tl.float64), axis=0))
    tl.store(to + 3, tl.sum(weights.to(tl.float64), axis=0))


@triton.jit
def _walk(
    logits, ints, floats, ends, sums, drawn, size, num_chunks, stride, ints_stride, floats_stride,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
) -> Any:  # fmt: skip
    """The token of one row, its log-probability, and the row made ready for the next one."""
    row = tl.program_id(0).to(tl.int64)
    at = ints + row * ints_stride
    inverse = tl.load(floats + row * floats_stride)
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < num_chunks
    to = sums + (row * num_chunks + chunks) * 4
    peaks = tl.load(to, mask=exists, other=float("-inf"))
    peak, best_chunk = tl.max(peaks, axis=0, return_indices=True, return_indices_tie_break_left=True)
    best = tl.load(sums + (row * num_chunks + best_chunk) * 4 + 1).to(tl.int64)
    below = tl.where(exists, peaks - peak, float("-inf"))
    log_sum = tl.log(tl.sum(tl.load(to + 2, mask=exists, other=0.0) * tl.exp(below), axis=0)) + peak

    weights = tl.load(to + 3, mask=exists, other=0.0) * tl.exp(below * tl.where(inverse > 0, inverse, 1.0))
    reached = tl.cumsum(weights, axis=0)
    goal = _uniform(tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)) * tl.sum(weights, axis=0)
    last = tl.max(tl.where(weights > 0, chunks, 0), axis=0)
    chunk = tl.minimum(tl.sum(((reached <= goal) & exists).to(tl.int32), axis=0), last)
    goal = goal - tl.sum(tl.where(chunks == chunk - 1, reached, 0.0), axis=0)

    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    inner = tl.exp((values - peak.to(tl.float32)) * inverse.to(tl.float32)).to(tl.float64)
    if FILTERED:
        kept = _is_kept(values, ids, tl.load(ends + row * 2).to(tl.float32), tl.load(ends + row * 2 + 1).to(tl.int64))
        inner = tl.where(kept, inner, 0.0)
    inner = tl.where(values > float("-inf"), inner, 0.0)
    steps = tl.cumsum(inner, axis=0)
    last = tl.max(tl.where(inner > 0, tl.arange(0, CHUNK), 0), axis=0)
    place = tl.minimum(tl.sum((steps <= goal).to(tl.int32), axis=0), last)
    token = tl.where(inverse > 0, (chunk * CHUNK + place).to(tl.int64), best)
    token = tl.minimum(tl.maximum(token, 0), size - 1)

    chosen = tl.load(logits + row * stride + token).to(tl.float64)
    tl.store(drawn + row * 2, token.to(tl.float64))
    tl.store(drawn + row * 2 + 1, chosen - log_sum)
    tl.store(at, token)
    tl.store(at + 1, tl.load(at + 1) + 1)
    tl.store(at + 4, tl.load(at + 4) + 1)


@triton.jit
def _rank(values):
    """Integers in the order of the floats; minus zero counts as zero."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unrank(rank):
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def _above(logits, size, peak, inverse, bound, CHUNK: tl.constexpr):
    """How many tokens have a rank beyond the bound, and what they weigh together."""
    count = tl.zeros([], tl.int64)
    weight = tl.zeros([], tl.float64)
    for first in range(0, size, CHUNK):
        ids = first + tl.arange(0, CHUNK)
        values = tl.load(logits + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        is_above = (_rank(values) > bound) & (ids < size)
        count += tl.sum(is_above.to(tl.int64), axis=0)
        weights = tl.where(is_above, tl.exp((values - peak) * inverse), 0.0)
        weight += tl.sum(weights.to(tl.float64), axis=0)
    return count, weight


@triton.jit
def _find_filters(logits, ints, floats, ends, size, stride, ints_stride, floats_stride, CHUNK: tl.constexpr) -> Any:
    """Where the top-k and top-p of one row end: the smallest logit kept, and the id before which its ties are kept."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits + row * stride
    inverse = tl.load(floats + row * floats_stride).to(tl.float32)
    top_p = tl.load(floats + row * floats_stride + 1)
    top_k = tl.load(ints + row * ints_stride + 5)
    end_value = tl.full([], float("-inf"), tl.float32)
    end_id = size.to(tl.int64)
    if (inverse > 0) & ((top_k < size) | (top_p < 1)):
        peak = tl.full([], float("-inf"), tl.float32)
        for first in range(0, size, CHUNK):
            ids = first + tl.arange(0, CHUNK)
            values = tl.load(logits + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
            peak = tl.maximum(peak, tl.max(values, axis=0))
        # The k-th largest: the highest bound with k tokens at it or above. Halving: `low` has them, `high` has not.
        lowest = tl.full([], -2147483648, tl.int64)
        low = lowest
        high = _rank(peak).to(tl.int64) + 1
        num_ties = size.to(tl.int64)
        wanted = tl.zeros([], tl.float64)
        if top_k < size:
            while high - low > 1:
                middle = (low + high) // 2
                count, weight = _above(logits, size, peak, inverse, middle - 1, CHUNK)
                enough = count >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            count, weight = _above(logits, size, peak, inverse, low, CHUNK)
            num_ties = top_k - count
            tie = tl.exp((_unrank(low.to(tl.int32)) - peak) * inverse).to(tl.float64)
            wanted = top_p * (weight + num_ties.to(tl.float64) * tie)
        else:
            count, weight = _above(logits, size, peak, inverse, lowest, CHUNK)
            wanted = top_p * weight
        if top_p < 1:
            # Likewise the highest bound with enough weight at it or above; never below that of top-k.
            floor = low
            high = _rank(peak).to(tl.int64) + 1
            while high - low > 1:
                middle = (low + high) // 2
                count, weight = _above(logits, size, peak, inverse, middle - 1, CHUNK)
                enough = weight >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            count, weight = _above(logits, size, peak, inverse, low, CHUNK)
            tie = tl.exp((_unrank(low.to(tl.int32)) - peak) * inverse).to(tl.float64)
            needed = tl.ceil((wanted - weight) / tie).to(tl.int64)
            needed = tl.maximum(needed, tl.where(count > 0, 0, 1))
            num_ties = tl.where(low == floor, tl.minimum(needed, num_ties), needed)
        end_value = _unrank(low.to(tl.int32))
        # The id after the last tie that is kept.
        end_id = tl.zeros([], tl.int64)
        seen = tl.zeros([], tl.int64)
        for first in range(0, size, CHUNK):
            ids = first + tl.arange(0, CHUNK)
            values = tl.load(logits + ids, mask=ids < size, other=float("nan")).to(tl.float32)
            is_tie = values == end_value
            order = seen + tl.cumsum(is_tie.to(tl.int64), axis=0)
            end_id = tl.maximum(end_id, tl.max(tl.where(is_tie & (order <= num_ties), ids + 1, 0).to(tl.int64), axis=0))
            seen += tl.sum(is_tie.to(tl.int64), axis=0)
    tl.store(ends + row * 2, end_value.to(tl.float64))
    tl.store(ends + row * 2 + 1, end_id.to(tl.float64))
