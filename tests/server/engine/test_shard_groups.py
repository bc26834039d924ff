"""Groups with shards of any size: who shards at all, what a lost process does, and when memory runs out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.server.engine.faulty_member import FILLS_MEMORY, IS_KILLED, STOPS
from tests.server.engine.groups import DEVICE, group_of
from tests.server.engine.oracle import assert_close, gradients, new_adapter, policy_row
from tests.server.engine.test_engine_training import assert_same_outputs, run
from tests.server.engine.test_group import assert_trains_like, first_token, in_both
from tests.server.tiny_models import save_model
from tinsmith.errors import ConfigError
from tinsmith.server.engine import engine as engine_module
from tinsmith.server.engine import shard_group
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.gpu.rooms import layers_of, make_rooms, size_of_rooms
from tinsmith.server.engine.group import BrokenGroupError
from tinsmith.server.engine.model import ModelShape
from tinsmith.server.engine.room import Footprint
from tinsmith.server.engine.shard_group import Place, too_small
from tinsmith.server.engine.sharding import BrokenShardsError
from tinsmith.server.engine.weights import load_model


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> Engine:
    return Engine.open(tiny_folder, DEVICE, "float32", train_token_budget=64)


def test_three_train_like_one_engine_though_nothing_divides_by_three(tmp_path: Path) -> None:
    """With biases, norms of heads, a tied unembedding and layers without rotary embedding it is the same."""
    folder = save_model(tmp_path / "smollm3", "smollm3", attention_bias=True, mlp_bias=True)
    reference = Engine.open(folder, DEVICE, "float32", train_token_budget=64)
    with group_of(3, folder, shard_base="always") as group:
        assert_trains_like(group.engine, reference)


@pytest.mark.parametrize(("token", "seconds"), [(IS_KILLED, 60), (STOPS, 4)])
def test_a_lost_member_leaves_every_gradient_as_it_was(
    tiny_folder: Path, alone: Engine, token: int, seconds: float
) -> None:
    with group_of(3, tiny_folder, seconds=seconds, shard_base="always") as group:
        adapter = new_adapter(alone.model)
        run(group.engine, [policy_row(adapter, 12, "ppo", 0)])
        before = adapter.gradient.clone()
        rows = [policy_row(adapter, 60, "ppo", seed) for seed in range(6)]
        rows[2] = first_token(token, rows[2])
        with pytest.raises(BrokenShardsError, match="lost or does not answer"):
            group.engine.forward_backward(rows)
        assert torch.equal(adapter.gradient, before)
        with pytest.raises(BrokenGroupError):
            group.engine.forward_backward(rows[:1])
        with pytest.raises(BrokenGroupError):
            group.engine.model.hidden(*[torch.zeros(1, dtype=torch.int64)] * 2, attend=None, lora=None)  # type: ignore[arg-type]
        assert group.members[0].is_alive(), "it ends with its leader: who is lost first is the one to be judged by"


def test_when_memory_runs_out_anywhere_all_begin_again_with_smaller_micro_batches(
    tiny_folder: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = new_adapter(alone.model), new_adapter(alone.model)
    rows = [policy_row(ours, 120, "ppo", seed) for seed in range(12)]
    expected = run(alone, [replace(row, adapter=theirs) for row in rows])
    with group_of(2, tiny_folder, budget=1024, shard_base="always") as group:
        real, num_failed = engine_module.run_micro_batch, 0

        def fills_memory(model: Any, batch: Any, **options: Any) -> Any:
            nonlocal num_failed
            if batch.num_tokens > 600:
                num_failed += 1
                raise torch.OutOfMemoryError("full")
            return real(model, batch, **options)

        monkeypatch.setattr(engine_module, "run_micro_batch", fills_memory)
        assert_same_outputs(run(group.engine, rows), expected)
        assert num_failed == 1
        assert group.engine.train_token_budget == 512
        ours.clear_gradient()
        in_member = [first_token(FILLS_MEMORY, row) for row in rows]
        run(group.engine, in_member)
        assert group.engine.train_token_budget == 256
        ours.clear_gradient()
        run(group.engine, rows)
    assert_close(gradients(ours), gradients(theirs), rtol=1e-5)


def test_a_process_without_memory_for_the_others_sake_says_that_it_keeps_them_waiting(
    tiny_folder: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(layer: object) -> None:
        raise torch.OutOfMemoryError("full")

    with group_of(2, tiny_folder, shard_base="always") as group:
        monkeypatch.setattr("tinsmith.server.engine.sharding._Layer.gather", full)
        with pytest.raises(BrokenShardsError, match="full"):
            group.engine.forward_backward(in_both(new_adapter(alone.model), 5))
        assert group.engine.model.shards is not None
        assert group.engine.model.shards.keeps_others_waiting
        with pytest.raises(BrokenGroupError):
            group.engine.forward_backward(in_both(new_adapter(alone.model), 5))


def test_members_with_other_layers_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """Gathered, they are the same mixture everywhere."""
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] += 1e-3
    save_file(weights, other / "model.safetensors")
    with (
        pytest.raises(ConfigError, match=r"Rank 1 .* other weights"),
        group_of(2, tiny_folder, folder_of_members=other, shard_base="always"),
    ):
        pass


# --- who shards ------------------------------------------------------------------------------------------------------


def test_auto_shards_only_if_somebody_cannot_hold_the_whole_model(
    tiny_folder: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = new_adapter(alone.model)
    with group_of(2, tiny_folder, shard_base="auto") as group:
        assert group.engine.model.shards is None
        run(group.engine, in_both(adapter, 5))
    monkeypatch.setattr(shard_group, "available_memory", lambda device: 100_000)  # of the leader alone
    with group_of(2, tiny_folder, shard_base="auto") as group:
        assert group.engine.model.shards is not None
        run(group.engine, in_both(adapter, 5))


def test_processes_without_a_gpu_share_the_memory_of_their_machine() -> None:
    def places(*hosts: str, device: str = "cpu") -> list[Place]:
        return [Place(host, device, free=1000, needed=400) for host in hosts]

    assert too_small(places("a", "a")) is None
    assert too_small(places("a", "b", "b", "b")) == 1
    assert too_small(places("a", "a", "a", device="cuda")) is None
    assert too_small([*places("a", device="cuda"), Place("a", "cuda", free=440, needed=400)]) == 1


def test_the_footprint_is_that_of_the_tensors(alone: Engine, tiny_folder: Path) -> None:
    shape = ModelShape.from_config(json.loads((tiny_folder / "config.json").read_bytes()))
    matrices = sum(matrix.shape.numel() for layer in alone.model.layers for matrix in layer.matrices)
    embedding = alone.model.embedding.numel()
    on_gpu = Footprint(shape, torch.bfloat16, "cuda")
    rooms = size_of_rooms(shape)
    assert on_gpu.weights == 2 * (matrices + 2 * embedding + rooms)
    assert replace(on_gpu, shape=replace(shape, tie_embeddings=True)).weights == 2 * (matrices + embedding + rooms)
    assert replace(on_gpu, device_type="cpu").weights == 2 * (2 * matrices + 3 * embedding)
    assert on_gpu.at_least(0, 0) == on_gpu.weights
    assert on_gpu.at_least(None, None) == on_gpu.at_least(256, shape.max_context) > on_gpu.at_least(256, 0)


def test_the_room_for_adapters_is_what_they_are_given(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, DEVICE, torch.float32)
    make_rooms(model)
    given = [
        matrix._whole.numel() - matrix.shape.numel() for _, matrix in layers_of(model) if matrix._whole is not None
    ]
    assert sum(given) == size_of_rooms(model.shape) > 0


def test_a_long_context_takes_no_more_of_a_gpu_than_there_is(
    alone: Engine, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of a GPU is taken when the model is loaded; that of a CPU when it is used."""
    shape = replace(alone.model.shape, max_context=131072)
    gpu, cpu = (Footprint(shape, torch.bfloat16, device) for device in ("cuda", "cpu"))
    assert gpu.at_least(256, None) == gpu.at_least(256, 8192)
    assert cpu.at_least(256, None) == cpu.at_least(256, 131072)

    def tokens(free: int, device: str) -> int:
        monkeypatch.setattr(engine_module, "_free_for", lambda model: free)
        model = SimpleNamespace(shape=shape, compute_dtype=torch.bfloat16, device=torch.device(device))
        return engine_module.automatic_kv_tokens(model)  # type: ignore[arg-type]

    assert tokens(50000 * gpu.cache_per_token, "cuda") == 20000  # 40 %
    assert tokens(1000 * gpu.cache_per_token, "cuda") == 8192
    assert tokens(20000 * gpu.cache_per_token, "cpu") == 131072
