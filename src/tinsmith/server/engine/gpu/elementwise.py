"""The elementwise steps of `engine/elementwise.py` on a GPU, each one kernel: what is read is read once.

Arithmetic is float32 whatever the tensors are. No kernel's result depends on the order in which blocks run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.server.engine.gpu.early import early, wait_for_others

_COLUMNS = 1024
"""Columns of one block of the gated activation: eight bfloat16 values, one wide load, for each of 128 threads."""
_HEADS = 16
"""Of one block of the turned heads, with four warps; their gradient is faster with half of them and one warp."""
_HEADS_BACK = 8


# --- residual and norm -----------------------------------------------------------------------------------------------


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: Tensor, dtype: torch.dtype, y: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm is written to y, if that is given."""
    num_rows, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    if y is None:
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
    inverse = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    block, num_warps = _row_block(width)
    _add_norm[(num_rows,)](
        x, delta, weight, eps, total, y, inverse, width, y.stride(0), delta is not None, BLOCK=block,
        num_warps=num_warps, **early(x.device),
    )  # fmt: skip
    return total, y, inverse


def add_norm_backward(
    dx: Tensor | None, dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x)
    rounded = total if dtype == torch.float32 else torch.empty(x.shape, dtype=dtype, device=x.device)
    _run_add_norm_backward(dx, dy, x, inverse, weight, total, None if rounded is total else rounded)
    return total, rounded


def rounded_norm_gradient(
    dx: Tensor | None, dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, rounded: Tensor
) -> None:
    """The same in the dtype of `rounded` alone, written there."""
    _run_add_norm_backward(dx, dy, x, inverse, weight, None, rounded)


def _run_add_norm_backward(
    dx: Tensor | None,
    dy: Tensor,
    x: Tensor,
    inverse: Tensor,
    weight: Tensor,
    total: Tensor | None,
    rounded: Tensor | None,
) -> None:
    num_rows, width = x.shape
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    block, num_warps = _row_block(width)
    strides = [0 if tensor is None else tensor.stride(0) for tensor in (dx, dy, rounded)]
    _add_norm_backward[(num_rows,)](
        dx, dy, x, inverse, weight, total, rounded, width, *strides, dx is not None, total is not None,
        rounded is not None, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip


def _row_block(width: int) -> tuple[int, int]:
    """A block as wide as a row, and its warps: at least eight values for each thread."""
    block = triton.next_power_of_2(width)
    return block, max(1, min(16, block // 512))


@triton.jit
def _add_norm(
    x, delta, weight, eps, total, y, inverse, width, y_stride,
    has_delta: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> Any:  # fmt: skip
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if has_delta:
        values += tl.load(delta + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + places, values, mask=inside)
    factor = tl.rsqrt(tl.sum(values * values) / width + tl.load(eps))
    tl.store(inverse + row, factor)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + columns, (values * factor * weights).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_backward(
    dx, dy, x, inverse, weight, total, rounded, width, dx_stride, dy_stride, rounded_stride,
    has_dx: tl.constexpr, has_total: tl.constexpr, has_rounded: tl.constexpr, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    factor = tl.load(inverse + row)
    values = tl.load(x + places, mask=inside, other=0.0) * factor
    gradient = tl.load(dy + row * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gradient *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = (gradient - values * (tl.sum(gradient * values) / width)) * factor
    if has_dx:
        result += tl.load(dx + row * dx_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if has_total:
        tl.store(total + places, result, mask=inside)
    if has_rounded:
        tl.store(rounded + row * rounded_stride + columns, result.to(rounded.dtype.element_ty), mask=inside)


# --- heads: norm and rotary embedding --------------------------------------------------------------------------------


def turn_heads(
    heads: Tensor, num_turned: int, weight: Tensor | None, eps: Tensor, turn: tuple[Tensor, Tensor] | None
) -> Tensor:
    num_rows, _, size = heads.shape
    turned = torch.empty((num_rows, num_turned, size), dtype=heads.dtype, device=heads.device)
    cos, sin = turn or (None, None)
    _turn_heads[(num_rows, triton.cdiv(num_turned, _HEADS))](
        heads, weight, eps, cos, sin, turned, num_turned, heads.stride(0), size // 2, weight is not None,
        turn is not None, HEADS=_HEADS, HALF=triton.next_power_of_2(size // 2), num_warps=4, **early(heads.device),
    )  # fmt: skip
    return turned


def turn_heads_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    heads: Tensor,
    weight: Tensor | None,
    eps: Tensor,
    turn: tuple[Tensor, Tensor] | None,
    gradient: Tensor | None = None,
) -> Tensor:
    """Written to `gradient`, if that is given."""
    num_rows, num_heads, size = heads.shape
    dq, dk, dv = (with_whole_rows(part) for part in (dq, dk, dv))
    if gradient is None:
        gradient = torch.empty((num_rows, num_heads, size), dtype=heads.dtype, device=heads.device)
    cos, sin = turn or (None, None)
    _turn_heads_backward[(num_rows, triton.cdiv(num_heads, _HEADS_BACK))](
        dq, dk, dv, heads, weight, eps, cos, sin, gradient, dq.shape[1], dk.shape[1], num_heads,
        dq.stride(0), dk.stride(0), dv.stride(0), heads.stride(0), gradient.stride(0), size // 2,
        weight is not None, turn is not None, HEADS=_HEADS_BACK, HALF=triton.next_power_of_2(size // 2), num_warps=1,
    )  # fmt: skip
    return gradient


def with_whole_rows(heads: Tensor) -> Tensor:
    """Rows may lie apart, but what belongs to one row must lie together."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


@triton.jit
def _turn_heads(
    heads, weight, eps, cos, sin, turned, num_turned, stride, half,
    has_norm: tl.constexpr, has_turn: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr
) -> Any:  # fmt: skip
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    inside = (head < num_turned)[:, None] & (pair < half)[None, :]
    places = head[:, None] * (2 * half) + pair[None, :]
    first = tl.load(heads + row * stride + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + row * stride + places + half, mask=inside, other=0.0).to(tl.float32)
    if has_norm:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        factor = tl.rsqrt(squares / (2 * half) + tl.load(eps))[:, None]
        first = first * factor * tl.load(weight + places, mask=inside, other=0.0)
        second = second * factor * tl.load(weight + places + half, mask=inside, other=0.0)
    if has_turn:
        c = tl.load(cos + row * half + pair, mask=pair < half, other=0.0)[None, :]
        s = tl.load(sin + row * half + pair, mask=pair < half, other=0.0)[None, :]
        first, second = first * c - second * s, second * c + first * s
    out = turned + row * num_turned * (2 * half) + places
    tl.store(out, first.to(turned.dtype.element_ty), mask=inside)
    tl.store(out + half, second.to(turned.dtype.element_ty), mask=inside)


@triton.jit
def _turn_heads_backward(
    dq, dk, dv, heads, weight, eps, cos, sin, gradient, num_q, num_kv, num_heads,
    q_stride, k_stride, v_stride, stride, gradient_stride, half,
    has_norm: tl.constexpr, has_turn: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr
) -> Any:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    in_half = (pair < half)[None, :]
    inside = (head < num_heads)[:, None] & in_half
    is_q = (head < num_q)[:, None] & in_half
    is_k = ((head >= num_q) & (head < num_q + num_kv))[:, None] & in_half
    is_v = (head >= num_q + num_kv)[:, None] & inside
    places = head[:, None] * (2 * half) + pair[None, :]
    of_q = dq + row * q_stride + places
    of_k = dk + row * k_stride + places - num_q * (2 * half)
    of_v = dv + row * v_stride + places - (num_q + num_kv) * (2 * half)
    # Each head comes from one of three tensors; the other two loads are masked away and cost nothing.
    first = (
        tl.load(of_q, mask=is_q, other=0.0).to(tl.float32)
        + tl.load(of_k, mask=is_k, other=0.0).to(tl.float32)
        + tl.load(of_v, mask=is_v, other=0.0).to(tl.float32)
    )
    second = (
        tl.load(of_q + half, mask=is_q, other=0.0).to(tl.float32)
        + tl.load(of_k + half, mask=is_k, other=0.0).to(tl.float32)
        + tl.load(of_v + half, mask=is_v, other=0.0).to(tl.float32)
    )
    is_turned = is_q | is_k
    if has_turn:
        c = tl.load(cos + row * half + pair, mask=pair < half, other=0.0)[None, :]
        s = tl.load(sin + row * half + pair, mask=pair < half, other=0.0)[None, :]
        back_first, back_second = first * c + second * s, second * c - first * s
        first, second = tl.where(is_turned, back_first, first), tl.where(is_turned, back_second, second)
    if has_norm:
        x1 = tl.load(heads + row * stride + places, mask=is_turned, other=0.0).to(tl.float32)
        x2 = tl.load(heads + row * stride + places + half, mask=is_turned, other=0.0).to(tl.float32)
        size = 2 * half
        squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
        factor = tl.rsqrt(squares / size + tl.load(eps))[:, None]
        d1 = first * tl.load(weight + places, mask=is_turned, other=0.0)
        d2 = second * tl.load(weight + places + half, mask=is_turned, other=0.0)
        inner = (tl.sum(d1 * x1, axis=1) + tl.sum(d2 * x2, axis=1))[:, None] * factor * factor / size
        first = tl.where(is_turned, (d1 - x1 * inner) * factor, first)
        second = tl.where(is_turned, (d2 - x2 * inner) * factor, second)
    out = gradient + row * gradient_stride + places
    tl.store(out, first.to(gradient.dtype.element_ty), mask=inside)
    tl.store(out + half, second.to(gradient.dtype.element_ty), mask=inside)


# --- gated activation ------------------------------------------------------------------------------------------------


def gated_silu(gate_up: Tensor, y: Tensor | None = None) -> Tensor:
    """Written to y, if that is given."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if y is None:
        y = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _gated_silu[(num_rows, triton.cdiv(width, _COLUMNS))](
        gate_up, y, width, y.stride(0), BLOCK=_COLUMNS, num_warps=4, **early(y.device)
    )
    return y


def gated_silu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    gradient = torch.empty_like(gate_up)
    _run_gated_silu_backward(dy.contiguous(), gate_up, gradient, again=False)
    return gradient


def gated_silu_again(dy: Tensor, gate_up: Tensor, gradient: Tensor) -> None:
    """The gradient is written to `gradient`, and the activation, which was not kept, takes the place of dy."""
    _run_gated_silu_backward(dy, gate_up, gradient, again=True)


def _run_gated_silu_backward(dy: Tensor, gate_up: Tensor, gradient: Tensor, *, again: bool) -> None:
    num_rows, width = dy.shape
    _gated_silu_backward[(num_rows, triton.cdiv(width, _COLUMNS))](
        dy, gate_up, gradient, width, gradient.stride(0), again, BLOCK=_COLUMNS, num_warps=4
    )


@triton.jit
def _gated_silu(gate_up, y, width, y_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr) -> Any:
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + columns, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gated_silu_backward(dy, gate_up, gradient, width, stride, again: tl.constexpr, BLOCK: tl.constexpr) -> Any:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    places = row * 2 * width + columns
    gate = tl.load(gate_up + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + places + width, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    active = gate * share
    dgate = d * up * share * (1 + gate * (1 - share))
    out = gradient + row * stride + columns
    tl.store(out, dgate.to(gradient.dtype.element_ty), mask=inside)
    tl.store(out + width, (d * active).to(gradient.dtype.element_ty), mask=inside)
    if again:
        tl.store(dy + row * width + columns, (active * up).to(dy.dtype.element_ty), mask=inside)
