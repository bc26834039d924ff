"""The engine on the real 135M model, in float32: the numbers of transformers, peft and torch, and its own samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.server.engine.oracle import assert_close, gradients, new_adapter, peft_tensors, with_peft
from tests.support import embedded
from tinsmith.server.engine.adapters import Adapter, AdapterSpec, FrozenAdapter
from tinsmith.server.engine.attention import PackedCausal
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.lora import LoraRows
from tinsmith.server.engine.running import SampleWork
from tinsmith.types import AdamParams, SampleResponse, SamplingParams

TEXTS = [
    "A tinsmith makes and repairs things of tin.",
    "Solder runs where the heat is, not where the iron points; so warm the seam first, touch the wire to it, and wait.",
    "Why?",
    "Once the lid was on, the old man shook the can, listened, and set it down among the others by the wall.",
    "2 + 2 = 4",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded.embedded_folder(embedded.session_cache(tmp_path_factory))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.open(folder, "cpu", "float32", kv_tokens=8192)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def small_adapter(engine: Engine, seed: int = 1) -> Adapter:
    """All of it random, and small enough for the model to stay in its senses."""
    adapter = new_adapter(engine.model, rank=8, seed=seed)
    adapter.load_state_dict({name: tensor / 5 for name, tensor in adapter.state_dict().items()})
    return adapter


def reference(folder: Path, adapter: Adapter) -> torch.nn.Module:
    """In float64: in float32 the reference itself is off by more than we allow ourselves."""
    return with_peft(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter).double()


def row(adapter: Adapter, tokens: Sequence[int], backward: bool = True) -> TrainRow:
    weights = np.random.default_rng(len(tokens)).uniform(0.5, 1.5, len(tokens) - 1).astype(np.float32)
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": weights}
    return TrainRow(adapter, np.array(tokens[:-1]), "cross_entropy", inputs, backward=backward)


def target_logprobs(logits: torch.Tensor, row: TrainRow) -> torch.Tensor:
    targets = torch.from_numpy(row.inputs["target_tokens"])
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def loss_of(logprobs: torch.Tensor, row: TrainRow) -> torch.Tensor:
    return -(logprobs * torch.from_numpy(row.inputs["weights"])).sum()


def test_logits_logprobs_and_gradients_of_a_packed_batch_equal_transformers_with_peft(
    engine: Engine, folder: Path, prompts: list[list[int]]
) -> None:
    adapter = small_adapter(engine)
    peft = reference(folder, adapter)
    rows = [row(adapter, tokens) for tokens in prompts]
    packed = packed_logits(engine, rows, adapter)
    for each, logits, output in zip(rows, packed, engine.forward_backward(rows), strict=True):
        expected = peft(torch.from_numpy(each.tokens)[None]).logits[0]
        logprobs = target_logprobs(expected, each)
        loss_of(logprobs, each).backward()
        assert_close({"logits": logits}, {"logits": expected.detach().float()})
        np.testing.assert_allclose(output.logprobs, logprobs.detach(), rtol=1e-4, atol=1e-5)
    assert_close(gradients(adapter), {name: tensor.grad.float() for name, tensor in peft_tensors(peft).items()})


def packed_logits(engine: Engine, rows: Sequence[TrainRow], adapter: Adapter) -> list[torch.Tensor]:
    lengths = [len(each.tokens) for each in rows]
    tokens, positions = (
        torch.from_numpy(np.concatenate(parts))
        for parts in ([each.tokens for each in rows], [np.arange(length) for length in lengths])
    )
    lora = LoraRows([(0, len(tokens), adapter.frozen_copy())])
    with torch.inference_mode():
        hidden = engine.model.hidden(tokens, positions, PackedCausal(lengths), lora)
        return list(engine.model.logits(hidden, lora).split(lengths))


def test_ten_adam_steps_follow_torch(engine: Engine, folder: Path, prompts: list[list[int]]) -> None:
    adapter = engine.create_adapter(AdapterSpec(8, seed=0))
    first = adapter.state_dict()
    peft = reference(folder, adapter)
    tensors = peft_tensors(peft)
    optimizer = torch.optim.AdamW(tensors.values(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    each = row(adapter, prompts[0])
    for _ in range(10):
        loss = loss_of(target_logprobs(peft(torch.from_numpy(each.tokens)[None]).logits[0], each), each)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        optimizer.step()
        [output] = engine.forward_backward([each])
        engine.optim_step(adapter, AdamParams(learning_rate=3e-4, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0))
        assert output.loss == pytest.approx(loss.item(), rel=1e-4)
    last = {name: tensor.detach().float() for name, tensor in tensors.items()}
    assert distance(adapter.state_dict(), last) < 1e-3 * distance(last, first)


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    return math.hypot(*(float((ours[name] - tensor).norm()) for name, tensor in theirs.items()))


def sample(engine: Engine, *works: SampleWork) -> list[SampleResponse]:
    for each in works:
        engine.generator.add(each)
    responses: dict[object, SampleResponse] = {}
    while engine.generator.has_work():
        for done in engine.generator.step():
            assert done.response is not None, done.error
            responses[done.key] = done.response
    return [responses[each.key] for each in works]


def work(key: str, prompt: Sequence[int], adapter: FrozenAdapter | None, seed: int, max_tokens: int = 20) -> SampleWork:
    return SampleWork(key, prompt, SamplingParams(max_tokens=max_tokens, seed=seed, stop=[]), adapter=adapter)


def test_logprobs_of_sampled_tokens_equal_those_of_forward(engine: Engine, prompts: list[list[int]]) -> None:
    adapter = small_adapter(engine)
    works = [work(str(seed), prompt, adapter.frozen_copy(), seed) for seed, prompt in enumerate(prompts)]
    sampled = [response.sequences[0] for response in sample(engine, *works)]
    rows = [row(adapter, prompt + one.tokens, backward=False) for prompt, one in zip(prompts, sampled, strict=True)]
    for one, output in zip(sampled, engine.forward_backward(rows), strict=True):
        assert output.logprobs is not None
        np.testing.assert_allclose(one.logprobs_np, output.logprobs[-20:], rtol=0, atol=1e-4)


def test_a_seeded_sample_is_the_same_alone_and_among_eight_others(engine: Engine, prompts: list[list[int]]) -> None:
    first, second = (small_adapter(engine, seed).frozen_copy() for seed in (1, 2))
    adapters = [first, second, None, first]
    others = [
        work(f"other {index}", prompts[index % 5][: 1 + 7 * index], adapters[index % 4], index, 6 + 2 * index)
        for index in range(8)
    ]
    asked = work("asked", prompts[1], first, seed=7)
    [alone] = sample(engine, asked)
    *_, crowded, _ = sample(engine, *others[:7], asked, others[7])
    assert crowded.sequences[0].tokens == alone.sequences[0].tokens
    np.testing.assert_allclose(crowded.sequences[0].logprobs_np, alone.sequences[0].logprobs_np, atol=1e-4)
