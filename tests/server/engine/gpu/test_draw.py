"""Tokens drawn by the kernels are those that the definition of each setting says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.server.engine.gpu.devices import DEVICE, SILENT_AS_A_GPU
from tinsmith.server.engine import sampler
from tinsmith.server.engine.gpu import draw as kernels
from tinsmith.types import SamplingParams

pytestmark = SILENT_AS_A_GPU

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.5),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9),
    SamplingParams(top_p=0.0),
    SamplingParams(top_k=1, temperature=3),
    SamplingParams(temperature=1e-3, top_p=0.9999),
    SamplingParams(temperature=1e-39),
    SamplingParams(temperature=1e60, top_k=1),
    SamplingParams(temperature=1e3, top_k=10**6),
]


def drawn(logits: Tensor, rows: list[SamplingParams], seeds: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities; keys are those of stream 2, position 7."""
    size = logits.shape[1]
    ints = torch.zeros(len(rows), 6, dtype=torch.int64)
    floats = torch.zeros(len(rows), 2, dtype=torch.float64)
    for index, (params, seed) in enumerate(zip(rows, seeds, strict=True)):
        top_k = min(params.top_k, size) if params.top_k > 0 else size
        ints[index] = torch.tensor([0, 40, int(np.uint64(seed).view(np.int64)), 2, 7, top_k])
        floats[index, 0] = sampler.inverse_of(params.temperature)
        floats[index, 1] = params.top_p
    state = kernels.DrawRows(ints.to(DEVICE), floats.to(DEVICE))
    out = torch.full((len(rows), 2), torch.nan, dtype=torch.float64, device=DEVICE)
    filtered = any(params.top_k > 0 or params.top_p < 1 for params in rows)
    kernels.draw(logits.to(DEVICE), state, out, filtered=filtered)
    after = state.ints.cpu()
    assert after[:, kernels.TOKEN].tolist() == out[:, 0].tolist()
    assert after[:, kernels.POSITION].tolist() == [41] * len(rows)
    assert after[:, kernels.NUM_DRAWN].tolist() == [8] * len(rows)
    return out[:, 0].long().cpu(), out[:, 1].cpu()


def by_definition(logits: Tensor, params: SamplingParams, key: Tensor) -> int:
    """In float64, token by token; ties are ordered by their id."""
    if params.temperature == 0:
        return int(logits.argmax())
    weights = ((logits.double() - logits.max().double()) / params.temperature).exp().tolist()
    order = sorted(range(len(weights)), key=lambda token: (-float(logits[token]), token))
    order = order[: params.top_k] if params.top_k > 0 else order
    wanted = params.top_p * sum(weights[token] for token in order)
    kept: set[int] = set()
    reached = 0.0
    for token in order:
        if kept and reached >= wanted:
            break
        kept.add(token)
        reached += weights[token]
    length = sampler.chunk_size(len(weights))
    starts = range(0, len(weights), length)
    noise = sampler.exponentials(key, len(starts) + length).tolist()
    of_chunks, of_tokens = noise[: len(starts)], noise[len(starts) :]
    members = [[token for token in range(start, start + length) if token in kept] for start in starts]
    sums = [sum(weights[token] for token in chunk) for chunk in members]
    winner = max(range(len(starts)), key=lambda chunk: sums[chunk] / of_chunks[chunk])
    return max(members[winner], key=lambda token: weights[token] / of_tokens[token % length])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("size", [97, kernels.TILE, kernels.TILE + 1])
def test_every_setting_draws_what_it_says(size: int, rounded: bool, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(size + rounded)
    logits = torch.from_numpy(rng.standard_normal((len(SETTINGS), size)) * 3).to(dtype)
    logits = logits.round() if rounded else logits
    logits[:, 40:60] = -torch.inf
    seeds = [2**64 - 1 - index for index in range(len(SETTINGS))]
    tokens, logprobs = drawn(logits, SETTINGS, seeds)
    keys = sampler.keys_of(seeds, 2, 7)
    expected = [by_definition(row, *how) for row, *how in zip(logits, SETTINGS, keys, strict=True)]
    assert tokens.tolist() == expected
    own = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, own, atol=1e-5, rtol=0)


def test_a_row_of_almost_nothing_and_a_broken_one() -> None:
    logits = torch.full((3, 5000), -torch.inf)
    logits[0, 4999] = 1.0
    logits[1] = 1.0
    logits[1, 70] = torch.nan
    logits[2, 3] = logits[2, 4500] = 0.0
    tokens, logprobs = drawn(logits, [SamplingParams()] * 3, [1, 2, 3])
    assert tokens[0] == 4999
    assert logprobs[0] == 0
    assert logprobs[1].isnan()
    assert tokens[2] in (3, 4500)
