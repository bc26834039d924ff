"""Attention over the block tables of running sequences; the keys and values are read where they lie.

    PagedDecode     one new token for each of many sequences
    PagedPrefill    pieces of prompts, each behind what is already computed of it
    GatheredPrefill    the same with a GPU's kernel for packed sequences, on a copy of the past

A sequence's past is a list of runs of consecutive slots. Attention is computed run by run and joined by the weight of
each run (its log-sum-exp). Runs that several sequences share are read once for all of them. Runs that lie at equal
distances are one call over a strided view, padded to the longest; a call costs about as much as `CALL_COST_TOKENS`
tokens of padding, so nearby lengths are padded and distant ones are not.

Letters: T rows, H heads, K key/value heads, G = H / K queries per key/value head, D size of a head, N runs, L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from tinsmith.server.engine.attention import kernel_for_any_lengths
from tinsmith.server.engine.kv_cache import Ints, KvPool, Run
from tinsmith.server.engine.model import Attend

# Measured on two CPU cores with three key/value heads of 64: 60 microseconds a call, 8 tokens a microsecond.
CALL_COST_TOKENS = 512


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention to a part of the keys: q [N, K, R, D], k and v [N, K, L, D] -> [N, K, R, D], log-sum-exp [N, K, R]."""
    if q.device.type == "cpu":
        attended, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias
        )
        return attended, weight
    return attend_part_plainly(q, k, v, bias, causal)


def attend_part_plainly(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """The same by plain products, for devices whose fused attention does not tell the weight of a part."""
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
    if bias is not None:
        scores += bias
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), float("-inf"))
    weight = scores.logsumexp(-1)
    return (scores.sub_(weight.unsqueeze(-1)).exp_() @ v.float()).to(q.dtype), weight


@dataclass(frozen=True, slots=True)
class Strip:
    """Runs at equal distances, attended to in one call; each is read by the same number of sequences."""

    start: int
    pitch: int
    num_runs: int
    length: int
    used: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Which of the runs count: number within the strip, tokens in use, rows of the batch that read it."""

    @property
    def num_readers(self) -> int:
        return len(self.used[0][2])


def strips(rows: Sequence[Sequence[Run]], num_slots: int) -> list[Strip]:
    """Every run of every row, in few calls."""
    readers: dict[Run, list[int]] = {}
    for row, runs in enumerate(rows):
        for run in runs:
            readers.setdefault(run, []).append(row)
    found: list[Strip] = []
    by_kind = sorted(readers.items(), key=lambda item: (item[0][2], len(item[1]), item[0][0]))
    for (pitch, _), group in groupby(by_kind, key=lambda item: (item[0][2], len(item[1]))):
        found += _strips_of_one_kind(pitch, list(group), num_slots)
    return found


def _strips_of_one_kind(pitch: int, runs: list[tuple[Run, list[int]]], num_slots: int) -> Iterator[Strip]:
    """Grow a strip from run to run as long as its padding costs less than another call."""
    first, count, longest = runs[0][0][0], 0, 0
    used: list[tuple[int, int, tuple[int, ...]]] = []
    for (start, length, _), rows in runs:
        number = (start - first) // pitch if pitch else 0
        together = (number + 1) * max(longest, length)
        fits = pitch and start + max(longest, length) <= num_slots
        if used and not (fits and together <= count * longest + length + CALL_COST_TOKENS):
            yield Strip(first, pitch, count, longest, tuple(used))
            first, number, longest, used = start, 0, 0, []
        count, longest = number + 1, max(longest, length)
        used.append((number, length, tuple(rows)))
    yield Strip(first, pitch, count, longest, tuple(used))


class _Call:
    """One strip with the tensors that all layers need: which queries go in, and what is hidden from them."""

    def __init__(self, strip: Strip, pool: KvPool, num_rows: int) -> None:
        self.place = (strip.start, strip.pitch, strip.num_runs, strip.length)
        self.pool = pool
        self.num_readers = strip.num_readers
        queries = [0] * (strip.num_runs * strip.num_readers)
        lengths = [1] * strip.num_runs
        for number, length, rows in strip.used:
            queries[number * self.num_readers : (number + 1) * self.num_readers] = rows
            lengths[number] = length
        device, dtype = pool.storage.device, pool.storage.dtype
        self.queries = None if queries == list(range(num_rows)) else torch.tensor(queries, device=device)
        self.bias: Tensor | None = None
        if min(lengths) < strip.length:
            hidden = torch.arange(strip.length) >= torch.tensor(lengths)[:, None]
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self.bias = bias[:, None, None, :].to(device)

    def __call__(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, K, G, D] -> [runs * readers, K, G, D] and its log-sum-exp."""
        if self.queries is not None:
            q = q.index_select(0, self.queries)
        if self.num_readers > 1:
            q = q.unflatten(0, (-1, self.num_readers)).transpose(1, 2).flatten(2, 3)  # [runs, K, readers * G, D]
        attended, weight = attend_part(q, *self.pool.rows(layer, *self.place), self.bias)
        if self.num_readers > 1:
            attended = attended.unflatten(2, (self.num_readers, -1)).transpose(1, 2).flatten(0, 1)
            weight = weight.unflatten(2, (self.num_readers, -1)).transpose(1, 2).flatten(0, 1)
        return attended, weight


class PagedDecode:
    """Attention of one new token for each sequence; an `Attend`. Its key and value are written before it is read."""

    def __init__(self, pool: KvPool, slots: Tensor, rows: Sequence[Sequence[Run]]) -> None:
        self.pool = pool
        self.slots = slots
        planned = strips(rows, pool.num_slots)
        self.calls = [_Call(strip, pool, len(rows)) for strip in planned]
        self._join(planned, len(rows))

    def _join(self, planned: Sequence[Strip], num_rows: int) -> None:
        """Where the parts of each row will lie among the outputs of all calls."""
        places: list[list[int]] = [[] for _ in range(num_rows)]
        before = 0
        for strip in planned:
            for number, _, rows in strip.used:
                for index, row in enumerate(rows):
                    places[row].append(before + number * strip.num_readers + index)
            before += strip.num_runs * strip.num_readers
        depth = max(map(len, places))
        device = self.pool.storage.device
        self.order: Tensor | None = None
        self.absent: Tensor | None = None
        if depth > 1:
            padded = [[*row, *[row[0]] * (depth - len(row))] for row in places]
            self.order = torch.tensor(padded, device=device)
            present = torch.tensor([[True] * len(row) + [False] * (depth - len(row)) for row in places])
            self.absent = torch.zeros(present.shape).masked_fill_(~present, float("-inf"))[:, :, None, None].to(device)
        elif places != [[row] for row in range(before)]:
            self.order = torch.tensor(places, device=device)[:, 0]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, self.slots, k, v)
        num_kv_heads = k.shape[1]
        q = q.unflatten(1, (num_kv_heads, -1))  # [T, K, G, D]
        parts = [call(layer, q) for call in self.calls]
        attended = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts])
        if self.absent is not None and self.order is not None:
            weight = torch.cat([weight for _, weight in parts])
            share = (weight[self.order] + self.absent).softmax(1).unsqueeze(-1)  # [T, depth, K, G, 1]
            attended = (attended[self.order] * share).sum(1).to(q.dtype)
        elif self.order is not None:
            attended = attended.index_select(0, self.order)
        return attended.flatten(1, 2)


Piece: TypeAlias = tuple[int, Sequence[Run]]
"""How many tokens of a prompt are computed now, and where those before them lie."""


def prefill_attention(pool: KvPool, slots: Ints, pieces: Sequence[Piece], *, deterministic: bool = False) -> Attend:
    """For pieces of prompts, packed one after another, whose keys and values go to these slots."""
    if deterministic:
        from tinsmith.server.engine.gpu.fixed import FixedAttention

        return FixedAttention(pool, slots, pieces)
    if pool.storage.is_cuda and pool.storage.dtype == torch.bfloat16:
        return GatheredPrefill(pool, slots, pieces)
    return PagedPrefill(pool, torch.from_numpy(slots).to(pool.storage.device), pieces)


class GatheredPrefill:
    """Attention of pieces of prompts in one call for all of them; an `Attend`.

    What lies before a piece is copied next to it first: a pass over memory, where the attention itself takes many.
    """

    def __init__(self, pool: KvPool, slots: Ints, pieces: Sequence[Piece]) -> None:
        self.pool = pool
        device = pool.storage.device
        self.slots = torch.from_numpy(slots).to(device)
        before = [[np.arange(start, start + length) for start, length, _ in past] for _, past in pieces]
        own = np.split(slots, np.cumsum([length for length, _ in pieces])[:-1])
        seen = [np.concatenate([*past, piece]) for past, piece in zip(before, own, strict=True)]
        self.seen = torch.from_numpy(np.concatenate(seen)).to(device) if any(before) else None
        lengths, totals = [length for length, _ in pieces], [len(part) for part in seen]
        self.longest = max(lengths), max(totals)
        starts = np.cumsum([[0, 0], *zip(lengths, totals, strict=True)], axis=0, dtype=np.int32).T
        self.starts, self.starts_seen = (torch.from_numpy(row.copy()).to(device) for row in starts)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, self.slots, k, v)
        if self.seen is not None:
            k, v = (part.index_select(0, self.seen) for part in self.pool.layer(layer))
        return kernel_for_any_lengths()(q, k, v, self.starts, self.starts_seen, *self.longest)


class PagedPrefill:
    """Attention of pieces of prompts, packed one after another; an `Attend`.

    Each piece sees itself causally, and all of what was computed before it. Neighbours of one length that are the
    beginning of their prompts go through one call.
    """

    def __init__(self, pool: KvPool, slots: Tensor, pieces: Sequence[Piece]) -> None:
        self.pool = pool
        self.slots = slots
        self.groups: list[tuple[int, int, Sequence[Run]]] = []
        """Length of each piece, number of pieces, and what lies before them (always of one piece)."""
        for length, past in pieces:
            if self.groups and not past and self.groups[-1][0] == length and not self.groups[-1][2]:
                self.groups[-1] = (length, self.groups[-1][1] + 1, past)
            else:
                self.groups.append((length, 1, past))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, self.slots, k, v)
        sizes = [length * count for length, count, _ in self.groups]
        pieces = zip(self.groups, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        attended = [self._attend_piece(layer, count, past, *qkv) for (_, count, past), *qkv in pieces]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_piece(self, layer: int, count: int, past: Sequence[Run], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended, weight = _attend_itself(count, q, k, v)
        if not past:
            return attended
        parts, weights = [attended], [weight]
        queries = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0)  # [1, K, G * T, D]
        for start, length, _ in past:
            part, weight = attend_part(queries, *self.pool.rows(layer, start, 0, 1, length))
            parts.append(part[0].unflatten(1, (-1, len(q))).permute(2, 0, 1, 3).flatten(1, 2))
            weights.append(weight[0].unflatten(1, (-1, len(q))).permute(2, 0, 1).flatten(1, 2))
        share = torch.stack(weights).softmax(0).unsqueeze(-1)
        return (torch.stack(parts) * share).sum(0).to(q.dtype)


def _attend_itself(count: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention within `count` pieces of one length: [count * T, H, D] -> the same, log-sum-exp [.., H]."""
    num_kv_heads = k.shape[1]
    q = q.unflatten(1, (num_kv_heads, -1)).unflatten(0, (count, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    # The queries of a group read the same key: a repeated view, not a repeated tensor.
    k, v = (
        part.unflatten(0, (count, -1)).transpose(1, 2).flatten(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        for part in (k, v)
    )
    attended, weight = attend_part(q, k, v, causal=True)  # [count * K, G, T, D]
    attended = attended.unflatten(0, (count, -1)).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
    weight = weight.unflatten(0, (count, -1)).permute(0, 3, 1, 2).flatten(0, 1).flatten(1, 2)
    return attended, weight
