"""The product of a matrix with a single row, as fast as the matrix can be read.

Libraries lay out such products for many rows, and lose a third of the time on it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, in], weight [out, in] -> [1, out]"""
    num_out, num_in = weight.shape
    y = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(num_out, 2),)](
        x, weight, bias, y, num_out, num_in, has_bias=bias is not None, BLOCK_N=2, BLOCK_K=1024, num_warps=4
    )
    return y


@triton.jit
def _product(
    x, weight, bias, y, num_out, num_in, has_bias: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
) -> Any:
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_out
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, num_in, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        is_input = k < num_in
        inputs = tl.load(x + k, mask=is_input, other=0.0).to(tl.float32)
        tile = tl.load(
            weight + rows[:, None] * num_in + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        total += tile.to(tl.float32) * inputs[None, :]
    result = tl.sum(total, axis=1)
    if has_bias:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(y + rows, result, mask=is_row)
