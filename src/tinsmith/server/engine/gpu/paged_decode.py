"""Attention of one new token for each running sequence, over blocks that are found through tables on the device.

The keys and values of a sequence's past are read where they lie. Its new key and value go from registers to the cache
on the way, so nothing is read that this very call writes. With few sequences the past of each is cut into splits, so
that the whole GPU has something to read; a second kernel joins them by their weights.

Nothing here looks at the lengths on the host: a captured graph stays valid while sequences grow, come and go.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.server.engine.gpu.early import early, wait_for_others
from tinsmith.server.engine.kv_cache import KvPool

# Programs that keep every multiprocessor of a large GPU busy with loads in flight.
_ENOUGH_PROGRAMS = 528
_MAX_SPLITS = 16
# From so many programs on: tokens of a tile, and warps. Many programs hide each other's waiting; then short tiles waste
# less at the end of a sequence.
TILES = ((2048, (16, 1)), (1024, (32, 2)), (0, (64, 4)))
# tl.dot wants 16 rows at least; there are as many queries as share one key, and the rest is idle.
_MIN_DOT_ROWS = 16


class DeviceTables:
    """Attention over the blocks of rows whose tables and positions lie on the device; an `Attend`."""

    def __init__(self, pool: KvPool, block_size: int, tables: Tensor, positions: Tensor) -> None:
        self.pool = pool
        self.block_size = block_size
        self.tables = tables  # int32 [N, blocks of the longest context]
        self.positions = positions  # int64 [N]: how many tokens lie before the new one

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.pool.layer(layer)
        return attend(q, k, v, keys, values, self.tables, self.positions, self.block_size)


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    """q [N, H, D]; k, v [N, K, D] of the new tokens; keys, values [slots, K, D] -> [N, H, D]."""
    num_rows, num_heads, size = q.shape
    num_kv_heads = k.shape[1]
    splits = min(_MAX_SPLITS, triton.next_power_of_2(max(1, _ENOUGH_PROGRAMS // (num_rows * num_kv_heads))))
    out = torch.empty(num_rows, num_heads, size, dtype=q.dtype, device=q.device)
    if splits == 1:
        parts, weights = out, out
    else:
        parts = torch.empty(num_rows, num_heads, splits, size, dtype=torch.float32, device=q.device)
        weights = torch.empty(num_rows, num_heads, splits, dtype=torch.float32, device=q.device)
    grid = (num_rows, num_kv_heads, splits)
    tile, num_warps = next(shape for enough, shape in TILES if num_rows * num_kv_heads >= enough)
    strides = (q.stride(0), k.stride(0), v.stride(0), tables.stride(0), positions.stride(0))
    _attend_split[grid](
        q, k, v, keys, values, tables, positions, parts, weights, *strides,
        size**-0.5, num_heads // num_kv_heads, num_kv_heads, size, block_size,
        TILE=tile, SPLITS=splits, ROWS=max(_MIN_DOT_ROWS, triton.next_power_of_2(num_heads // num_kv_heads)),
        num_warps=num_warps, num_stages=2, **early(q.device),
    )  # fmt: skip
    if splits > 1:
        _join[(num_rows, num_heads)](parts, weights, out, num_heads, size, splits, num_warps=1, **early(q.device))
    return out


@triton.jit
def _attend_split(
    q, k, v, keys, values, tables, positions, parts, weights,
    q_stride, k_stride, v_stride, table_stride, position_stride,
    scale, GROUP: tl.constexpr, NUM_KV: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
) -> Any:  # fmt: skip
    """One sequence, the queries that share one key, one split of the past."""
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions + row * position_stride)
    dims = tl.arange(0, SIZE)
    members = tl.arange(0, ROWS)
    is_member = members < GROUP
    in_split = tl.cdiv(tl.cdiv(position + 1, SPLITS), TILE) * TILE
    start = split * in_split
    end = tl.minimum(start + in_split, position)

    places = row * q_stride + (head * GROUP + members[:, None]) * SIZE + dims[None, :]
    queries = tl.load(q + places, mask=is_member[:, None], other=0.0)
    new_key = tl.load(k + row * k_stride + head * SIZE + dims)
    new_value = tl.load(v + row * v_stride + head * SIZE + dims)
    # The split that the new token falls into begins with it; the others begin with nothing.
    has_new = (start <= position) & (position < start + in_split)
    score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
    peak = tl.where(has_new, score, float("-inf"))
    total = tl.where(has_new, tl.full([ROWS], 1.0, tl.float32), 0.0)
    mixed = tl.where(has_new, new_value.to(tl.float32)[None, :] + tl.zeros([ROWS, SIZE], tl.float32), 0.0)
    if has_new:
        block = tl.load(tables + row * table_stride + position // BLOCK).to(tl.int64)
        slot = (block * BLOCK + position % BLOCK) * (NUM_KV * SIZE) + head * SIZE + dims
        # A broken adapter's numbers must not lie in wait for the next user of the block.
        tl.store(keys + slot, tl.where(tl.abs(new_key.to(tl.float32)) < float("inf"), new_key, 0.0))
        tl.store(values + slot, tl.where(tl.abs(new_value.to(tl.float32)) < float("inf"), new_value, 0.0))

    for first in range(start, end, TILE):
        tokens = first + tl.arange(0, TILE)
        is_past = tokens < end
        block = tl.load(tables + row * table_stride + tokens // BLOCK, mask=is_past, other=0).to(tl.int64)
        slots = (block * BLOCK + tokens % BLOCK) * (NUM_KV * SIZE) + head * SIZE
        tile = slots[:, None] + dims[None, :]
        key_tile = tl.load(keys + tile, mask=is_past[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee") * scale
        scores = tl.where(is_past[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp(peak - new_peak)
        exps = tl.exp(scores - new_peak[:, None])
        value_tile = tl.load(values + tile, mask=is_past[:, None], other=0.0)
        total = total * shrink + tl.sum(exps, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(exps.to(value_tile.dtype), value_tile, input_precision="ieee")
        peak = new_peak

    heads = row * (NUM_KV * GROUP) + head * GROUP + members
    if SPLITS == 1:
        tl.store(parts + heads[:, None] * SIZE + dims[None, :], mixed / total[:, None], mask=is_member[:, None])
    else:
        whole = heads * SPLITS + split
        attended = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(parts + whole[:, None] * SIZE + dims[None, :], attended, mask=is_member[:, None])
        tl.store(weights + whole, tl.where(total > 0, peak + tl.log(total), float("-inf")), mask=is_member)


@triton.jit
def _join(parts, weights, out, num_heads, SIZE: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr) -> Any:
    """The splits of one query of one sequence, each by its share."""
    wait_for_others(EARLY)
    head = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, SIZE)
    weight = tl.load(weights + head * SPLITS + splits)
    share = tl.exp(weight - tl.max(weight, axis=0))
    share = share / tl.sum(share, axis=0)
    part = tl.load(parts + (head * SPLITS + splits)[:, None] * SIZE + dims[None, :])
    tl.store(out + head * SIZE + dims, tl.sum(part * share[:, None], axis=0))
