"""A training step whose layers use the kernels for adapters gives what the plain layers give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.server.engine.gpu.devices import DEVICE, assert_near
from tests.server.engine.oracle import new_adapter
from tests.server.tiny_models import save_model
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.gpu.lora import AddressBook
from tinsmith.server.engine.lora import LoraRows


def always_grouped(rows: LoraRows, name: str, x: torch.Tensor) -> Any:
    return AddressBook([sites for _, _, sites in rows.sites], x.device).grouped(name, rows.sites)


def never_grouped(rows: LoraRows, name: str, x: torch.Tensor) -> None:
    return None


def row(adapter: Any, length: int) -> TrainRow:
    tokens = np.random.default_rng(length).integers(3, 90, length + 1)
    inputs: dict[str, NDArray[Any]] = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
    return TrainRow(adapter=adapter, tokens=tokens[:-1], loss="cross_entropy", inputs=inputs)


@pytest.mark.parametrize("family", ["qwen3", "smollm3"])
def test_one_step_of_two_adapters(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path, family, num_hidden_layers=2)
    engine = Engine.open(folder, DEVICE, "float32", train_token_budget=64, kv_tokens=128)
    found = []
    for how in (always_grouped, never_grouped):
        monkeypatch.setattr(LoraRows, "grouped", how)
        adapters = [new_adapter(engine.model, seed=seed) for seed in (1, 2)]
        outputs = engine.forward_backward([row(adapters[index % 2], 5 + index) for index in range(4)])
        assert all(output.error is None for output in outputs)
        found.append((torch.tensor([output.loss for output in outputs]), [each.gradient for each in adapters]))
    (ours, gradients), (expected, exact) = found
    assert_near(ours, expected)
    for mine, reference in zip(gradients, exact, strict=True):
        assert float(reference.norm()) > 0
        assert_near(mine, reference)
