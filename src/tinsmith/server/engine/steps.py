"""The elementwise steps of the model as autograd sees them, computed by plain torch or by the kernels for a GPU.

Without a way back there is nothing to keep, and for a few rows autograd costs more than the step itself: then it is
left out.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tinsmith.server.engine import elementwise

_log = logging.getLogger(__name__)

# Those before lack functions that the kernels call (to 3.4), or fail in the middle of one (3.5).
_FIRST_TRITON = (3, 6)

Turn: TypeAlias = tuple[Tensor, Tensor]
"""Cosine and sine of the angle of each row and pair, [T, 1, D/2]."""


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The float32 residual with what a block adds to it, and its norm in `dtype`: [T, width] both."""
    if torch.is_grad_enabled():
        total, y = _AddNorm.apply(x, delta, weight, eps, dtype)
    else:
        total, y, _ = _kernels(x).add_norm(x, delta, weight, eps, dtype)
    return total, y


def turn_heads(
    heads: Tensor, num_q: int, num_kv: int, weight: Tensor | None, eps: Tensor, turn: Turn | None
) -> tuple[Tensor, Tensor, Tensor]:
    """[T, H + 2 K, D] -> queries [T, H, D], keys and values [T, K, D]; queries and keys normed and turned."""
    if weight is None and turn is None:
        q, k, v = torch.split_with_sizes(heads, [num_q, num_kv, num_kv], dim=1)
    elif torch.is_grad_enabled():
        q, k, v = _TurnHeads.apply(heads, num_q, num_kv, weight, eps, turn)
    else:
        q, k, v = _TurnHeads.plain(heads, num_q, num_kv, weight, eps, turn)
    return q, k, v


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up on the fused output of gate and up: [T, 2 F] -> [T, F]."""
    y: Tensor = _GatedSilu.apply(gate_up) if torch.is_grad_enabled() else _kernels(gate_up).gated_silu(gate_up)
    return y


@cache
def has_kernels() -> bool:
    """Whether the GPU here, if there is one, runs ours; else all is done by operations of torch's."""
    if not torch.cuda.is_available():
        return False
    if why_not := why_no_kernels():
        _log.warning("The GPU computes with operations of torch's own, several times slower than kernels: %s", why_not)
    return why_not is None


def why_no_kernels() -> str | None:
    """What the GPU here lacks for them, and what helps. torch's builds for a GPU carry Triton along but on Windows."""
    if torch.version.hip is not None:
        return "those that there are, are for GPUs of NVIDIA's."
    if not multiplies_bfloat16():
        return "they want a GPU of the Ampere generation or a later one."
    if find_spec("triton") is None:
        return "Triton, which compiles them, is not installed; try `pip install triton`."
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < _FIRST_TRITON:
        return (
            f"Triton {triton.__version__} cannot compile them; install torch 2.10 or later, which brings a newer one."
        )
    return None


def multiplies_bfloat16() -> bool:
    """Whether the GPU does; those before Ampere do not."""
    generation: tuple[int, int] = torch.cuda.get_device_capability()
    return generation >= (8, 0)


def _kernels(x: Tensor) -> Any:
    if not (x.is_cuda and has_kernels()):
        return elementwise
    from tinsmith.server.engine.gpu import elementwise as kernels

    return kernels


class _AddNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total, y, inverse = _kernels(x).add_norm(x, delta, weight, eps, dtype)
        ctx.save_for_backward(total, inverse, weight)
        ctx.dtype = x.dtype if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, inverse, weight = ctx.saved_tensors
        of_x, of_delta = _kernels(dy).add_norm_backward(dx, dy, total, inverse, weight, ctx.dtype)
        return of_x, of_delta if ctx.needs_input_grad[1] else None, None, None, None


class _TurnHeads(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def plain(
        heads: Tensor, num_q: int, num_kv: int, weight: Tensor | None, eps: Tensor, turn: Turn | None
    ) -> tuple[Tensor, ...]:
        turned = _kernels(heads).turn_heads(heads, num_q + num_kv, weight, eps, turn)
        return turned[:, :num_q], turned[:, num_q:], heads[:, num_q + num_kv :]

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, num_q: int, num_kv: int, weight: Tensor | None, eps: Tensor, turn: Turn | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(heads, weight, *(turn or (None, None)))
        ctx.eps = eps  # if sampling made it, autograd would not keep it
        return _TurnHeads.plain(heads, num_q, num_kv, weight, eps, turn)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        heads, weight, cos, sin = ctx.saved_tensors
        turn = None if cos is None else (cos, sin)
        return (
            _kernels(heads).turn_heads_backward(dq, dk, dv, heads, weight, ctx.eps, turn),
            None,
            None,
            None,
            None,
            None,
        )


class _GatedSilu(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        y: Tensor = _kernels(gate_up).gated_silu(gate_up)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gradient: Tensor = _kernels(gate_up).gated_silu_backward(dy, gate_up)
        return gradient
