"""The elementwise steps of the model and their backward passes, in plain torch.

    add_norm      residual plus what a block adds, and the norm of the sum
    turn_heads    norm and rotary embedding of query and key heads
    gated_silu    silu(gate) * up on the fused output of both

They take fewer passes over memory than autograd's own and keep less. `gpu/elementwise.py` has the same functions, each
as one kernel. Letters: T rows, H heads that are turned, D size of a head, F inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta [T, width] in float32, its norm in `dtype`, and what each row was multiplied by [T, 1]."""
    total = x if delta is None else x + delta
    y, inverse = _norm(total, weight, eps)
    return total, y.to(dtype), inverse


def add_norm_backward(
    dx: Tensor | None, dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """From the gradients of the sum (None if unused) and of its norm to those of x, float32, and of delta, `dtype`."""
    total = _norm_backward(dy, x, inverse, weight)
    if dx is not None:
        total += dx
    return total, total.to(dtype)


def turn_heads(
    heads: Tensor, num_turned: int, weight: Tensor | None, eps: Tensor, turn: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The first `num_turned` heads of [T, all heads, D], normed with `weight` [H, D], each pair (i, i + D/2) turned.

    `turn` is cosine and sine, [T, 1, D/2].
    """
    turned = heads[:, :num_turned]
    if weight is not None:
        turned = _norm(turned.float(), weight, eps)[0].to(heads.dtype)
    return turned if turn is None else _turned(turned, *turn).to(heads.dtype)


def turn_heads_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    heads: Tensor,
    weight: Tensor | None,
    eps: Tensor,
    turn: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """From the gradients of turned queries, turned keys and values to that of all heads."""
    gradient = torch.cat([dq, dk], dim=1)
    if turn is not None:
        cos, sin = turn
        gradient = _turned(gradient, cos, -sin).to(heads.dtype)
    if weight is not None:
        x = heads[:, : gradient.shape[1]].float()
        gradient = _norm_backward(gradient, x, _inverse(x, eps), weight).to(heads.dtype)
    return torch.cat([gradient, dv], dim=1)


def gated_silu(gate_up: Tensor) -> Tensor:
    """[T, 2 F] -> [T, F]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gated_silu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gradient = torch.empty_like(gate_up)
    dgate, dup = gradient.chunk(2, dim=-1)
    torch.mul(dy, functional.silu(gate), out=dup)
    torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
    return gradient


def _norm(x: Tensor, weight: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    inverse = _inverse(x, eps)
    return (x * inverse).mul_(weight), inverse


def _inverse(x: Tensor, eps: Tensor) -> Tensor:
    """One over the root of the mean square of each row; in few steps, which is what costs when rows are few."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _norm_backward(dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    dn = dy * weight
    inner = torch.linalg.vecdot(dn, x).unsqueeze(-1).mul_(inverse.square()).div_(-x.shape[-1])
    return dn.addcmul_(x, inner).mul_(inverse)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    return turned
