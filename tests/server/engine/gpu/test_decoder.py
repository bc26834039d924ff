"""Decoding with everything on the device gives what decoding step by step on the host gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.server.engine.gpu.devices import DEVICE, SILENT_AS_A_GPU
from tests.server.engine.oracle import new_adapter
from tests.server.tiny_models import save_model
from tinsmith.server.engine import generate
from tinsmith.server.engine.decode import PlainDecoder
from tinsmith.server.engine.generate import Generator, SampleDone
from tinsmith.server.engine.gpu.decoder import MAX_ROWS, DeviceDecoder, padded_rows
from tinsmith.server.engine.gpu.fixed import FixedDecoder
from tinsmith.server.engine.kv_cache import Blocks, KvPool
from tinsmith.server.engine.model import Transformer
from tinsmith.server.engine.running import Decoder, SampleWork
from tinsmith.server.engine.weights import load_model
from tinsmith.types import SamplingParams

pytestmark = SILENT_AS_A_GPU


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = save_model(Path(tmp_path_factory.mktemp("qwen3")), "qwen3", num_hidden_layers=1)
    return load_model(folder, DEVICE, torch.float32)


def on_device(model: Transformer, pool: KvPool, blocks: Blocks) -> Decoder:
    return DeviceDecoder(model, pool, blocks.block_size, blocks.num_blocks)


def on_host(model: Transformer, pool: KvPool, blocks: Blocks) -> Decoder:
    return PlainDecoder(model, pool)


def results(
    model: Transformer, works: Sequence[SampleWork], monkeypatch: pytest.MonkeyPatch, how: object
) -> dict[object, SampleDone]:
    """One request joins at every step; the first of them is cancelled at the fourth."""
    monkeypatch.setattr(generate, "_decoder_for", how)
    running, waiting = Generator(model, 1024, [2]), list(works)
    done: dict[object, SampleDone] = {}
    for step in range(200):
        if waiting:
            running.add(waiting.pop(0))
        elif not running.has_work():
            break
        if step == 4:
            running.cancel(works[0].key)
        done |= {result.key: result for result in running.step()}
    assert running.blocks.num_available == running.blocks.num_blocks
    return done


def deterministic(model: Transformer, pool: KvPool, blocks: Blocks) -> Decoder:
    return FixedDecoder(model, pool)


@pytest.mark.parametrize("how", [on_device, deterministic])
def test_requests_that_come_and_go_get_the_same_tokens(
    model: Transformer, how: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = [None, *(new_adapter(model, rank, rank).frozen_copy() for rank in (4, 2))]
    prompts = [np.random.default_rng(index).integers(3, 97, 14 + 5 * index).tolist() for index in range(4)]
    works = [
        SampleWork("cancelled", prompts[0], SamplingParams(max_tokens=40, seed=1, stop=[])),
        SampleWork("two samples", prompts[1], SamplingParams(max_tokens=5, seed=2, stop=[]), 2, adapters[1]),
        SampleWork("greedy", prompts[2], SamplingParams(max_tokens=6, temperature=0), 1, adapters[2],
                   topk_sample_logprobs=2),
        SampleWork("stops", prompts[3], SamplingParams(max_tokens=30, seed=4, stop=list(range(3, 50))), 1),
        SampleWork("one token", prompts[3], SamplingParams(max_tokens=1, seed=5, stop=[]), 1, adapters[1]),
    ]  # fmt: skip
    plain = results(model, works, monkeypatch, on_host)
    ours = results(dataclasses.replace(model, deterministic=how is deterministic), works, monkeypatch, how)
    assert ours.keys() == plain.keys() == {"two samples", "greedy", "stops", "one token"}
    for key, result in ours.items():
        expected = plain[key].response
        assert result.response is not None
        assert expected is not None
        for mine, theirs in zip(result.response.sequences, expected.sequences, strict=True):
            assert mine.tokens_np.tolist() == theirs.tokens_np.tolist()
            assert mine.stop_reason == theirs.stop_reason
            np.testing.assert_allclose(mine.logprobs_np, theirs.logprobs_np, atol=1e-5)
            if theirs.topk_logprobs_np is not None:
                assert mine.topk_logprobs_np is not None
                np.testing.assert_allclose(mine.topk_logprobs_np.logprobs, theirs.topk_logprobs_np.logprobs, atol=1e-5)


def test_a_graph_is_at_least_as_large_as_its_batch_and_there_are_few_sizes() -> None:
    sizes = [padded_rows(count) for count in range(1, MAX_ROWS + 1)]
    assert all(size >= count for count, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 40
    assert max(size - count for count, size in enumerate(sizes, start=1)) < 32
