"""A group with shards of the layers trains and samples like one engine, and holds its part of the layers alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
import torch

from tests.server.engine.faulty_member import FAILS
from tests.server.engine.groups import DEVICE, Started, group_of
from tests.server.engine.oracle import assert_close, gradients, new_adapter, policy_row
from tests.server.engine.test_engine_training import assert_same_outputs, bad, failing, mixed_rows, run
from tests.server.engine.test_generate import OTHER, PROMPT, sample, work
from tests.server.engine.test_group import in_both, listening_addresses
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.batch import MicroBatch, TrainRow, check_row
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.group import MemberError
from tinsmith.server.engine.products import Matrix
from tinsmith.server.engine.sharding import ShardedLayers, Turns
from tinsmith.server.engine.train import RowOutput
from tinsmith.types import AdamParams

STEPS = 20
UNEMBEDDING_ALONE = {"train_attn": False, "train_mlp": False}


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> Engine:
    return Engine.open(tiny_folder, DEVICE, "float32", train_token_budget=64)


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Iterator[Started]:
    with group_of(2, tiny_folder, shard_base="always") as group:
        yield group
        group.engine.dismiss()
        group.members[0].join(60)
        assert group.members[0].exitcode == 0


def rows_of_step(step: int, adapters: list[Adapter]) -> list[TrainRow]:
    """Of very different sizes, so that processes have to wait for each other in every way."""
    first, second, in_unembedding = adapters
    return (
        mixed_rows(first, second),
        [policy_row(second, 9, "ppo", step)],  # nothing for anybody but the leader
        [policy_row(adapter, 60, "ppo", step, backward=adapter is not first) for adapter in adapters],
        [policy_row(in_unembedding, 40, "cross_entropy", step), policy_row(first, 30, "ppo", step)],
        [policy_row(first, length, "gspo", length) for length in (128, 2, 3, 60, 60, 50)],
    )[step % 5]


def trained(engine: Engine) -> tuple[list[RowOutput], list[Adapter]]:
    specs = [AdapterSpec(3, 1), AdapterSpec(8, 2), AdapterSpec(4, 3, **UNEMBEDDING_ALONE)]
    adapters = [engine.create_adapter(spec) for spec in specs]
    outputs: list[RowOutput] = []
    for step in range(STEPS):
        rows = rows_of_step(step, adapters)
        outputs += run(engine, rows)
        for adapter in {id(row.adapter): row.adapter for row in rows if row.backward}.values():
            # The engine's own eps would make the sign of rounding errors a full step.
            engine.optim_step(adapter, AdamParams(learning_rate=1e-3, eps=1e-6))
    run(engine, rows_of_step(0, adapters))
    return outputs, adapters


def assert_trained_alike(
    ours: tuple[list[RowOutput], list[Adapter]], theirs: tuple[list[RowOutput], list[Adapter]]
) -> None:
    assert_same_outputs(ours[0], theirs[0])
    for adapter, expected in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(adapter.weights, expected.weights, rtol=0, atol=1e-5)
        assert adapter.has_gradient == expected.has_gradient
        assert_close(gradients(adapter), gradients(expected), rtol=2e-5)


def test_twenty_steps_give_the_same_alone_replicated_and_sharded(
    pair: Started, alone: Engine, tiny_folder: Path
) -> None:
    expected = trained(alone)
    assert_trained_alike(trained(pair.engine), expected)
    with group_of(2, tiny_folder) as replicated:
        assert_trained_alike(trained(replicated.engine), expected)


def test_a_batch_gives_the_same_sum_every_time(pair: Started) -> None:
    found = []
    for _ in range(2):
        adapter = new_adapter(pair.engine.model)
        run(pair.engine, [policy_row(adapter, 10 + seed, "ppo", seed) for seed in range(7)])
        found.append(adapter.gradient)
    assert torch.equal(*found)


def test_samples_are_those_of_one_engine_between_batches(pair: Started, alone: Engine) -> None:
    trained_adapter, frozen = new_adapter(alone.model), new_adapter(alone.model, seed=7).frozen_copy()
    works = [
        work("a", PROMPT, num_samples=2, adapter=frozen, prompt_logprobs=True),
        work("b", OTHER, max_tokens=20),
        work("c", PROMPT[:5], adapter=frozen),
    ]
    for seed in range(2):
        ours, theirs = sample(pair.engine.generator, *works), sample(alone.generator, *works)
        for mine, other in zip(ours, theirs, strict=True):
            assert [each.tokens for each in mine.sequences] == [each.tokens for each in other.sequences]
            assert mine.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-5)
        run(pair.engine, [policy_row(trained_adapter, 30, "ppo", seed)])
    assert pair.engine.generator.num_decode_steps > 20


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_process_holds_its_shards_and_the_layers_in_use(pair: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shards = pair.engine.model, pair.engine.model.shards
    assert shards is not None
    layers = [sum(matrix.shape.numel() * 4 for matrix in layer.matrices) for layer in model.layers]
    held: list[int] = []
    gather_next = ShardedLayers._gather_next

    def measuring(self: ShardedLayers) -> None:
        gather_next(self)
        held.append(storage_bytes(self))

    monkeypatch.setattr(ShardedLayers, "_gather_next", measuring)
    rows = [policy_row(new_adapter(model), 40, "ppo", seed) for seed in range(4)]
    run(pair.engine, rows)
    assert storage_bytes(shards) == sum(layers) / 2
    assert len(held) == 2 * (2 * len(layers) - 1)
    assert max(held) == sum(layers) / 2 + 2 * max(layers), "one in use, and the next one on its way"
    assert min(held) == sum(layers) / 2 + max(layers)


def storage_bytes(shards: ShardedLayers) -> int:
    """Of all tensors of several dimensions or of many numbers that can be reached from there, each storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[Any] = [layer._weights for layer in shards._layers]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType | FunctionType | BuiltinFunctionType):
            continue
        seen.add(id(thing))
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.is_floating_point():
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        todo += gc.get_referents(thing)
    return sum(storages.values())


def test_a_matrix_cannot_be_used_while_its_layer_is_not_gathered(pair: Started) -> None:
    with pytest.raises(RuntimeError):
        pair.engine.model.layers[0].qkv.product(torch.zeros(2, pair.engine.model.shape.hidden_size, device=DEVICE))


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoiled", [bad, failing])
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_row_takes_its_job_with_it_and_nobody_else(
    pair: Started, alone: Engine, spoiled: Callable[[TrainRow], TrainRow], place: int
) -> None:
    disturbed, other, expected = (new_adapter(alone.model, seed=seed) for seed in (1, 2, 1))
    spoilt = [policy_row(other, 60, "ppo", 1, job="spoilt"), policy_row(other, 60, "ppo", 2, job="spoilt")]
    spoilt[place] = spoiled(spoilt[place])
    rows = [policy_row(disturbed, 60, "ppo", seed, job="fine") for seed in range(4)]
    outputs = pair.engine.forward_backward([*spoilt, *rows])
    assert all(output.error is not None for output in outputs[:2])
    assert_same_outputs(outputs[2:], run(alone, [replace(row, adapter=expected) for row in rows]))
    assert_close(gradients(disturbed), gradients(expected), rtol=1e-5)
    assert float(other.gradient.abs().sum()) == 0


def test_an_error_in_a_member_leaves_every_gradient_as_it_was(pair: Started) -> None:
    adapter = new_adapter(pair.engine.model)
    run(pair.engine, [policy_row(adapter, 12, "ppo", 0)])
    before = adapter.gradient.clone()
    with pytest.raises(MemberError, match=r"Rank 1 .* RuntimeError: broken"):
        pair.engine.forward_backward(in_both(adapter, FAILS))
    assert torch.equal(adapter.gradient, before)
    run(pair.engine, in_both(adapter, 5))


@pytest.mark.parametrize("method", ["product", "gradient"])
@pytest.mark.parametrize("call", [1, 4, 7, 11])
def test_an_error_in_the_middle_of_a_pass_leaves_nobody_waiting(
    pair: Started, alone: Engine, monkeypatch: pytest.MonkeyPatch, method: str, call: int
) -> None:
    """Of the way forward, and of the way back: wherever the leader stops, the member gets the shards that it needs."""
    adapter, expected = new_adapter(alone.model), new_adapter(alone.model)
    lengths = (60, 60, 50, 50, 40, 40)
    calls = iter(range(1, 10**6))
    real = getattr(Matrix, method)

    def failing_once(self: Matrix, x: torch.Tensor) -> torch.Tensor:
        if next(calls) == call:
            raise RuntimeError("leader broke")
        result: torch.Tensor = real(self, x)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Matrix, method, failing_once)
        with pytest.raises(RuntimeError, match="leader broke"):
            pair.engine.forward_backward([policy_row(adapter, length, "ppo", length) for length in lengths])
    assert float(adapter.gradient.abs().sum()) == 0
    run(pair.engine, [policy_row(adapter, length, "ppo", length) for length in lengths])
    run(alone, [policy_row(expected, length, "ppo", length) for length in lengths])
    assert_close(gradients(adapter), gradients(expected), rtol=1e-5)


def test_a_sample_that_fails_leaves_nobody_waiting(
    pair: Started, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = pair.engine.generator
    generator.add(work("fails", OTHER))
    with monkeypatch.context() as patch:
        patch.setattr(Matrix, "product", lambda self, x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generator.step()
    generator.cancel("fails")
    (ours,), (theirs,) = sample(generator, work("again", OTHER)), sample(alone.generator, work("again", OTHER))
    assert ours.sequences[0].tokens == theirs.sequences[0].tokens


def test_a_group_listens_at_its_own_address_alone(pair: Started) -> None:
    assert {address.rpartition(":")[0] for address in listening_addresses()} == {"0100007F"}


# --- turns -----------------------------------------------------------------------------------------------------------


def test_turns_are_enough_for_everybody_and_put_each_batch_in_a_pass_of_its_kind(alone: Engine) -> None:
    adapter = new_adapter(alone.model)
    rows = [policy_row(adapter, 5, "ppo", seed, backward=seed > 1) for seed in range(5)]
    batches = [MicroBatch([check_row(index, row, alone.model.shape)]) for index, row in enumerate(rows)]
    turns = Turns.of([batches[:3], batches[1:2], batches[2:], []])
    assert turns == Turns(num_forward=2, num_back=3)
    assert turns.passes == [False, False, True, True, True]
    assert turns.placed(batches[1:4]) == [batches[1], None, batches[2], batches[3], None]
    assert turns.placed([]) == [None] * 5
