"""Decode steps on a GPU: one captured graph is a whole step, from the last tokens to the next ones.

Every row of the batch has its state on the device: its last token, its position, its blocks, its seed and filters. A
step reads and advances it there, so the next step can be launched before the host has seen what the last one drew;
while the GPU computes, the host takes what came before, ends samples and admits others. A sample that stopped is
found out one step late: that step computed one token too many for it, which is dropped.

Graphs are captured when a batch of their size first comes up. Rows beyond those in use read and write a spare block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from tinsmith.server.engine import sampler
from tinsmith.server.engine.gpu import draw as drawing
from tinsmith.server.engine.gpu.paged_decode import DeviceTables
from tinsmith.server.engine.gpu.slot_lora import AdapterSlots, Ranks, SlotLora, tiles_of
from tinsmith.server.engine.kv_cache import Ints, KvPool
from tinsmith.server.engine.lora import linear
from tinsmith.server.engine.model import Transformer
from tinsmith.server.engine.running import Batch, DrawnRows, Outcome, Sample, TopkRow
from tinsmith.server.engine.transfer import upload_array

MAX_ROWS = 512


@dataclass(frozen=True)
class _Kind:
    """What a graph was captured for."""

    num_rows: int
    num_tiles: int
    ranks: Ranks | None
    units: int
    filtered: bool


@dataclass(frozen=True, eq=False)
class _Launched:
    batch: Batch
    drawn: Tensor
    topk: list[TopkRow]
    event: torch.cuda.Event | None


class DeviceDecoder:
    """Decodes batches of up to MAX_ROWS rows; what a step drew is returned by the step after it."""

    max_rows = MAX_ROWS
    call_cost_tokens = 0

    def __init__(self, model: Transformer, pool: KvPool, block_size: int, spare_block: int) -> None:
        self.model = model
        self.pool = pool
        self.block_size = block_size
        self.spare_block = spare_block
        device = model.device
        num_blocks = -(-model.shape.max_context // block_size) + 1
        self._state = torch.zeros(MAX_ROWS, 8, dtype=torch.int64, device=device)
        self._rows = drawing.DrawRows.of(self._state)
        self._tables = torch.full((MAX_ROWS, num_blocks), spare_block, dtype=torch.int32, device=device)
        self._drawn = torch.zeros(MAX_ROWS, 2, dtype=torch.float64, device=device)
        self._slots = AdapterSlots(model, MAX_ROWS)
        self._tiles = torch.zeros(2 * MAX_ROWS, 3, dtype=torch.int64, device=device)
        self._batch: Batch | None = None
        self._kind = _Kind(0, 0, None, 0, False)
        self._launched: _Launched | None = None
        self._graphs: dict[_Kind, tuple[Callable[[], None], Tensor]] = {}
        self._pool_of_graphs = None

    @property
    def is_behind(self) -> bool:
        return self._launched is not None

    def step(self, batch: Batch) -> Outcome | None:
        """Launch a step for these rows, if there are any; returns what the step before drew."""
        launched = self._launch(batch) if batch.rows else None
        before, self._launched = self._launched, launched
        if before is None:
            return None
        if before.event is not None:
            before.event.synchronize()
        tokens, logprobs = before.drawn.numpy().T
        return Outcome(before.batch, DrawnRows(tokens.astype(np.int64).tolist(), logprobs.tolist(), before.topk))

    def _launch(self, batch: Batch) -> _Launched:
        if batch is not self._batch:
            self._arrange(batch)
        count = len(batch.rows)
        replay, logits = self._graph(self._kind)
        replay()
        topk = batch.topk(logits[:count].float()) if batch.num_topk else []
        drawn = torch.empty(count, 2, dtype=torch.float64, pin_memory=self.model.device.type == "cuda")
        drawn.copy_(self._drawn[:count], non_blocking=True)
        event = None
        if self.model.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return _Launched(batch, drawn, topk, event)

    def draw(self, batch: Batch, logits: Tensor) -> DrawnRows:
        return batch.draw(logits.float())

    # --- rows ---

    def _arrange(self, batch: Batch) -> None:
        """Bring the rows into the order of the batch: those that go on from where they are, new ones from the host."""
        rows, device = batch.rows, self.model.device
        before = {} if self._batch is None else {id(row): index for index, row in enumerate(self._batch.rows)}
        source = np.array([before.get(id(row), -1) for row in rows])
        if (source >= 0).any() and (source != np.arange(len(source))).any():
            order = upload_array(np.maximum(source, 0), device)
            self._state[: len(rows)] = self._state.index_select(0, order)
            self._tables[: len(rows)] = self._tables.index_select(0, order)
        if len(new := np.flatnonzero(source < 0)):
            self._write(new, [rows[index] for index in new])
        self._kind = self._kind_of(batch)
        self._state[len(rows) : self._kind.num_rows] = 0
        self._tables[len(rows) : self._kind.num_rows] = self.spare_block
        self._batch = batch

    def _write(self, places: np.ndarray, rows: Sequence[Sample]) -> None:
        device = self.model.device
        blocks = [row.table.blocks for row in rows if row.table is not None]
        tables = np.full((len(rows), max(map(len, blocks))), self.spare_block, np.int32)
        for index, own in enumerate(blocks):
            tables[index, : len(own)] = own
        to = upload_array(places, device)
        self._state.index_copy_(0, to, upload_array(states_of(rows, self.model.shape.vocab_size), device))
        self._tables[:, : tables.shape[1]].index_copy_(0, to, upload_array(tables, device))

    def _kind_of(self, batch: Batch) -> _Kind:
        adapters, num_rows = batch.adapters, padded_rows(len(batch.rows))
        num_tiles, ranks, units = 0, None, 0
        if adapters:
            segments = [*batch.segments, (len(batch.rows), num_rows, None)]
            tiles = tiles_of(segments, dict(zip(adapters, self._slots.place(adapters), strict=True)))
            num_tiles = triton.next_power_of_2(len(tiles))
            self._tiles[: len(tiles)] = upload_array(tiles, self.model.device)
            self._tiles[len(tiles) : num_tiles] = 0
            ranks = Ranks.of([adapter.spec.rank for adapter in adapters])
            units = triton.next_power_of_2(self._slots.settle(adapters))
        return _Kind(num_rows, num_tiles, ranks, units, any(map(sampler.is_filtered, batch.params)))

    # --- graphs ---

    def _graph(self, kind: _Kind) -> tuple[Callable[[], None], Tensor]:
        """How to run a step of this kind, and where its logits will lie."""
        if kind not in self._graphs:
            self._graphs[kind] = self._captured(kind)
        return self._graphs[kind]

    def _captured(self, kind: _Kind) -> tuple[Callable[[], None], Tensor]:
        if self.model.device.type != "cuda":  # the interpreter, in tests
            logits = torch.empty(kind.num_rows, self.model.shape.vocab_size, dtype=self.model.compute_dtype)
            return lambda: logits.copy_(self._compute(kind)), logits
        # Kernels are compiled and libraries set up by a first run, which must leave no trace.
        state = self._state.clone()
        try:
            self._compute(kind)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool_of_graphs):
                logits = self._compute(kind)
        finally:
            self._state.copy_(state)
        self._pool_of_graphs = self._pool_of_graphs or graph.pool()
        return graph.replay, logits

    def _compute(self, kind: _Kind) -> Tensor:
        """One step: the rows' last tokens go in, their next ones are drawn and put in their place."""
        count = kind.num_rows
        rows = self._rows.first(count)
        tokens, positions = rows.ints[:, drawing.TOKEN], rows.ints[:, drawing.POSITION]
        attend = DeviceTables(self.pool, self.block_size, self._tables[:count], positions)
        lora = None
        if kind.ranks is not None:
            lora = SlotLora(self._slots, self._tiles[: kind.num_tiles], kind.ranks, kind.units, self.model.shape)
        hidden = self.model.hidden(tokens, positions, attend, lora)
        logits = linear(hidden, self.model.head, lora, "lm_head")
        drawing.draw(logits, rows, self._drawn[:count], filtered=kind.filtered)
        return logits


def padded_rows(count: int) -> int:
    """The size of the graph that serves this many rows."""
    for end, pitch in ((8, 1), (16, 4), (64, 8), (256, 16), (MAX_ROWS, 32)):
        if count <= end:
            return -(-count // pitch) * pitch
    raise ValueError(f"{count} rows are more than a batch holds ({MAX_ROWS})")


def states_of(rows: Sequence[Sample], vocab_size: int) -> Ints:
    """What the kernels that draw know of each row at first; see `DrawRows`."""
    state = np.zeros((len(rows), 8), np.int64)
    for index, row in enumerate(rows):
        params = row.request.work.params
        seed = int(np.uint64(row.request.seed).view(np.int64))
        top_k = sampler.top_k_of(params, vocab_size)
        last_token = row.tokens[-1] if row.tokens else 0
        state[index, :6] = last_token, row.num_cached, seed, row.index, len(row.tokens), top_k
        state[index, 6:].view(np.float64)[:] = sampler.inverse_of(params.temperature), params.top_p
    return state
