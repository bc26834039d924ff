"""References for the engine's tests: transformers with peft carrying the same A and B, and helpers to compare."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from tinsmith.server.engine.adapter_facts import ALPHA
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.model import Transformer

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def with_peft(model: PreTrainedModel, adapter: Adapter) -> torch.nn.Module:
    """The reference model with the weights of an adapter of ours."""
    spec = adapter.spec
    modules = ATTENTION * spec.train_attn + MLP * spec.train_mlp + ["lm_head"] * spec.train_unembed
    model.config.tie_word_embeddings = False  # only silences a warning about merging
    peft = get_peft_model(model, LoraConfig(r=spec.rank, lora_alpha=ALPHA, target_modules=modules))
    with torch.no_grad():
        for name, tensor in peft_tensors(peft).items():
            tensor.copy_(adapter.state_dict()[name])
    return peft


def peft_tensors(peft: torch.nn.Module) -> dict[str, Tensor]:
    """peft's trainable tensors under our names."""
    named = {}
    for name, parameter in peft.named_parameters():
        if match := re.search(r"(?:(layers\.\d+\.).*?)?(\w+)\.(lora_[AB])\.default", name):
            layer, module, matrix = match.groups(default="")
            named[f"{layer}{module}.{matrix}"] = parameter
    return named


def randomise(adapter: Adapter, seed: int = 0, size: float = 0.05) -> Adapter:
    """Give B values too: with zeros, A has no gradient and mistakes stay hidden."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(tensor.shape, generator=generator) * size for name, tensor in adapter.state_dict().items()
    }
    adapter.load_state_dict(state)
    return adapter


def new_adapter(model: Transformer, rank: int = 4, seed: int = 1, **flags: bool) -> Adapter:
    adapter = Adapter.create(model.shape, AdapterSpec(rank, seed, **flags), model.device, model.compute_dtype)
    return randomise(adapter, seed)


def gradients(adapter: Adapter) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in adapter.layout.tensors(adapter.gradient).items()}


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], rtol: float = 1e-4) -> None:
    """Equal up to rtol of each tensor's own size: an element near zero owes its digits to its neighbours."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name],
            tensor,
            rtol=rtol,
            atol=rtol * float(tensor.abs().max()),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def policy_row(
    adapter: Adapter, length: int, loss: str, seed: int, width: int | None = None, **changes: Any
) -> TrainRow:
    """A random datum with what the loss reads."""
    rng = np.random.default_rng(seed)
    shape = (length,) if width is None else (length, width)
    inputs: dict[str, np.ndarray] = {"target_tokens": rng.integers(0, 97, shape)}
    if loss == "cross_entropy":
        inputs["weights"] = rng.normal(size=shape).astype(np.float32)
    else:
        inputs["logprobs"] = (-4.5 + 0.5 * rng.normal(size=shape)).astype(np.float32)
        inputs["advantages"] = rng.normal(size=shape).astype(np.float32)
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = (rng.random(shape) < 0.7).astype(np.float32)
    fields: dict[str, Any] = {"adapter": adapter, "tokens": rng.integers(0, 97, length), "loss": loss, "inputs": inputs}
    return TrainRow(**(fields | changes))
