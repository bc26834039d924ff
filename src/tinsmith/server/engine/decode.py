"""A decode step, operation by operation: what any device can do. A GPU has a decoder of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tinsmith.server.engine.kv_cache import BlockTable, Ints, KvPool
from tinsmith.server.engine.lora import linear
from tinsmith.server.engine.model import Attend, Transformer
from tinsmith.server.engine.paged_attention import CALL_COST_TOKENS, PagedDecode
from tinsmith.server.engine.running import Batch, DrawnRows, Outcome
from tinsmith.server.engine.transfer import upload_array


class PlainDecoder:
    """Computes a step and waits for it."""

    is_behind = False
    max_rows = sys.maxsize
    call_cost_tokens = CALL_COST_TOKENS

    def __init__(self, model: Transformer, pool: KvPool) -> None:
        self.model = model
        self.pool = pool

    def step(self, batch: Batch) -> Outcome | None:
        if not batch.rows:
            return None
        device = self.model.device
        positions = np.array([row.num_cached for row in batch.rows])
        tables = [row.table for row in batch.rows if row.table is not None]
        slots = np.array([table.slots[position] for table, position in zip(tables, positions, strict=True)])
        tokens = np.array([row.tokens[-1] for row in batch.rows])
        attend = self._attend(slots, tables, positions.tolist())
        hidden = self.model.hidden(upload_array(tokens, device), upload_array(positions, device), attend, batch.lora)
        return Outcome(batch, self.draw(batch, linear(hidden, self.model.head, batch.lora, "lm_head")))

    def draw(self, batch: Batch, logits: Tensor) -> DrawnRows:
        return batch.draw(logits.float())

    def _attend(self, slots: Ints, tables: Sequence[BlockTable], positions: Sequence[int]) -> Attend:
        runs = [table.runs(position + 1) for table, position in zip(tables, positions, strict=True)]
        return PagedDecode(self.pool, upload_array(slots, self.model.device), runs)
