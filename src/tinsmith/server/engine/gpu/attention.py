"""Causal attention within each sequence of a packed batch, forward and back, for GPUs that copy tiles by themselves.

    Tiles     how a packed batch is cut
    attend    attention as autograd sees it

Each query looks at the keys of its sequence block by block from the first one on, and each sum of the way back is
made by one program in a fixed order: a row's result depends on its own sequence alone, and is the same every time.

On the way back, the gradients of keys and values come first, with that of every score. It is written to memory, as long
as there is room, so that the gradient of the queries is one product more; else it is computed once more, to the same
bits.

Tiles are copied without regard for the ends of sequences. What lies beyond an end belongs to somebody else and may
be no number at all; so it is never stored, and set to zero before it could enter a sum.

Letters: T rows, H heads, K key/value heads, D size of a head. Scores carry the factor log2(e): the hardware's
exponential is that of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tinsmith.server.engine.gpu import card
from tinsmith.server.engine.transfer import upload


@dataclass(frozen=True)
class Shape:
    """Of the tiles of one kernel, and how it runs."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# The fastest of those measured on an H200. A kernel goes through the other side of its tile in whole blocks up to the
# tile itself, without a mask: they must end where the tile begins. So keys must divide queries where a tile is of
# queries, and queries must divide keys where it is of keys; 64 queries beside 128 keys see what lies ahead of them.
FORWARD = Shape(queries=64, keys=64, num_warps=4, num_stages=3)
QUERY_GRADIENTS = Shape(queries=64, keys=32, num_warps=4, num_stages=3)
# Not with three stages and tiles of 128 keys, either: such a kernel gave gradients 2 % off.
KEY_GRADIENTS = Shape(queries=64, keys=64, num_warps=4, num_stages=2)
# Those of the scores are kept in the tiles of KEY_GRADIENTS, which are square for that.
_PRODUCT_STAGES = 2
MAX_KEPT_BYTES = 9 * 2**28
"""Enough for 32,768 rows in sequences of 2,048 with 32 heads."""
_INNER_ROWS = 64


def is_suited(head_size: int, device: torch.device) -> bool:
    """Whether the tiles above are for such heads on such a GPU; others may lack the memory for them."""
    return head_size in (64, 128) and card.generation(device)[0] == 9


class Tiles:
    """Sequences one after another, cut into tiles of some rows; the longest work comes first, so none of it is last."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths = np.asarray(lengths)
        self._device = device

    @cached_property
    def forward(self) -> Tensor:
        return self.cut(FORWARD.queries, later_first=True)

    @cached_property
    def of_queries(self) -> Tensor:
        return self.cut(QUERY_GRADIENTS.queries, later_first=True)

    @cached_property
    def of_products(self) -> Tensor:
        return self.cut(KEY_GRADIENTS.queries, later_first=True)

    @cached_property
    def _pairs(self) -> npt.NDArray[np.int64]:
        """Of each sequence."""
        counts = -(-self._lengths // KEY_GRADIENTS.keys)
        return np.asarray(counts * (counts + 1) // 2, np.int64)

    @property
    def num_pairs(self) -> int:
        """Of a tile of keys and one of queries that see some of them, for one head."""
        return int(self._pairs.sum())

    @cached_property
    def of_keys(self) -> Tensor:
        """The first keys of a sequence are looked at by most queries."""
        return self.cut(KEY_GRADIENTS.keys, later_first=False)

    def cut(self, num_rows: int, *, later_first: bool) -> Tensor:
        """[tiles, 4]: where the sequence begins, where the tile does, where the sequence ends, and its first pair."""
        ends = np.cumsum(self._lengths)
        counts = -(-self._lengths // num_rows)
        of = np.repeat(np.arange(len(counts)), counts)
        offsets = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * num_rows
        begins = (ends - self._lengths)[of]
        work = offsets if later_first else ends[of] - begins - offsets
        first_pairs = (np.cumsum(self._pairs) - self._pairs)[of]
        tiles = np.stack([begins, begins + offsets, ends[of], first_pairs], axis=1)[np.argsort(-work, kind="stable")]
        return upload(torch.from_numpy(tiles.astype(np.int32)), self._device)


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Tensor:
    """[T, H, D], [T, K, D] twice -> [T, H, D]"""
    attended: Tensor = _Attend.apply(q, k, v, tiles)
    return attended


class _Attend(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Tensor:
        attended, log_sums = forward(q, k, v, tiles.forward, FORWARD)
        ctx.save_for_backward(q, k, v, attended, log_sums)
        ctx.tiles = tiles
        return attended

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, attended, log_sums = ctx.saved_tensors
        return *gradients(dy.contiguous(), q, k, v, attended, log_sums, ctx.tiles), None


def gradients(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Tensor, log_sums: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, from what `forward` made of them."""
    inner = inner_products(dy, attended)
    of_scores = _room_for_scores(q, tiles)
    dk, dv = key_gradients(dy, q, k, v, log_sums, inner, tiles.of_keys, KEY_GRADIENTS, of_scores)
    if of_scores is None:
        dq = query_gradients(dy, q, k, v, log_sums, inner, tiles.of_queries, QUERY_GRADIENTS)
    else:
        dq = query_products(of_scores, q, k, tiles.of_products)
    return dq, dk, dv


def _room_for_scores(q: Tensor, tiles: Tiles) -> Tensor | None:
    """For the gradients of all scores, [heads, pairs, keys, queries]; None if that is too much."""
    shape = q.shape[1], tiles.num_pairs, KEY_GRADIENTS.keys, KEY_GRADIENTS.queries
    if math.prod(shape) * q.element_size() > MAX_KEPT_BYTES:
        return None
    return q.new_empty(shape)


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, shape: Shape, attended: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of each query's weights [H, T].

    The former is written to `attended`, if that is given; the heads of a row must lie together there.
    """
    assert shape.queries % shape.keys == 0
    assert tiles.shape[1] == 4, "a kernel would read them otherwise"
    num_rows, num_heads, size = q.shape
    if attended is None:
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    log_sums = torch.empty((num_heads, num_rows), dtype=torch.float32, device=q.device)
    _forward[(num_heads, len(tiles))](
        _tiled(q, shape.queries), _tiled(k, shape.keys), _tiled(v, shape.keys), attended, log_sums, tiles,
        num_rows, attended.stride(0), _scale(size), **_options(q, k, shape),
    )  # fmt: skip
    return attended, log_sums


def inner_products(dy: Tensor, attended: Tensor) -> Tensor:
    """Of each row's output and its gradient, [H, T]."""
    num_rows, num_heads, size = dy.shape
    inner = torch.empty((num_heads, num_rows), dtype=torch.float32, device=dy.device)
    _inner_products[(num_heads, triton.cdiv(num_rows, _INNER_ROWS))](
        dy, attended, inner, num_rows, dy.stride(0), attended.stride(0), SIZE=size, ROWS=_INNER_ROWS, num_warps=4
    )
    return inner


def query_gradients(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, log_sums: Tensor, inner: Tensor, tiles: Tensor, shape: Shape
) -> Tensor:  # fmt: skip
    """The gradient of the queries, from scores that are computed once more."""
    assert shape.queries % shape.keys == 0
    num_rows, num_heads, size = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _query_gradients[(num_heads, len(tiles))](
        _tiled(dy, shape.queries), _tiled(q, shape.queries), _tiled(k, shape.keys), _tiled(v, shape.keys),
        log_sums, inner, dq, tiles, num_rows, num_heads * size, _scale(size), size**-0.5, **_options(q, k, shape),
    )  # fmt: skip
    return dq


def query_products(of_scores: Tensor, q: Tensor, k: Tensor, tiles: Tensor) -> Tensor:
    """The gradient of the queries, from those of the scores."""
    _, num_heads, size = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = replace(KEY_GRADIENTS, num_stages=_PRODUCT_STAGES)
    _query_products[(num_heads, len(tiles))](
        _pairs(of_scores), _tiled(k, shape.keys), dq, tiles, of_scores.shape[1], num_heads * size, size**-0.5,
        **_options(q, k, shape),
    )  # fmt: skip
    return dq


def key_gradients(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_sums: Tensor,
    inner: Tensor,
    tiles: Tensor,
    shape: Shape,
    of_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Those of keys and values; one program takes all the heads that share them.

    Those of the scores are left in `of_scores`, if that is given.
    """
    assert shape.keys % shape.queries == 0
    assert of_scores is None or shape.keys == shape.queries
    num_rows, num_kv_heads, size = k.shape
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    pairs, num_pairs = (None, 0) if of_scores is None else (_pairs(of_scores), of_scores.shape[1])
    _key_gradients[(num_kv_heads, len(tiles))](
        _tiled(dy, shape.queries), _tiled(q, shape.queries), _tiled(k, shape.keys), _tiled(v, shape.keys),
        log_sums, inner, dk, dv, pairs, tiles, num_rows, num_pairs, num_kv_heads * size, _scale(size), size**-0.5,
        KEEPS=of_scores is not None, **_options(q, k, shape),
    )  # fmt: skip
    return dk, dv


def _pairs(of_scores: Tensor) -> TensorDescriptor:
    """One below the other, to be copied one by one."""
    *_, num_keys, num_queries = of_scores.shape
    num_rows = of_scores.numel() // num_queries
    return TensorDescriptor(of_scores, [num_rows, num_queries], [num_queries, 1], [num_keys, num_queries])


def _tiled(heads: Tensor, num_rows: int) -> TensorDescriptor:
    """Rows as they lie, heads side by side, to be copied by tiles of one head."""
    _, num_heads, size = heads.shape
    return TensorDescriptor(heads, [len(heads), num_heads * size], [heads.stride(0), 1], [num_rows, size])


def _options(q: Tensor, k: Tensor, shape: Shape) -> dict[str, int]:
    return {
        "GROUP": q.shape[1] // k.shape[1], "SIZE": q.shape[2], "QUERIES": shape.queries, "KEYS": shape.keys,
        "num_warps": shape.num_warps, "num_stages": shape.num_stages,
    }  # fmt: skip


def _scale(size: int) -> float:
    return math.log2(math.e) / math.sqrt(size)


# --- kernels ---------------------------------------------------------------------------------------------------------

# Batches differ in their number of rows; no kernel is compiled anew for it.
_kernel = triton.jit(do_not_specialize=["num_rows"])


@_kernel
def _forward(
    q, k, v, attended, log_sums, tiles, num_rows, stride, scale,
    GROUP: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
) -> Any:  # fmt: skip
    head = tl.program_id(0)
    begin, first, end, _ = _tile(tiles)
    rows = first + tl.arange(0, QUERIES)
    queries = q.load([first, head * SIZE])
    column = head // GROUP * SIZE
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, SIZE], tl.float32)
    for start in range(begin, first, KEYS):
        scores = tl.dot(queries, k.load([start, column]).T, input_precision="ieee")
        values = v.load([start, column])
        result, total, peak = _weighed(result, total, peak, scores * scale, values)
    for start in range(first, tl.minimum(first + QUERIES, end), KEYS):
        keys = start + tl.arange(0, KEYS)
        scores = tl.dot(queries, k.load([start, column]).T, input_precision="ieee")
        scores = tl.where(rows[:, None] >= keys[None, :], scores * scale, float("-inf"))
        values = tl.where((keys < end)[:, None], v.load([start, column]), 0.0)
        result, total, peak = _weighed(result, total, peak, scores, values)
    places = attended + rows.to(tl.int64)[:, None] * stride + head * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(places, (result / total[:, None]).to(attended.dtype.element_ty), mask=(rows < end)[:, None])
    tl.store(log_sums + head * num_rows + rows, peak + tl.log2(total), mask=rows < end)


@triton.jit
def _weighed(result, total, peak, scores, values) -> Any:
    """One more block of keys; the first one has a key for every query, so the peak is a number from then on."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(peak - higher)
    total = total * shrunk + tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result * shrunk[:, None], input_precision="ieee")
    return result, total, higher


@_kernel
def _inner_products(
    dy, attended, inner, num_rows, dy_stride, stride, SIZE: tl.constexpr, ROWS: tl.constexpr
) -> Any:  # fmt: skip
    head = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = head * SIZE + tl.arange(0, SIZE)[None, :]
    is_row = rows < num_rows
    places = rows.to(tl.int64)[:, None]
    gradient = tl.load(dy + places * dy_stride + columns, mask=is_row[:, None], other=0.0).to(tl.float32)
    output = tl.load(attended + places * stride + columns, mask=is_row[:, None], other=0.0).to(tl.float32)
    tl.store(inner + head * num_rows + rows, tl.sum(gradient * output, 1), mask=is_row)


@_kernel
def _query_gradients(
    dy, q, k, v, log_sums, inner, dq, tiles, num_rows, stride, scale, plain_scale,
    GROUP: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
) -> Any:  # fmt: skip
    head = tl.program_id(0)
    begin, first, end, _ = _tile(tiles)
    rows = first + tl.arange(0, QUERIES)
    queries = q.load([first, head * SIZE])
    gradient = dy.load([first, head * SIZE])
    column = head // GROUP * SIZE
    products = tl.load(inner + head * num_rows + rows, mask=rows < end, other=0.0)
    log_sum = tl.load(log_sums + head * num_rows + rows, mask=rows < end, other=0.0)
    result = tl.zeros([QUERIES, SIZE], tl.float32)
    for start in range(begin, first, KEYS):
        keys, values = k.load([start, column]), v.load([start, column])
        weights = tl.exp2(tl.dot(queries, keys.T, input_precision="ieee") * scale - log_sum[:, None])
        dscores = weights * (tl.dot(gradient, values.T, input_precision="ieee") - products[:, None])
        result = tl.dot(dscores.to(keys.dtype), keys, result, input_precision="ieee")
    for start in range(first, tl.minimum(first + QUERIES, end), KEYS):
        places = start + tl.arange(0, KEYS)
        keys, values = k.load([start, column]), v.load([start, column])
        weights = tl.exp2(tl.dot(queries, keys.T, input_precision="ieee") * scale - log_sum[:, None])
        dscores = weights * (tl.dot(gradient, values.T, input_precision="ieee") - products[:, None])
        dscores = tl.where(rows[:, None] >= places[None, :], dscores, 0.0)
        keys = tl.where((places < end)[:, None], keys, 0.0)
        result = tl.dot(dscores.to(keys.dtype), keys, result, input_precision="ieee")
    places = dq + rows.to(tl.int64)[:, None] * stride + head * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(places, (result * plain_scale).to(dq.dtype.element_ty), mask=(rows < end)[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def _query_products(
    of_scores, k, dq, tiles, num_pairs, stride, plain_scale,
    GROUP: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
) -> Any:  # fmt: skip
    head = tl.program_id(0)
    begin, first, end, first_pair = _tile(tiles)
    rows = first + tl.arange(0, QUERIES)
    column = head // GROUP * SIZE
    number = (first - begin) // QUERIES
    pair = head * num_pairs + _pair(first_pair, number, 0)
    result = tl.zeros([QUERIES, SIZE], tl.float32)
    for before in range(number):
        dscores, keys = of_scores.load([(pair + before) * KEYS, 0]), k.load([begin + before * KEYS, column])
        result = tl.dot(dscores.T, keys, result, input_precision="ieee")
    keys = tl.where((rows < end)[:, None], k.load([first, column]), 0.0)
    result = tl.dot(of_scores.load([(pair + number) * KEYS, 0]).T, keys, result, input_precision="ieee")
    places = dq + rows.to(tl.int64)[:, None] * stride + head * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(places, (result * plain_scale).to(dq.dtype.element_ty), mask=(rows < end)[:, None])


@triton.jit
def _pair(first_pair, of_queries, of_keys) -> Any:
    """The number of a pair: those of the first tile of queries come first."""
    return first_pair + of_queries * (of_queries + 1) // 2 + of_keys


@triton.jit(do_not_specialize=["num_rows", "num_pairs"])
def _key_gradients(
    dy, q, k, v, log_sums, inner, dk, dv, of_scores, tiles, num_rows, num_pairs, stride, scale, plain_scale,
    KEEPS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
) -> Any:  # fmt: skip
    kv_head = tl.program_id(0)
    begin, first, end, first_pair = _tile(tiles)
    number = (first - begin) // KEYS
    rows = first + tl.arange(0, KEYS)
    keys, values = k.load([first, kv_head * SIZE]), v.load([first, kv_head * SIZE])
    of_keys = tl.zeros([KEYS, SIZE], tl.float32)
    of_values = tl.zeros([KEYS, SIZE], tl.float32)
    # Queries beside the keys see a part of them, those beyond see all; the last block may reach beyond the end.
    num_beside = tl.cdiv(tl.minimum(KEYS, end - first), QUERIES)
    num_whole = tl.maximum(end - first - KEYS, 0) // QUERIES
    num_masked = num_beside + tl.where(first + KEYS + num_whole * QUERIES < end, 1, 0)
    for step in range(GROUP * num_masked):
        head = kv_head * GROUP + step // num_masked
        block = step % num_masked
        start = first + QUERIES * tl.where(block < num_beside, block, num_beside + num_whole)
        places = start + tl.arange(0, QUERIES)
        is_inside = places < end
        queries = tl.where(is_inside[:, None], q.load([start, head * SIZE]), 0.0)
        gradient = tl.where(is_inside[:, None], dy.load([start, head * SIZE]), 0.0)
        log_sum = tl.load(log_sums + head * num_rows + places, mask=is_inside, other=0.0)
        products = tl.load(inner + head * num_rows + places, mask=is_inside, other=0.0)
        weights = tl.exp2(tl.dot(keys, queries.T, input_precision="ieee") * scale - log_sum[None, :])
        is_seen = (places[None, :] >= rows[:, None]) & is_inside[None, :]
        weights = tl.where(is_seen, weights, 0.0)
        of_values = tl.dot(weights.to(gradient.dtype), gradient, of_values, input_precision="ieee")
        dscores = weights * (tl.dot(values, gradient.T, input_precision="ieee") - products[None, :])
        dscores = tl.where(is_seen, dscores, 0.0).to(queries.dtype)
        of_keys = tl.dot(dscores, queries, of_keys, input_precision="ieee")
        if KEEPS:
            pair = _pair(first_pair, (start - begin) // QUERIES, number)
            of_scores.store([(head * num_pairs + pair) * KEYS, 0], dscores)
    for step in range(GROUP * num_whole):
        head = kv_head * GROUP + step // num_whole
        start = first + KEYS + QUERIES * (step % num_whole)
        places = head * num_rows + start + tl.arange(0, QUERIES)
        queries, gradient = q.load([start, head * SIZE]), dy.load([start, head * SIZE])
        log_sum, products = tl.load(log_sums + places), tl.load(inner + places)
        weights = tl.exp2(tl.dot(keys, queries.T, input_precision="ieee") * scale - log_sum[None, :])
        of_values = tl.dot(weights.to(gradient.dtype), gradient, of_values, input_precision="ieee")
        dscores = weights * (tl.dot(values, gradient.T, input_precision="ieee") - products[None, :])
        dscores = dscores.to(queries.dtype)
        of_keys = tl.dot(dscores, queries, of_keys, input_precision="ieee")
        if KEEPS:
            pair = _pair(first_pair, (start - begin) // QUERIES, number)
            of_scores.store([(head * num_pairs + pair) * KEYS, 0], dscores)
    places = rows.to(tl.int64)[:, None] * stride + kv_head * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(dk + places, (of_keys * plain_scale).to(dk.dtype.element_ty), mask=(rows < end)[:, None])
    tl.store(dv + places, of_values.to(dv.dtype.element_ty), mask=(rows < end)[:, None])


@triton.jit
def _tile(tiles) -> Any:
    tile = tiles + tl.program_id(1) * 4
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
