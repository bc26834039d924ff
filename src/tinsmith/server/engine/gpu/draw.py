"""One token for each row of logits, drawn on the device: what `sampler.draw` does, without a word to the host.

    DrawRows    what the kernels know of each row, and change: its last token, its place, its seed, its filters
    draw        the next token of every row, into `rows` itself and into `drawn`

Races and random numbers are those of `sampler`: a seed gives the same tokens in any batch. Two kernels share the work:
the first reads every logit once, a tile at a time, and sums up the chunks of the vocabulary, the second holds the race
of the chunks and then that within one. Rows with a top-k or top-p are looked through before, by quartering the range of
their ranks until the one is found that the filter ends at; ties count by their id. Sums beyond a chunk are float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.server.engine.sampler import chunk_size

TILE = 4096
_MISSING_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Bits at the end of a float32 that are zero in logits of this dtype."""

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
    length = chunk_size(size)
    num_tiles = triton.cdiv(size, TILE)
    num_chunks = triton.cdiv(size, length)
    tiles = torch.empty(num_rows, num_tiles, 3, dtype=torch.float64, device=logits.device)
    chunks = torch.empty(num_rows, num_tiles * (TILE // length), dtype=torch.float64, device=logits.device)
    ends = torch.empty(num_rows, 2, dtype=torch.float64, device=logits.device)
    strides = (logits.stride(0), rows.ints.stride(0), rows.floats.stride(0))
    if filtered:
        _find_filters[(num_rows,)](
            logits, rows.ints, rows.floats, ends, size, *strides,
            SHIFT=_MISSING_BITS[logits.dtype], TILE=TILE, num_warps=8,
        )  # fmt: skip
    _sum_up[(num_rows, num_tiles)](
        logits, rows.floats, ends, tiles, chunks, size, num_tiles, *strides, filtered,
        TILE=TILE, LENGTH=length, num_warps=8,
    )  # fmt: skip
    _race[(num_rows,)](
        logits, rows.ints, rows.floats, ends, tiles, chunks, drawn, size, num_tiles, num_chunks, *strides, filtered,
        TILE=TILE, LENGTH=length, TILES=triton.next_power_of_2(num_tiles), CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _is_kept(values, ids, end_value, end_id):
    """Whether a filter that ends with these ties keeps a token."""
    return (values > end_value) | ((values == end_value) & (ids < end_id))


@triton.jit
def _mixed(x):
    """One step of SplitMix64, as in `sampler`."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _key(seed, stream, number):
    """As in `sampler.keys_of`."""
    state = _mixed(seed.to(tl.uint64, bitcast=True))
    state = _mixed(stream.to(tl.uint64, bitcast=True) ^ state)
    return _mixed(number.to(tl.uint64, bitcast=True) ^ state)


@triton.jit
def _exponentials(key, numbers):
    """As in `sampler.exponentials`."""
    mixed = _mixed(numbers.to(tl.uint64) ^ key)
    return -tl.log(((mixed >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16)


@triton.jit
def _sum_up(
    logits, floats, ends, tiles, chunks, size, num_tiles, stride, ints_stride, floats_stride,
    FILTERED: tl.constexpr, TILE: tl.constexpr, LENGTH: tl.constexpr,
) -> Any:  # fmt: skip
    """Of one tile: its largest logit, its place, and the sum of its exponentials. Of each of its chunks: the sum of the
    exponentials as they are drawn."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    peak, place = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    # A tile of nothing but minus infinity is possible; it weighs nothing.
    shifted = values - tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp(shifted)
    to = tiles + (row * num_tiles + tile) * 3
    tl.store(to, peak.to(tl.float64))
    tl.store(to + 1, (tile * TILE + place).to(tl.float64))
    tl.store(to + 2, tl.sum(_of_chunks(weights, TILE, LENGTH), axis=0))
    inverse = tl.load(floats + row * floats_stride).to(tl.float32)
    if inverse != 1:
        weights = tl.where(values > float("-inf"), tl.exp(shifted * inverse), 0.0)
    if FILTERED:
        kept = _is_kept(values, ids, tl.load(ends + row * 2).to(tl.float32), tl.load(ends + row * 2 + 1).to(tl.int64))
        weights = tl.where(kept, weights, 0.0)
    first_chunk = (row * num_tiles + tile) * (TILE // LENGTH)
    tl.store(chunks + first_chunk + tl.arange(0, TILE // LENGTH), _of_chunks(weights, TILE, LENGTH))


@triton.jit
def _of_chunks(weights, TILE: tl.constexpr, LENGTH: tl.constexpr):
    return tl.sum(tl.reshape(weights, (TILE // LENGTH, LENGTH)), axis=1).to(tl.float64)


@triton.jit
def _race(
    logits, ints, floats, ends, tiles, chunks, drawn, size, num_tiles, num_chunks, stride, ints_stride, floats_stride,
    FILTERED: tl.constexpr, TILE: tl.constexpr, LENGTH: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr,
) -> Any:  # fmt: skip
    """The token of one row, its log-probability, and the row made ready for the next one."""
    row = tl.program_id(0).to(tl.int64)
    at = ints + row * ints_stride
    inverse = tl.load(floats + row * floats_stride)
    tile = tl.arange(0, TILES)
    of_row = tiles + row * num_tiles * 3
    peaks = tl.load(of_row + tile * 3, mask=tile < num_tiles, other=float("-inf"))
    peak, best_tile = tl.max(peaks, axis=0, return_indices=True, return_indices_tie_break_left=True)
    best = tl.load(of_row + best_tile * 3 + 1).to(tl.int64)
    sums = tl.load(of_row + tile * 3 + 2, mask=tile < num_tiles, other=0.0)
    log_sum = tl.log(tl.sum(sums * tl.exp(peaks - peak), axis=0)) + peak

    key = _key(tl.load(at + 2), tl.load(at + 3), tl.load(at + 4))
    chunk = tl.arange(0, CHUNKS)
    exists = chunk < num_chunks
    below = tl.load(of_row + chunk // (TILE // LENGTH) * 3, mask=exists, other=float("-inf")) - peak
    weights = tl.load(chunks + row * num_tiles * (TILE // LENGTH) + chunk, mask=exists, other=0.0)
    weights = weights * tl.exp(below * tl.where(inverse > 0, inverse, 1.0))
    winner = tl.argmax(tl.where(exists, weights / _exponentials(key, chunk), -1.0), axis=0)

    inside = tl.arange(0, LENGTH)
    ids = winner * LENGTH + inside
    values = tl.load(logits + row * stride + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    weights = tl.exp((values - peak.to(tl.float32)) * inverse.to(tl.float32))
    if FILTERED:
        kept = _is_kept(values, ids, tl.load(ends + row * 2).to(tl.float32), tl.load(ends + row * 2 + 1).to(tl.int64))
        weights = tl.where(kept, weights, 0.0)
    weights = tl.where(values > float("-inf"), weights, 0.0).to(tl.float64)
    place = tl.argmax(weights / _exponentials(key, num_chunks + inside), axis=0)
    token = tl.where(inverse > 0, (winner * LENGTH + place).to(tl.int64), best)
    token = tl.minimum(tl.maximum(token, 0), size - 1)

    chosen = tl.load(logits + row * stride + token).to(tl.float64)
    tl.store(drawn + row * 2, token.to(tl.float64))
    tl.store(drawn + row * 2 + 1, chosen - log_sum)
    tl.store(at, token)
    tl.store(at + 1, tl.load(at + 1) + 1)
    tl.store(at + 4, tl.load(at + 4) + 1)


@triton.jit
def _rank(values, SHIFT: tl.constexpr):
    """Integers in the order of the floats; minus zero counts as zero. What a dtype does not have is shifted out."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _unrank(rank, SHIFT: tl.constexpr):
    bits = tl.where(rank < 0, (rank << SHIFT | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, rank << SHIFT)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _reaching(logits, size, peak, inverse, bound1, bound2, bound3, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """How many tokens have a rank of at least each bound, and what they weigh together.

    Each thread adds up its own until the end, eight at a time in float32. The compiler leaves out what no caller uses.
    """
    lanes, eight = tl.arange(0, TILE // 8), tl.arange(0, 8)
    count1 = tl.zeros([TILE // 8], tl.int32)
    count2 = tl.zeros([TILE // 8], tl.int32)
    count3 = tl.zeros([TILE // 8], tl.int32)
    weight1 = tl.zeros([TILE // 8], tl.float64)
    weight2 = tl.zeros([TILE // 8], tl.float64)
    weight3 = tl.zeros([TILE // 8], tl.float64)
    for first in range(0, size, TILE):
        ids = first + lanes[:, None] * 8 + eight[None, :]
        values = tl.load(logits + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        ranks = tl.where(ids < size, _rank(values, SHIFT), -2147483648)
        weights = tl.exp((values - peak) * inverse)
        count1 += tl.sum((ranks >= bound1).to(tl.int32), axis=1)
        count2 += tl.sum((ranks >= bound2).to(tl.int32), axis=1)
        count3 += tl.sum((ranks >= bound3).to(tl.int32), axis=1)
        weight1 += tl.sum(tl.where(ranks >= bound1, weights, 0.0), axis=1).to(tl.float64)
        weight2 += tl.sum(tl.where(ranks >= bound2, weights, 0.0), axis=1).to(tl.float64)
        weight3 += tl.sum(tl.where(ranks >= bound3, weights, 0.0), axis=1).to(tl.float64)
    return (
        tl.sum(count1, axis=0), tl.sum(count2, axis=0), tl.sum(count3, axis=0),
        tl.sum(weight1, axis=0), tl.sum(weight2, axis=0), tl.sum(weight3, axis=0),
    )  # fmt: skip


@triton.jit
def _last_rank(
    logits, size, peak, inverse, low, high, wanted, BY_WEIGHT: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The highest rank that is reached by enough tokens, in weight or in number; `low` is, `high` is not."""
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        bound1, bound2, bound3 = low + step, low + 2 * step, low + 3 * step
        count1, count2, count3, weight1, weight2, weight3 = _reaching(
            logits, size, peak, inverse, bound1, bound2, bound3, SHIFT, TILE
        )
        is_enough1 = weight1 >= wanted if BY_WEIGHT else count1 >= wanted
        is_enough2 = (weight2 >= wanted if BY_WEIGHT else count2 >= wanted) & (bound2 < high)
        is_enough3 = (weight3 >= wanted if BY_WEIGHT else count3 >= wanted) & (bound3 < high)
        lacking = tl.where(is_enough2, tl.where(is_enough3, high, bound3), tl.where(is_enough1, bound2, bound1))
        high = tl.minimum(high, lacking)
        low = tl.where(is_enough3, bound3, tl.where(is_enough2, bound2, tl.where(is_enough1, bound1, low)))
    return low


@triton.jit
def _find_filters(
    logits, ints, floats, ends, size, stride, ints_stride, floats_stride, SHIFT: tl.constexpr, TILE: tl.constexpr
) -> Any:  # fmt: skip
    """Where the top-k and top-p of one row end: the smallest logit kept, and the id before which its ties are kept."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits + row * stride
    inverse = tl.load(floats + row * floats_stride).to(tl.float32)
    top_p = tl.load(floats + row * floats_stride + 1)
    top_k = tl.load(ints + row * ints_stride + 5)
    end_value = tl.full([], float("-inf"), tl.float32)
    end_id = size.to(tl.int64)
    if (inverse > 0) & ((top_k < size) | (top_p < 1)):
        inside = tl.arange(0, TILE)
        peaks = tl.full([TILE], float("-inf"), tl.float32)
        for first in range(0, size, TILE):
            ids = first + inside
            peaks = tl.maximum(peaks, tl.load(logits + ids, mask=ids < size, other=float("-inf")).to(tl.float32))
        peak = tl.max(peaks, axis=0)
        beyond = _rank(peak, SHIFT).to(tl.int64) + 1
        floor = tl.full([], -2147483648 >> SHIFT, tl.int64)
        num_kept = size.to(tl.int64)
        if top_k < size:
            floor = _last_rank(logits, size, peak, inverse, floor, beyond, top_k, False, SHIFT, TILE)
            num_kept = top_k
        # Of the ties at the floor, top-k keeps some; top-p wants its share of what that leaves.
        _, num_above, _, weight, weight_above, _ = _reaching(
            logits, size, peak, inverse, floor, floor + 1, floor + 1, SHIFT, TILE
        )
        last = floor
        if top_k < size:
            tie = tl.exp((_unrank(floor.to(tl.int32), SHIFT) - peak) * inverse).to(tl.float64)
            weight = weight_above + (num_kept - num_above).to(tl.float64) * tie
        if top_p < 1:
            # All tokens below this together weigh less than top-p leaves out, since the first one weighs 1.
            lightest = peak - tl.log((2.0 * size / (1 - top_p)).to(tl.float32)) / inverse
            low = tl.maximum(floor, _rank(lightest, SHIFT).to(tl.int64))
            last = _last_rank(logits, size, peak, inverse, low, beyond, top_p * weight, True, SHIFT, TILE)
        num_there, num_above, _, _, weight_above, _ = _reaching(
            logits, size, peak, inverse, last, last + 1, last + 1, SHIFT, TILE
        )
        num_ties = tl.minimum(num_there, num_kept) - num_above
        end_value = _unrank(last.to(tl.int32), SHIFT)
        if top_p < 1:
            tie = tl.exp((end_value - peak) * inverse).to(tl.float64)
            needed = tl.ceil((top_p * weight - weight_above) / tie).to(tl.int64)
            num_ties = tl.minimum(num_ties, tl.maximum(needed, tl.where(num_above > 0, 0, 1)))
        # The id after the last tie that is kept: first the tile that it lies in.
        seen = tl.zeros([], tl.int64)
        seen_before = tl.zeros([], tl.int64)
        first_there = tl.zeros([], tl.int64)
        for first in range(0, size, TILE):
            ids = first + inside
            values = tl.load(logits + ids, mask=ids < size, other=float("nan")).to(tl.float32)
            is_before = seen < num_ties
            seen_before = tl.where(is_before, seen, seen_before)
            first_there = tl.where(is_before, first, first_there)
            seen += tl.sum((values == end_value).to(tl.int64), axis=0)
        ids = first_there + inside
        values = tl.load(logits + ids, mask=ids < size, other=float("nan")).to(tl.float32)
        is_tie = values == end_value
        order = seen_before + tl.cumsum(is_tie.to(tl.int64), axis=0)
        end_id = tl.max(tl.where(is_tie & (order <= num_ties), ids + 1, 0), axis=0)
    tl.store(ends + row * 2, end_value.to(tl.float64))
    tl.store(ends + row * 2 + 1, end_id.to(tl.float64))
