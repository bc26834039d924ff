"""Sampling on one GPU: decode steps against transformers' generate, and against the time to read weights and cache.

Bars (H200): at batch 1 a step of 1.7B takes at most twice the time to read its weights; at batch 256 with one adapter
18 times the tokens/s of generate; a step of 8B at batch 64 at most 1.5 times the time to read weights and cache; eight
adapters in a batch give at least 0.8 of the tokens/s of the base model; 16 samples of a prompt prefill it once; and
the weights of a training step can be sampled from within 20 ms.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from _gpu import (
    DEVICE,
    Row,
    alone,
    cache_bytes_per_token,
    matrix_parameters,
    median_seconds,
    our_adapter,
    our_engine,
    peer_model,
    print_table,
    read_rate,
)

from tinsmith.server.engine.adapters import FrozenAdapter
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.running import SampleWork
from tinsmith.types import AdamParams, SamplingParams

VOCAB = 151936
PROMPT, NEW = 128, 128


def step_seconds(engine: Engine, batch: int, adapters: Sequence[FrozenAdapter] = ()) -> float:
    """The median of the steps in which the whole batch decodes; what came before is the warm-up."""
    running, rng = engine.generator, np.random.default_rng(batch)
    times: list[float] = []
    for turn in range(2):
        for index in range(batch):
            adapter = adapters[index * len(adapters) // batch] if adapters else None
            prompt = rng.integers(0, VOCAB, PROMPT).tolist()
            running.add(SampleWork((turn, index), prompt, SamplingParams(max_tokens=NEW, stop=[]), 1, adapter))
        times = []
        while running.has_work():
            before, begin = running.num_decoded_samples, time.perf_counter()
            assert all(done.error is None for done in running.step())
            if running.num_decoded_samples - before == batch:
                times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def generate_seconds(model: Any, batch: int) -> float:
    """Of one step of transformers' generate, prefill left out."""
    prompt = torch.randint(0, VOCAB, (batch, PROMPT), device=DEVICE)

    def generate(count: int) -> None:
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=True, pad_token_id=0)

    short, long = (median_seconds(lambda count=count: generate(count), rounds=3, warm_up=1) for count in (8, 40))
    return (long - short) / 32


def read_floor(name: str, batch: int, rate: float) -> float:
    """Seconds to read the weights once, and the cache of a batch that is half through."""
    return (2 * matrix_parameters(name) + batch * (PROMPT + NEW / 2) * cache_bytes_per_token(name)) / rate


def small_model(rate: float) -> list[Row]:
    one, base, single, eight, own_rows = _ours_of_small_model()
    peer, plain_peer = (_peer_of_small_model(adapter=adapter) for adapter in (True, False))
    floor = read_floor("1.7B", 1, rate)
    return [
        Row("decode 1.7B, batch 1", f"{one * 1e3:.2f} ms", f"reading {floor * 1e3:.2f} ms", floor / one, 0.5),
        Row("decode 1.7B, batch 256, one adapter", f"{256 / single:,.0f} tok/s",
            f"generate with peft {256 / peer:,.0f}", peer / single, 18),
        Row("the same against generate without an adapter", f"{256 / single:,.0f} tok/s",
            f"generate {256 / plain_peer:,.0f}", plain_peer / single, 18),
        Row("decode 1.7B, batch 256, eight adapters", f"{256 / eight:,.0f} tok/s",
            f"base model {256 / base:,.0f}", base / eight, 0.8),
        *own_rows,
    ]  # fmt: skip


def _ours_of_small_model() -> tuple[float, float, float, float, list[Row]]:
    with alone():
        engine = our_engine("1.7B", kv_tokens=2**18)
        adapters = [our_adapter(engine, seed).frozen_copy() for seed in range(8)]
        one = step_seconds(engine, 1)
        base, single, eight = (step_seconds(engine, 256, adapters[:count]) for count in (0, 1, 8))
        return one, base, single, eight, [prefill_of_shared_prompts(engine), fresh_weights(engine)]


def _peer_of_small_model(*, adapter: bool) -> float:
    with alone():
        return generate_seconds(peer_model("1.7B", adapter=adapter), 256)


def large_model(rate: float) -> list[Row]:
    with alone():
        engine = our_engine("8B", kv_tokens=2**17)
        step = step_seconds(engine, 64)
    floor = read_floor("8B", 64, rate)
    return [Row("decode 8B, batch 64", f"{step * 1e3:.2f} ms, {64 / step:,.0f} tok/s",
                f"reading {floor * 1e3:.2f} ms", floor / step, 1 / 1.5)]  # fmt: skip


def prefill_of_shared_prompts(engine: Engine) -> Row:
    running, rng = engine.generator, np.random.default_rng(7)
    before = running.num_prefilled_tokens
    for index in range(64):
        prompt = rng.integers(0, VOCAB, 1024).tolist()
        running.add(SampleWork(index, prompt, SamplingParams(max_tokens=16, stop=[]), 16))
    while running.has_work():
        assert all(done.error is None for done in running.step())
    computed = running.num_prefilled_tokens - before
    return Row("64 prompts x 16 samples, 1,024 tokens each", f"{computed:,} prompt tokens computed",
               f"{64 * 1024:,} in the prompts", 64 * 1024 / computed, 1)  # fmt: skip


def fresh_weights(engine: Engine) -> Row:
    """From the end of an optimizer step to a sampler's copy of the weights."""
    adapter = our_adapter(engine, 99)
    times = []
    for _ in range(7):
        engine.optim_step(adapter, AdamParams(learning_rate=1e-4))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        adapter.frozen_copy()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    took = statistics.median(times)
    return Row("weights of a step to the sampler", f"{took * 1e3:.1f} ms", "", 0.02 / took, 1)


def main() -> None:
    rate = read_rate()
    cases = {"1.7b": small_model, "8b": large_model}
    rows = [row for name, case in cases.items() if name in (sys.argv[1:] or cases) for row in case(rate)]
    print_table(rows, f"copies {rate / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
