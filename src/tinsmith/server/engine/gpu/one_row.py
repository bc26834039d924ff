"""The product of a matrix with a single row, as fast as the matrix can be read.

Libraries lay out such products for many rows, and lose a third of the time on it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.server.engine.gpu.early import early, wait_for_others


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, in], weight [out, in] -> [1, out]"""
    num_out, num_in = weight.shape
    y = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(num_out, 2),)](
        x, weight, bias, y, num_out, num_in, weight.stride(0), has_bias=bias is not None, BLOCK_N=2, BLOCK_K=1024,
        num_warps=4, **early(x.device),
    )  # fmt: skip
    return y


@triton.jit
def _product(
    x, weight, bias, y, num_out, num_in, stride, has_bias: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EARLY: tl.constexpr
) -> Any:  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_out
    k = tl.arange(0, BLOCK_K)
    of_weight = weight + rows[:, None] * stride + k[None, :]
    # Nobody writes the matrix meanwhile, so the first of it is fetched before the input is there.
    tile = tl.load(of_weight, mask=is_row[:, None] & (k < num_in)[None, :], other=0.0)
    wait_for_others(EARLY)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, num_in, BLOCK_K):
        inputs = tl.load(x + first + k, mask=first + k < num_in, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * inputs[None, :]
        following = first + BLOCK_K
        tile = tl.load(of_weight + following, mask=is_row[:, None] & (following + k < num_in)[None, :], other=0.0)
    result = tl.sum(total, axis=1)
    if has_bias:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(y + rows, result, mask=is_row)
