"""Optimizer steps follow torch.optim.AdamW, clipping included."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.optim import adamw_step
from tinsmith.server.engine.weights import load_model
from tinsmith.types import AdamParams


@pytest.fixture
def adapter(tiny_folder: Path) -> Adapter:
    return Adapter.create(load_model(tiny_folder, "cpu", torch.float32).shape, AdapterSpec(4, 0))


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(),
        AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.1),
        AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=0.5),
        AdamParams(learning_rate=1e-2, grad_clip_norm=1e6),
    ],
)
def test_ten_steps_follow_torch(adapter: Adapter, params: AdamParams) -> None:
    leaves = {name: tensor.requires_grad_() for name, tensor in adapter.state_dict().items()}
    reference = torch.optim.AdamW(
        leaves.values(),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        for name, gradient in adapter.layout.tensors(adapter.gradient).items():
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
            leaves[name].grad = gradient.clone()
        adapter.has_gradient = True
        limit = params.grad_clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), limit)
        reference.step()
        assert adamw_step(adapter, params) == {"grad_norm": pytest.approx(float(norm), rel=1e-5)}
        assert not adapter.has_gradient
    for name, tensor in adapter.state_dict().items():
        torch.testing.assert_close(tensor, leaves[name].detach(), rtol=1e-5, atol=1e-7)


def test_a_step_without_a_gradient_is_that_of_a_zero_gradient(adapter: Adapter) -> None:
    adapter.gradient.fill_(1.0)
    adamw_step(adapter, AdamParams())
    before = adapter.weights.clone()
    assert adamw_step(adapter, AdamParams()) == {"grad_norm": 0.0}
    assert bool((adapter.weights < before).all())  # momentum carries on


def test_a_gradient_that_is_not_finite_is_discarded_and_the_weights_are_kept(adapter: Adapter) -> None:
    before = adapter.weights.clone()
    adapter.gradient[3] = math.inf
    with pytest.raises(InvalidInputError, match="discarded"):
        adamw_step(adapter, AdamParams())
    assert torch.equal(adapter.weights, before)
    assert adamw_step(adapter, AdamParams()) == {"grad_norm": 0.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1.0),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -0.5),
    ],
)
def test_impossible_settings_are_refused_by_name(adapter: Adapter, name: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is {value}") as caught:
        adamw_step(adapter, AdamParams(**{name: value}))
    assert caught.value.field == f"adam_params.{name}"
