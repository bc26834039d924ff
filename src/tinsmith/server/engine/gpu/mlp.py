"""The inner layer of a block on a GPU, with what adapters add: between its products one pass over memory each way.

The output of gate and up is by far the largest tensor of a layer. What the adapters add to it is never written to
memory: the activation adds it where it reads the frozen product, and so does its backward pass once more, which also
adds the adapters' share to the gradient it is given. The activation itself is not kept either; the backward pass
leaves it in place of that gradient, for the gradients of the weights that follow.

Letters: T rows, F inner width, R rank of the adapters, padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.server.engine.gpu.lora import FIELDS, GroupedSite, address_of
from tinsmith.server.engine.products import Matrix


@dataclass(frozen=True)
class _Tile:
    """The adapters' matrices are read anew for each; so ranks above 32 make it narrower, and they fit."""

    rows: int
    columns: int
    num_warps: int

    def block(self, rank: int) -> int:
        return max(16, min(self.columns, 32 * self.columns // rank))


# The fastest of those measured on an H200.
_FORWARD = _Tile(rows=64, columns=64, num_warps=4)
_BACKWARD = _Tile(rows=32, columns=128, num_warps=4)


class Mlp(torch.autograd.Function):  # type: ignore[misc]
    """x [T, hidden] -> [T, hidden]; both sites have an adapter for every row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, gate_up: Matrix, down: Matrix, outer: GroupedSite, inner: GroupedSite
    ) -> Tensor:
        frozen = gate_up.product(x)
        xa = outer.shrink(x)
        h = gated_silu(frozen, xa, outer)
        y = down.product(h)
        ha = inner.shrink(h)
        inner.expand(y, ha)
        ctx.save_for_backward(x, frozen, xa, ha)
        ctx.matrices = gate_up, down
        ctx.sites = outer, inner
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, frozen, xa, ha = ctx.saved_tensors
        gate_up, down = ctx.matrices
        outer, inner = ctx.sites
        dh, dha = down.gradient(dy), inner.shrink_gradient(dy)
        dgate_up, h = gated_silu_backward(dh, frozen, xa, dha, outer, inner)
        inner.add_weight_gradients(h, ha, dy, dha)
        dxa = outer.shrink_gradient(dgate_up)
        outer.add_weight_gradients(x, xa, dgate_up, dxa)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = gate_up.gradient(dgate_up)
            outer.expand_gradient(dx, dxa)
        return dx, None, None, None, None, None


def gated_silu(frozen: Tensor, xa: Tensor, outer: GroupedSite) -> Tensor:
    """silu(gate) * up of the frozen products [T, 2 F] and what the adapters add to them -> [T, F]"""
    width = frozen.shape[1] // 2
    y = torch.empty((len(frozen), width), dtype=frozen.dtype, device=frozen.device)
    tiles, options = outer.groups.cut(_FORWARD.rows), _options(_FORWARD, outer)
    _gated_silu[(len(tiles), triton.cdiv(width, options["BLOCK"]))](frozen, xa, y, tiles, outer.table, width, **options)
    return y


def gated_silu_backward(
    dh: Tensor, frozen: Tensor, xa: Tensor, dha: Tensor, outer: GroupedSite, inner: GroupedSite
) -> tuple[Tensor, Tensor]:
    """From what the frozen product gives back, dh [T, F], to the gradient of gate and up, and the activation once more.

    The latter takes the place of dh.
    """
    width = frozen.shape[1] // 2
    gradient = torch.empty_like(frozen)
    tiles, options = outer.groups.cut(_BACKWARD.rows), _options(_BACKWARD, outer)
    _gated_silu_backward[(len(tiles), triton.cdiv(width, options["BLOCK"]))](
        dh, frozen, xa, dha, gradient, tiles, outer.table, inner.table, width, **options
    )
    return gradient, dh


def _options(tile: _Tile, site: GroupedSite) -> dict[str, int]:
    return {
        "RANK": site.groups.rank, "DIVISOR": site.groups.divisor, "FIELDS": FIELDS, "ROWS": tile.rows,
        "BLOCK": tile.block(site.groups.rank), "num_warps": tile.num_warps,
    }  # fmt: skip


@triton.jit
def _gated_silu(
    frozen, xa, y, tiles, table, width, RANK: tl.constexpr, DIVISOR: tl.constexpr, FIELDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    rows = (tl.load(tile) + tl.arange(0, ROWS)).to(tl.int64)
    segment = tl.load(tile + 2)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has_row = (rows < tl.load(tile + 1))[:, None]
    inside = has_row & (columns < width)[None, :]
    places = rows[:, None] * (2 * width) + columns[None, :]
    gate = tl.load(frozen + places, mask=inside, other=0.0)
    up = tl.load(frozen + places + width, mask=inside, other=0.0)
    rank = tl.multiple_of(tl.load(table + segment * FIELDS + 8), DIVISOR)
    gate, up = _with_adapters(gate, up, xa, table, segment, rows, has_row, columns, width, rank, RANK, FIELDS)
    value = gate * tl.sigmoid(gate) * up
    tl.store(y + rows[:, None] * width + columns[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gated_silu_backward(
    dh, frozen, xa, dha, gradient, tiles, table, inner_table, width, RANK: tl.constexpr, DIVISOR: tl.constexpr,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    rows = (tl.load(tile) + tl.arange(0, ROWS)).to(tl.int64)
    segment = tl.load(tile + 2)
    has_row = (rows < tl.load(tile + 1))[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = has_row & (columns < width)[None, :]
    places = rows[:, None] * (2 * width) + columns[None, :]
    gate = tl.load(frozen + places, mask=inside, other=0.0)
    up = tl.load(frozen + places + width, mask=inside, other=0.0)
    of_h = dh + rows[:, None] * width + columns[None, :]
    d = tl.load(of_h, mask=inside, other=0.0)
    rank = tl.multiple_of(tl.load(table + segment * FIELDS + 8), DIVISOR)
    gate, up = _with_adapters(gate, up, xa, table, segment, rows, has_row, columns, width, rank, RANK, FIELDS)
    j = tl.arange(0, RANK)
    a = address_of(inner_table, segment, 0, d.dtype, FIELDS)
    left = tl.load(dha + rows[:, None] * RANK + j[None, :], mask=has_row, other=0.0)
    right = tl.load(
        a + j[:, None] * width + columns[None, :], mask=(j < rank)[:, None] & (columns < width)[None, :], other=0.0
    )
    d = tl.dot(left, right, d.to(tl.float32), input_precision="ieee")
    share = tl.sigmoid(gate)
    active = gate * share
    dgate = d * up * share * (1 + gate * (1 - share))
    tl.store(gradient + places, dgate.to(gradient.dtype.element_ty), mask=inside)
    tl.store(gradient + places + width, (d * active).to(gradient.dtype.element_ty), mask=inside)
    tl.store(of_h, (active * up).to(dh.dtype.element_ty), mask=inside)


@triton.jit
def _with_adapters(
    gate, up, xa, table, segment, rows, has_row, columns, width, rank, RANK: tl.constexpr, FIELDS: tl.constexpr
) -> Any:  # fmt: skip
    """Frozen gate and up, and x A^T B^T of each, in float32."""
    j = tl.arange(0, RANK)
    has_b = (columns < width)[:, None] & (j < rank)[None, :]
    places = columns[:, None] * rank + j[None, :]
    of_gate = tl.load(address_of(table, segment, 2, gate.dtype, FIELDS) + places, mask=has_b, other=0.0)
    of_up = tl.load(address_of(table, segment, 3, gate.dtype, FIELDS) + places, mask=has_b, other=0.0)
    places = xa + rows[:, None] * (2 * RANK) + j[None, :]
    xa_gate, xa_up = tl.load(places, mask=has_row, other=0.0), tl.load(places + RANK, mask=has_row, other=0.0)
    gate = tl.dot(xa_gate, tl.trans(of_gate), gate.to(tl.float32), input_precision="ieee")
    return gate, tl.dot(xa_up, tl.trans(of_up), up.to(tl.float32), input_precision="ieee")
