"""Queries, keys and values of a block on a GPU, with what adapters add: as `mlp.py` does it for the inner layer.

What the adapters add to the frozen product is not written to memory before norm and rotary embedding: the kernel that
turns the heads adds it where it reads them, and so does the backward pass once more.

Letters: T rows, H heads, K key/value heads, D size of a head, R rank of the adapters, padded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.server.engine.gpu.elementwise import with_whole_rows
from tinsmith.server.engine.gpu.lora import FIELDS, GroupedSite, address_of
from tinsmith.server.engine.products import Matrix
from tinsmith.server.engine.steps import Turn

_ROWS = 32
_HEADS_AT_ONCE = 4
"""For one program of the way forward, one after the other: they share the angles of their rows, which are as much to
read as a head. On the way back, where a program reads more than that, one head for each is faster."""


class Heads(torch.autograd.Function):  # type: ignore[misc]
    """x [T, hidden] -> queries [T, H, D], keys and values [T, K, D]; the site has an adapter for every row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        qkv: Matrix,
        site: GroupedSite,
        num_q: int,
        num_kv: int,
        weight: Tensor | None,
        eps: Tensor,
        turn: Turn | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        frozen = qkv.product(x).view(len(x), num_q + 2 * num_kv, -1)
        xa = site.shrink(x)
        turned = turn_heads(frozen, xa, site, num_q, weight, eps, turn)
        ctx.save_for_backward(x, xa, frozen, weight, *(turn or (None, None)))
        ctx.layer = qkv, site
        ctx.eps = eps
        return turned[:, :num_q], turned[:, num_q:], frozen[:, num_q + num_kv :]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        x, xa, frozen, weight, cos, sin = ctx.saved_tensors
        qkv, site = ctx.layer
        turn = None if cos is None else (cos, sin)
        dheads = turn_heads_backward(dq, dk, dv, frozen, xa, site, weight, ctx.eps, turn).flatten(1)
        dx = qkv.gradient(dheads) if ctx.needs_input_grad[0] else None
        site.add_gradients(x, [xa], dheads, dx)
        return dx, *(None,) * 8


def turn_heads(
    frozen: Tensor,
    xa: Tensor,
    site: GroupedSite,
    num_q: int,
    weight: Tensor | None,
    eps: Tensor,
    turn: Turn | None,
) -> Tensor:
    """From the frozen products [T, H + 2 K, D] to queries and keys, normed and turned, [T, H + K, D].

    What the adapters add to the values is added in place.
    """
    num_rows, num_heads, size = frozen.shape
    num_kv = (num_heads - num_q) // 2
    turned = torch.empty((num_rows, num_q + num_kv, size), dtype=frozen.dtype, device=frozen.device)
    cos, sin = turn or (None, None)
    tiles = site.groups.cut(_ROWS)
    _turn_heads[(len(tiles), triton.cdiv(num_heads, _HEADS_AT_ONCE))](
        frozen, xa, weight, eps, cos, sin, turned, tiles, site.table, num_q, num_kv, size // 2,
        weight is not None, turn is not None, HEADS=_HEADS_AT_ONCE, **_options(site, size),
    )  # fmt: skip
    return turned


def turn_heads_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    frozen: Tensor,
    xa: Tensor,
    site: GroupedSite,
    weight: Tensor | None,
    eps: Tensor,
    turn: Turn | None,
) -> Tensor:
    """From the gradients of queries, keys and values to that of all heads as they came, [T, H + 2 K, D]."""
    dq, dk, dv = (with_whole_rows(part) for part in (dq, dk, dv))
    gradient = torch.empty_like(frozen)
    cos, sin = turn or (None, None)
    tiles = site.groups.cut(_ROWS)
    _turn_heads_backward[(len(tiles), frozen.shape[1])](
        dq, dk, dv, frozen, xa, weight, eps, cos, sin, gradient, tiles, site.table, dq.shape[1], dk.shape[1],
        dq.stride(0), dk.stride(0), dv.stride(0), frozen.shape[2] // 2, weight is not None, turn is not None,
        **_options(site, frozen.shape[2]),
    )  # fmt: skip
    return gradient


def _options(site: GroupedSite, size: int) -> dict[str, int]:
    return {
        "RANK": site.groups.rank, "DIVISOR": site.groups.divisor, "FIELDS": FIELDS, "ROWS": _ROWS,
        "HALF": max(16, triton.next_power_of_2(size // 2)), "num_warps": 4,
    }  # fmt: skip


@triton.jit
def _turn_heads(
    frozen, xa, weight, eps, cos, sin, turned, tiles, table, num_q, num_kv, half,
    has_norm: tl.constexpr, has_turn: tl.constexpr, RANK: tl.constexpr, DIVISOR: tl.constexpr, FIELDS: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr
) -> Any:  # fmt: skip
    rows, has_row, segment = _tile(tiles, ROWS)
    num_turned = num_q + num_kv
    pair = tl.arange(0, HALF)
    inside = has_row & (pair < half)[None, :]
    if has_turn:
        c, s = _cos_sin(cos, sin, rows, pair, half, inside)
    first_head = tl.program_id(1) * HEADS
    for head in range(first_head, tl.minimum(first_head + HEADS, num_turned + num_kv)):
        of_frozen = frozen + (rows * (num_turned + num_kv) + head)[:, None] * (2 * half) + pair[None, :]
        first, second = _with_adapters(
            of_frozen, xa, table, segment, rows, has_row, inside, head, num_q, num_kv, pair, half, RANK, DIVISOR, FIELDS
        )
        if head >= num_turned:
            tl.store(of_frozen, first.to(frozen.dtype.element_ty), mask=inside)
            tl.store(of_frozen + half, second.to(frozen.dtype.element_ty), mask=inside)
        else:
            if has_norm:
                squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
                factor = tl.rsqrt(squares / (2 * half) + tl.load(eps))[:, None]
                w1, w2 = _norm_weights(weight, head, pair, half)
                first, second = first * factor * w1, second * factor * w2
            if has_turn:
                first, second = first * c - second * s, second * c + first * s
            out = turned + (rows * num_turned + head)[:, None] * (2 * half) + pair[None, :]
            tl.store(out, first.to(turned.dtype.element_ty), mask=inside)
            tl.store(out + half, second.to(turned.dtype.element_ty), mask=inside)


@triton.jit
def _turn_heads_backward(
    dq, dk, dv, frozen, xa, weight, eps, cos, sin, gradient, tiles, table, num_q, num_kv, q_stride, k_stride, v_stride,
    half, has_norm: tl.constexpr, has_turn: tl.constexpr, RANK: tl.constexpr, DIVISOR: tl.constexpr,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr
) -> Any:  # fmt: skip
    rows, has_row, segment = _tile(tiles, ROWS)
    head = tl.program_id(1)
    num_turned = num_q + num_kv
    pair = tl.arange(0, HALF)
    inside = has_row & (pair < half)[None, :]
    if head < num_q:
        given = dq + rows[:, None] * q_stride + head * (2 * half) + pair[None, :]
    elif head < num_turned:
        given = dk + rows[:, None] * k_stride + (head - num_q) * (2 * half) + pair[None, :]
    else:
        given = dv + rows[:, None] * v_stride + (head - num_turned) * (2 * half) + pair[None, :]
    first = tl.load(given, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(given + half, mask=inside, other=0.0).to(tl.float32)
    places = (rows * (num_turned + num_kv) + head)[:, None] * (2 * half) + pair[None, :]
    if head < num_turned:
        if has_turn:
            c, s = _cos_sin(cos, sin, rows, pair, half, inside)
            first, second = first * c + second * s, second * c - first * s
        if has_norm:
            x1, x2 = _with_adapters(
                frozen + places, xa, table, segment, rows, has_row, inside, head, num_q, num_kv, pair, half,
                RANK, DIVISOR, FIELDS,
            )  # fmt: skip
            size = 2 * half
            squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
            factor = tl.rsqrt(squares / size + tl.load(eps))[:, None]
            w1, w2 = _norm_weights(weight, head, pair, half)
            first, second = first * w1, second * w2
            inner = (tl.sum(first * x1, axis=1) + tl.sum(second * x2, axis=1))[:, None] * factor * factor / size
            first, second = (first - x1 * inner) * factor, (second - x2 * inner) * factor
    tl.store(gradient + places, first.to(gradient.dtype.element_ty), mask=inside)
    tl.store(gradient + places + half, second.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _tile(tiles, ROWS: tl.constexpr) -> Any:
    """The rows of a tile, which of them are there, and the number of their adapter."""
    tile = tiles + tl.program_id(0) * 3
    rows = (tl.load(tile) + tl.arange(0, ROWS)).to(tl.int64)
    return rows, (rows < tl.load(tile + 1))[:, None], tl.load(tile + 2)


@triton.jit
def _norm_weights(weight, head, pair, half) -> Any:
    places = weight + head * (2 * half) + pair
    first = tl.load(places, mask=pair < half, other=0.0)
    return first[None, :], tl.load(places + half, mask=pair < half, other=0.0)[None, :]


@triton.jit
def _cos_sin(cos, sin, rows, pair, half, inside) -> Any:
    places = rows[:, None] * half + pair[None, :]
    return tl.load(cos + places, mask=inside, other=0.0), tl.load(sin + places, mask=inside, other=0.0)


@triton.jit
def _with_adapters(
    places, xa, table, segment, rows, has_row, inside, head, num_q, num_kv, pair, half,
    RANK: tl.constexpr, DIVISOR: tl.constexpr, FIELDS: tl.constexpr
) -> Any:  # fmt: skip
    """Both halves of a head: the frozen product and x A^T B^T, in float32."""
    first = tl.load(places, mask=inside, other=0.0)
    second = tl.load(places + half, mask=inside, other=0.0)
    part = (head >= num_q).to(tl.int32) + (head >= num_q + num_kv).to(tl.int32)
    head_of_part = head - tl.where(part == 0, 0, num_q) - tl.where(part == 2, num_kv, 0)
    rank = tl.multiple_of(tl.load(table + segment * FIELDS + 8), DIVISOR)
    b = address_of(table, segment, 2 + part, first.dtype, FIELDS) + head_of_part * (2 * half) * rank
    first, second = first.to(tl.float32), second.to(tl.float32)
    # Large ranks at once would not fit into registers.
    at_once: tl.constexpr = RANK if RANK < 64 else 64  # noqa: FURB136 (in a kernel, `min` is of tensors)
    for number in tl.static_range(RANK // at_once):
        j = number * at_once + tl.arange(0, at_once)
        of_first = b + pair[:, None] * rank + j[None, :]
        has_b = (pair < half)[:, None] & (j < rank)[None, :]
        left = tl.load(xa + rows[:, None] * (3 * RANK) + part * RANK + j[None, :], mask=has_row, other=0.0)
        right = tl.trans(tl.load(of_first, mask=has_b, other=0.0))
        first = tl.dot(left, right, first, input_precision="ieee")
        right = tl.trans(tl.load(of_first + half * rank, mask=has_b, other=0.0))
        second = tl.dot(left, right, second, input_precision="ieee")
    return first, second
