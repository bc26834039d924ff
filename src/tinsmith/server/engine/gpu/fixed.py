"""Sampling in the deterministic mode: with the very kernels of training, so that both give the same bits.

    FixedAttention    pieces of sequences behind what was computed of them before, as training sees them
    FixedDecoder      decode steps

In training a row's attention goes over the blocks of its own sequence from the first one on, whatever else is in the
batch. So here the past of each sequence is laid out in a row as it is there, with the new queries in their places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tinsmith.server.engine import sampler
from tinsmith.server.engine.decode import PlainDecoder
from tinsmith.server.engine.gpu import attention
from tinsmith.server.engine.gpu import draw as drawing
from tinsmith.server.engine.gpu.decoder import MAX_ROWS, states_of
from tinsmith.server.engine.gpu.softmax import Softmax
from tinsmith.server.engine.kv_cache import BlockTable, Ints, KvPool
from tinsmith.server.engine.model import Attend
from tinsmith.server.engine.paged_attention import Piece
from tinsmith.server.engine.running import Batch, DrawnRows
from tinsmith.server.engine.transfer import upload_array

_NO_PAIR = 0
"""Pairs of tiles are for gradients alone."""


class FixedAttention:
    """An `Attend`, for pieces packed one after another whose keys and values go to these slots."""

    def __init__(self, pool: KvPool, slots: Ints, pieces: Sequence[Piece]) -> None:
        self.pool = pool
        device = pool.storage.device
        own = np.split(slots, np.cumsum([length for length, _ in pieces])[:-1])
        seen, places, tiles = [], [], []
        begin = 0
        for (length, past), new in zip(pieces, own, strict=True):
            before = [np.arange(start, start + count) for start, count, _ in past]
            first = sum(map(len, before))
            end = begin + first + length
            seen.append(np.concatenate([*before, new]))
            places.append(np.arange(begin + first, end))
            height = attention.FORWARD.queries
            offsets = range(first // height * height, first + length, height)
            tiles += [(begin, begin + offset, end, _NO_PAIR) for offset in offsets]
            begin = end
        self.slots, self.seen, self.places = (
            upload_array(array, device) for array in (slots, np.concatenate(seen), np.concatenate(places))
        )
        self.tiles = upload_array(np.array(tiles, np.int32), device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, self.slots, k, v)
        keys, values = (part.index_select(0, self.seen) for part in self.pool.layer(layer))
        queries = q.new_zeros(len(self.seen), *q.shape[1:]).index_copy_(0, self.places, q)
        attended, _ = attention.forward(queries, keys, values, self.tiles, attention.FORWARD)
        return attended.index_select(0, self.places)


class FixedDecoder(PlainDecoder):
    """Computes a step and waits for it, as where there is no kernel; but attention and drawing have a fixed order."""

    max_rows = MAX_ROWS
    call_cost_tokens = 0

    def draw(self, batch: Batch, logits: Tensor) -> DrawnRows:
        state = upload_array(states_of(batch.rows, logits.shape[1]), logits.device)
        drawn = torch.empty(len(batch.rows), 2, dtype=torch.float64, device=logits.device)
        drawing.draw(logits, drawing.DrawRows.of(state), drawn, filtered=any(map(sampler.is_filtered, batch.params)))
        tokens = drawn[:, 0].long()
        logprobs = Softmax(logits, tokens[:, None]).logprobs[:, 0]
        return DrawnRows(tokens.tolist(), logprobs.tolist(), batch.topk(logits.float()) if batch.num_topk else [])

    def _attend(self, slots: Ints, tables: Sequence[BlockTable], positions: Sequence[int]) -> Attend:
        pieces = [(1, table.runs(position)) for table, position in zip(tables, positions, strict=True)]
        return FixedAttention(self.pool, slots, pieces)
