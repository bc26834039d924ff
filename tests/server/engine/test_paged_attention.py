"""Attention over scattered, shared and padded runs equals attention over each sequence alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tests.server.tiny_models import make_model
from tinsmith.server.engine.kv_cache import BlockTable, KvPool, Run
from tinsmith.server.engine.model import ModelShape
from tinsmith.server.engine.paged_attention import PagedDecode, PagedPrefill, attend_part, attend_part_plainly, strips

SIZE = 4
NUM_BLOCKS = 64
SHAPE = ModelShape.from_config(make_model().config.to_dict())


def filled_pool(seed: int) -> KvPool:
    pool = KvPool(SHAPE, NUM_BLOCKS * SIZE, torch.float32, torch.device("cpu"))
    pool.storage.copy_(torch.randn(pool.storage.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def attend_slowly(pool: KvPool, layer: int, q: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    """One query [H, D] over its slots."""
    k, v = pool.storage[layer][:, torch.from_numpy(slots)].transpose(1, 2)
    return functional.scaled_dot_product_attention(q[:, None], k, v, enable_gqa=True)[:, 0]


@st.composite
def tables(draw: st.DrawFn) -> list[tuple[BlockTable, int]]:
    """Sequences with tables of any order, some of which share their beginning."""
    free = draw(st.permutations(range(NUM_BLOCKS)))
    if draw(st.booleans()):
        free = sorted(free)
    shared = [free.pop(0) for _ in range(draw(st.integers(1, 6)))]
    found = []
    for _ in range(draw(st.integers(1, 8))):
        own = [free.pop(0) for _ in range(draw(st.integers(1, 6)))]
        blocks = [*shared, *own] if draw(st.booleans()) else own
        least = (len(blocks) - len(own)) * SIZE + 1
        found.append(
            (
                BlockTable(np.array(blocks[: -len(own)], int), np.array(own), SIZE),
                draw(st.integers(least, len(blocks) * SIZE)),
            )
        )
    return found


@settings(deadline=None)
@given(tables(), st.integers(0, 3))
def test_decoding_many_sequences_equals_decoding_each_alone(rows: list[tuple[BlockTable, int]], seed: int) -> None:
    pool = filled_pool(seed)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(rows), 4, 8, generator=generator)
    k, v = torch.randn(2, len(rows), 2, 8, generator=generator)
    last = [int(table.slots[length - 1]) for table, length in rows]
    attend = PagedDecode(pool, torch.tensor(last), [table.runs(length) for table, length in rows])
    attended = attend(1, q, k, v)
    expected = [attend_slowly(pool, 1, q[row], table.slots[:length]) for row, (table, length) in enumerate(rows)]
    torch.testing.assert_close(attended, torch.stack(expected))


@settings(deadline=None)
@given(tables())
def test_every_token_of_every_run_is_read_by_its_rows_and_nobody_else(rows: list[tuple[BlockTable, int]]) -> None:
    runs = [table.runs(length) for table, length in rows]
    read: list[list[int]] = [[] for _ in rows]
    for strip in strips(runs, NUM_BLOCKS * SIZE):
        assert strip.start + (strip.num_runs - 1) * strip.pitch + strip.length <= NUM_BLOCKS * SIZE
        for number, length, readers in strip.used:
            assert length <= strip.length
            for row in readers:
                start = strip.start + number * strip.pitch
                read[row] += range(start, start + length)
    assert [sorted(slots) for slots in read] == [sorted(table.slots[:length].tolist()) for table, length in rows]


def test_neighbours_of_like_length_are_one_call_and_a_far_longer_one_is_not() -> None:
    pitch = 4096
    runs: list[list[Run]] = [[(row * pitch, 100 + row, pitch)] for row in range(8)]
    assert [strip.num_runs for strip in strips(runs, 16 * pitch)] == [8]
    runs.append([(8 * pitch, 4000, pitch)])
    assert [strip.num_runs for strip in strips(runs, 16 * pitch)] == [8, 1]


def test_samples_of_one_prompt_read_it_in_one_call() -> None:
    prompt: Run = (0, 512, 512)
    runs: list[list[Run]] = [[prompt, (1024 + row * 32, 7, 32)] for row in range(8)]
    assert [(strip.num_runs, strip.num_readers) for strip in strips(runs, 4096)] == [(8, 1), (1, 8)]


@pytest.mark.parametrize("pasts", [[0], [0, 0, 0], [5], [0, 9, 0, 0, 3]])
def test_a_piece_of_a_prompt_sees_its_past_and_itself(pasts: list[int]) -> None:
    pool = filled_pool(0)
    free = iter(np.random.default_rng(0).permutation(NUM_BLOCKS))
    pieces = [
        (BlockTable(np.array([], int), np.array([next(free) for _ in range(5)]), SIZE), past, 6) for past in pasts
    ]
    slots = np.concatenate([table.slots[past : past + length] for table, past, length in pieces])
    q, k, v = torch.randn(len(slots), 4, 8), torch.randn(len(slots), 2, 8), torch.randn(len(slots), 2, 8)
    runs = [(length, table.runs(past)) for table, past, length in pieces]
    attended = PagedPrefill(pool, torch.from_numpy(slots), runs)(2, q, k, v)
    expected = [
        attend_slowly(pool, 2, q[6 * piece + token], table.slots[: past + token + 1])
        for piece, (table, past, length) in enumerate(pieces)
        for token in range(length)
    ]
    torch.testing.assert_close(attended, torch.stack(expected))


@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_form_of_attention_equals_the_fast_one(causal: bool) -> None:
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    bias = None if causal else torch.randn(2, 1, 1, 5)
    torch.testing.assert_close(attend_part(q, k, v, bias, causal), attend_part_plainly(q, k, v, bias, causal))
