"""The model computes what transformers computes, for every family, and so do its gradients with peft's adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.server.engine.oracle import assert_close, gradients, new_adapter, peft_tensors, with_peft
from tests.server.tiny_models import FAMILIES, ROPES, save_model
from tinsmith.errors import ConfigError
from tinsmith.server.engine.attention import PackedCausal
from tinsmith.server.engine.lora import LoraRows
from tinsmith.server.engine.model import ModelShape, rope_from_config
from tinsmith.server.engine.weights import load_model, read_config


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers_with_peft(family: str, tmp_path: Path) -> None:
    model = load_model(save_model(tmp_path, family), "cpu", torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    adapter = new_adapter(model)
    peft = with_peft(reference, adapter)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(40, 97, generator=torch.Generator().manual_seed(2))

    expected = peft(tokens[None]).logits[0]
    (expected.log_softmax(-1) * weights).sum().backward()

    rows = LoraRows([(0, 40, adapter)])
    logits = model.logits(model.hidden(tokens, torch.arange(40), PackedCausal([40]), rows), rows)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    (logits.log_softmax(-1) * weights).sum().backward()
    assert_close(gradients(adapter), {name: tensor.grad for name, tensor in peft_tensors(peft).items()})


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_rope_scaling_equals_transformers(family: str, rope: str, tmp_path: Path) -> None:
    model = load_model(save_model(tmp_path, family, rope), "cpu", torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 97, (120,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model.logits(model.hidden(tokens, torch.arange(120), PackedCausal([120]), None), None)
        torch.testing.assert_close(logits, reference(tokens[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_the_old_form_of_rope_settings_means_the_same_as_the_new() -> None:
    config = {"model_type": "llama", "max_position_embeddings": 256}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = config | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **scaling}}
    old = config | {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **scaling}}
    assert rope_from_config(old, 16) == rope_from_config(new, 16)


def test_recomputed_layers_give_the_same_gradients(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, "cpu", torch.float32)
    tokens = torch.arange(30)
    found = []
    for recompute in (False, True):
        adapter = new_adapter(model)
        rows = LoraRows([(0, 30, adapter)])
        hidden = model.hidden(tokens, tokens, PackedCausal([30]), rows, recompute=recompute)
        hidden.square().sum().backward()
        found.append(gradients(adapter))
    assert_close(found[1], found[0], rtol=1e-6)


def test_bfloat16_products_stay_near_float32(tiny_folder: Path) -> None:
    tokens = torch.arange(60)
    exact, mixed = (
        model.logits(model.hidden(tokens, tokens, PackedCausal([60]), None), None)
        for model in (load_model(tiny_folder, "cpu", dtype) for dtype in (torch.float32, torch.bfloat16))
    )
    assert mixed.dtype == torch.float32
    assert float((mixed - exact).square().mean().sqrt()) < 0.02 * float(exact.std())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "Sliding-window"),
        ({"quantization_config": {"bits": 4}}, "Quantised"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    change: dict[str, object], named: str, tiny_folder: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelShape.from_config(read_config(tiny_folder) | change)
