"""A training step with one adapter laid beside the frozen matrices gives what the plain layers give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.engine.gpu.devices import DEVICE, assert_near
from tests.server.engine.gpu.test_training_path import row
from tests.server.engine.oracle import new_adapter
from tests.server.tiny_models import save_model
from tinsmith.server.engine import blocks
from tinsmith.server.engine.adapters import Adapter
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.gpu import attention
from tinsmith.server.engine.gpu.attention import Shape

ON_GPU = DEVICE == "cuda"
HEADS = {"head_dim": 64, "hidden_size": 64} if ON_GPU else {}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        for name, shape in {"FORWARD": (16, 16), "QUERY_GRADIENTS": (16, 16), "KEY_GRADIENTS": (16, 16)}.items():
            monkeypatch.setattr(attention, name, Shape(*shape, 4, 2))


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    folder = save_model(tmp_path, request.param, num_hidden_layers=2, **HEADS)
    return Engine.open(folder, DEVICE, "bfloat16" if ON_GPU else "float32", train_token_budget=18, kv_tokens=128)


@pytest.fixture
def step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, ...]]:
    """Losses and gradient of one step, joined or not, and how many passes were joined."""
    joined_blocks = blocks.joined_blocks

    def run(adapter: Adapter, lengths: list[int], *, joined: bool) -> tuple[Any, ...]:
        monkeypatch.setattr(blocks, "can_join", lambda model: joined)
        passes = []

        def counting(*given: Any) -> Any:
            passes.append(chosen := joined_blocks(*given))
            return chosen

        monkeypatch.setattr("tinsmith.server.engine.model.joined_blocks", counting)
        adapter.clear_gradient()
        outputs = engine.forward_backward([row(adapter, length) for length in lengths])
        assert all(output.error is None for output in outputs)
        losses = torch.tensor([output.loss for output in outputs])
        return losses, adapter.gradient.clone(), sum(chosen is not None for chosen in passes)

    return run


def assert_same_step(run: Callable[..., tuple[Any, ...]], adapter: Adapter, lengths: list[int], passes: int) -> None:
    found, gradient, count = run(adapter, lengths, joined=True)
    expected, exact, count_of_plain = run(adapter, lengths, joined=False)
    assert (count, count_of_plain) == (passes, 0)
    assert float(exact.norm()) > 0
    assert_near(found, expected, tolerance=1e-2 if ON_GPU else None)
    assert_near(gradient, exact, tolerance=3e-2 if ON_GPU else 1e-5)


@pytest.mark.parametrize("engine", ["qwen3", "smollm3", "llama_biases"], indirect=True)
def test_one_step(engine: Engine, step: Callable[..., tuple[Any, ...]]) -> None:
    assert_same_step(step, new_adapter(engine.model, rank=20), [17, 7, 4], passes=2)


@pytest.mark.parametrize("engine", ["qwen3"], indirect=True)
def test_a_row_whose_layers_are_computed_twice(engine: Engine, step: Callable[..., tuple[Any, ...]]) -> None:
    assert_same_step(step, new_adapter(engine.model), [20], passes=1)


@pytest.mark.parametrize("engine", ["qwen3"], indirect=True)
def test_adapters_by_turns(engine: Engine, step: Callable[..., tuple[Any, ...]]) -> None:
    """The smaller one leaves nothing of the larger one in place."""
    for rank in (32, 4):
        assert_same_step(step, new_adapter(engine.model, rank=rank, seed=rank), [6], passes=1)


@pytest.mark.parametrize("engine", ["qwen3"], indirect=True)
def test_what_does_not_fit_goes_the_usual_way(engine: Engine, step: Callable[..., tuple[Any, ...]]) -> None:
    for adapter in (new_adapter(engine.model, rank=33), new_adapter(engine.model, train_mlp=False)):
        assert_same_step(step, adapter, [6], passes=0)
