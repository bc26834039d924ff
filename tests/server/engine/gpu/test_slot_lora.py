"""Each row gets what its own adapter adds, whatever the others use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.server.engine.gpu.devices import DEVICE, assert_near, normal
from tests.server.engine.oracle import new_adapter
from tests.server.tiny_models import save_model
from tinsmith.server.engine.adapters import FrozenAdapter
from tinsmith.server.engine.elementwise import gated_silu
from tinsmith.server.engine.gpu.slot_lora import AdapterSlots, Ranks, SlotLora, tiles_of
from tinsmith.server.engine.lora import LoraRows, Segment, add_looped
from tinsmith.server.engine.model import Transformer
from tinsmith.server.engine.steps import turn_heads
from tinsmith.server.engine.weights import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return load_model(save_model(Path(tmp_path_factory.mktemp("qwen3")), "qwen3"), DEVICE, torch.float32)


@pytest.fixture(scope="module")
def adapters(model: Transformer) -> list[FrozenAdapter]:
    kinds = (4, {}), (100, {}), (8, {"train_attn": False})
    return [new_adapter(model, rank, rank, **flags).frozen_copy() for rank, flags in kinds]


@pytest.mark.parametrize("below", [True, False], ids=["below the matrices", "apart"])
def test_rows_of_several_adapters_and_of_none(model: Transformer, adapters: list[FrozenAdapter], below: bool) -> None:
    segments: list[Segment] = [(0, 3, adapters[0]), (3, 5, None), (5, 25, adapters[1]), (25, 26, adapters[2])]
    slots = AdapterSlots(model, 4)
    tiles = tiles_of(segments, dict(zip(adapters, slots.place(adapters), strict=True)))
    padded = torch.zeros(8, 3, dtype=torch.int64)
    padded[: len(tiles)] = torch.from_numpy(tiles)
    units = slots.settle(adapters) if below else 0
    ours, reference = SlotLora(slots, padded.to(DEVICE), Ranks.of([4, 100, 8]), units, model.shape), LoraRows(segments)
    layer = model.layers[1]
    for name, matrix in (("qkv_proj", layer.qkv), ("o_proj", layer.output), ("gate_up_proj", layer.gate_up),
                         ("down_proj", layer.down), ("lm_head", model.head)):  # fmt: skip
        name = name if name == "lm_head" else f"layers.1.{name}"
        x = normal(26, matrix.shape[1])
        y = matrix.product(x)
        add_looped(y, x, reference.at(name))
        assert_near(ours.linear(x, matrix, name), y)
        if name.endswith("gate_up_proj"):
            assert_near(ours.gated_silu(x, matrix, name), gated_silu(y.double()))
        if name.endswith("qkv_proj"):
            angles = normal(26, 1, model.shape.head_dim // 2)
            how = (
                model.shape.num_heads,
                model.shape.num_kv_heads,
                layer.qk_norm,
                model._eps,
                (angles.cos(), angles.sin()),
            )
            expected = turn_heads(y.view(26, -1, model.shape.head_dim), *how)
            for heads, plain in zip(ours.turned_heads(x, matrix, name, *how), expected, strict=True):
                assert_near(heads, plain)


def test_an_adapter_keeps_its_slot_until_another_needs_it(model: Transformer, adapters: list[FrozenAdapter]) -> None:
    slots = AdapterSlots(model, 2)
    first, second = slots.place(adapters[:2])
    assert {first, second} == {0, 1}
    assert slots.place([adapters[1]]) == [second]
    assert slots.place([adapters[1], adapters[2]]) == [second, first]
    assert slots.ranks.tolist()[first] == adapters[2].spec.rank


def test_adapters_that_do_not_fit_below_the_matrices_are_multiplied_apart(model: Transformer) -> None:
    slots = AdapterSlots(model, 16)
    many = [new_adapter(model, 64, seed).frozen_copy() for seed in range(5)]
    assert slots.settle(many) == 0
    assert slots.settle(many[:4]) == 8
    assert slots.settle(many[3:4]) == 8  # it stays where it is
    assert slots.settle(many[3:]) == 4
