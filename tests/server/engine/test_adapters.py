"""Adapters: what a seed means, what is trained, and what survives a copy or a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.server.engine.oracle import new_adapter, policy_row
from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.engine import Engine
from tinsmith.types import AdamParams


@pytest.fixture
def engine(tiny_folder: Path) -> Engine:
    return Engine.open(tiny_folder, "cpu", "float32")


def create(engine: Engine, **settings: int) -> Adapter:
    return engine.create_adapter(AdapterSpec(**({"rank": 4, "seed": 0} | settings)))


def test_a_seed_determines_the_first_weights(engine: Engine) -> None:
    first, second, other = (create(engine, seed=seed).state_dict() for seed in (7, 7, 8))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.lora_A"], other["lm_head.lora_A"])


def test_the_numbers_of_a_seed_stay_the_same_over_releases(engine: Engine) -> None:
    a = create(engine, seed=7).state_dict()["layers.0.q_proj.lora_A"]
    generator = torch.Generator().manual_seed(7)
    bound = 1 / math.sqrt(32)
    torch.testing.assert_close(a, torch.empty(4, 32).uniform_(-bound, bound, generator=generator), rtol=0, atol=0)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**70])
def test_any_whole_number_is_a_seed(engine: Engine, seed: int) -> None:
    create(engine, seed=seed)


def test_a_new_adapter_changes_nothing(engine: Engine) -> None:
    state = create(engine).state_dict()
    assert all(bool((tensor == 0).all()) for name, tensor in state.items() if name.endswith("lora_B"))
    assert all(bool((tensor != 0).any()) for name, tensor in state.items() if name.endswith("lora_A"))


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_the_flags_choose_what_is_trained(engine: Engine, flags: dict[str, bool], modules: set[str]) -> None:
    adapter = new_adapter(engine.model, **flags)
    assert {name.split(".")[-2] for name in adapter.state_dict()} == modules
    (output,) = engine.forward_backward([policy_row(adapter, 9, "cross_entropy", seed=1)])
    assert output.error is None
    assert all(bool((part != 0).any()) for part in adapter.layout.tensors(adapter.gradient).values())


@pytest.mark.parametrize("rank", [1, 3, 256])
def test_ranks_from_1_to_256_train(engine: Engine, rank: int) -> None:
    adapter = create(engine, rank=rank)
    engine.forward_backward([policy_row(adapter, 9, "cross_entropy", seed=1)])
    assert engine.optim_step(adapter, AdamParams())["grad_norm"] > 0


@pytest.mark.parametrize("rank", [0, -1, 257])
def test_other_ranks_are_refused_with_the_limits(rank: int) -> None:
    with pytest.raises(InvalidInputError, match=f"rank {rank} .* from 1 to 256") as caught:
        AdapterSpec(rank, 0)
    assert caught.value.field == "rank"


def test_an_adapter_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="nothing to train"):
        AdapterSpec(4, 0, train_attn=False, train_mlp=False, train_unembed=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_copy_keeps_its_weights_while_training_goes_on(tiny_folder: Path, dtype: str) -> None:
    engine = Engine.open(tiny_folder, "cpu", dtype)
    adapter = new_adapter(engine.model)
    frozen = adapter.frozen_copy()
    before = {name: site.a.clone() for name, site in frozen.sites.items()}
    assert all(torch.equal(site.a, adapter.sites[name].a) for name, site in frozen.sites.items())
    engine.forward_backward([policy_row(adapter, 9, "cross_entropy", seed=1)])
    engine.optim_step(adapter, AdamParams(learning_rate=0.1))
    assert all(torch.equal(site.a, before[name]) for name, site in frozen.sites.items())
    assert not any(torch.equal(site.a, before[name]) for name, site in adapter.sites.items())
    assert all(site.grad_a is None and site.a.dtype == engine.model.compute_dtype for site in frozen.sites.values())


def steps(engine: Engine, adapter: Adapter, seeds: range) -> None:
    for seed in seeds:
        engine.forward_backward([policy_row(adapter, 9, "cross_entropy", seed=seed)])
        engine.optim_step(adapter, AdamParams(learning_rate=0.01, weight_decay=0.1))


def test_resuming_with_the_optimizer_equals_an_uninterrupted_run(engine: Engine) -> None:
    whole, begun, resumed = create(engine), create(engine), create(engine, seed=9)
    steps(engine, whole, range(6))
    steps(engine, begun, range(3))
    engine.forward_backward([policy_row(begun, 9, "cross_entropy", seed=3)])  # a gradient not yet used is part of it
    resumed.load_state_dict(begun.state_dict())
    resumed.load_optimizer_state(begun.optimizer_state())
    engine.optim_step(resumed, AdamParams(learning_rate=0.01, weight_decay=0.1))
    steps(engine, resumed, range(4, 6))
    assert torch.equal(resumed.weights, whole.weights)


def test_loading_weights_alone_forgets_the_optimizer(engine: Engine) -> None:
    trained, fresh = create(engine), create(engine, seed=5)
    steps(engine, trained, range(2))
    state = trained.state_dict()
    trained.load_state_dict(state)
    fresh.load_state_dict(state)
    for adapter in (trained, fresh):
        steps(engine, adapter, range(2, 4))
    assert torch.equal(trained.weights, fresh.weights)


def test_a_saved_state_does_not_follow_the_adapter(engine: Engine) -> None:
    adapter = create(engine)
    weights, moments = adapter.state_dict(), adapter.optimizer_state()
    steps(engine, adapter, range(1))
    assert bool((weights["lm_head.lora_B"] == 0).all())
    assert bool((moments["exp_avg.lm_head.lora_B"] == 0).all())


def test_weights_of_another_rank_or_other_layers_are_refused_and_change_nothing(engine: Engine) -> None:
    adapter = create(engine)
    before = adapter.weights.clone()
    with pytest.raises(InvalidInputError, match="same base model and rank"):
        adapter.load_state_dict(create(engine, rank=8).state_dict())
    with pytest.raises(InvalidInputError, match="train_unembed"):
        adapter.load_state_dict(create(engine, train_unembed=False).state_dict())
    assert torch.equal(adapter.weights, before)
