"""A product whose rows do not depend on how many there are: for the deterministic mode.

Libraries choose tiles and the order of summation by the size of the whole product. Here both are always the same, so a
row comes out the same to the last bit, in a batch of one or of thousands. That costs speed at either end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _DEPTH = 64, 128, 64
# Tiles side by side share what they read while it is in the cache.
_GROUP = 8


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b: [T, in] -> [T, out]"""
    num_rows, num_in = x.shape
    num_out = len(weight)
    y = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(num_rows, _ROWS) * triton.cdiv(num_out, _COLUMNS),)](
        x, weight, bias, y, num_rows, num_out, num_in, x.stride(0), weight.stride(0), has_bias=bias is not None,
        ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH, GROUP=_GROUP, num_warps=4, num_stages=4,
    )  # fmt: skip
    return y


@triton.jit
def _product(
    x, weight, bias, y, num_rows, num_out, num_in, x_stride, weight_stride, has_bias: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
) -> Any:  # fmt: skip
    tiles_down, tiles_across = tl.cdiv(num_rows, ROWS), tl.cdiv(num_out, COLUMNS)
    group = tl.program_id(0) // (GROUP * tiles_across)
    in_group = tl.program_id(0) % (GROUP * tiles_across)
    height = tl.minimum(tiles_down - group * GROUP, GROUP)
    rows = (group * GROUP + in_group % height).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (in_group // height).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < num_out
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, num_in, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        is_input = depth < num_in
        left = tl.load(
            x + rows[:, None] * x_stride + depth[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        right = tl.load(
            weight + columns[None, :] * weight_stride + depth[:, None],
            mask=is_column[None, :] & is_input[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(y + rows[:, None] * num_out + columns[None, :], total, mask=is_row[:, None] & is_column[None, :])
