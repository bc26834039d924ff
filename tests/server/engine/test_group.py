"""A training group gives what one engine gives, and when something goes wrong nothing has happened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.server.engine.faulty_member import FAILS, FILLS_MEMORY, IS_KILLED, STOPS
from tests.server.engine.groups import DEVICE, Started, group_of
from tests.server.engine.oracle import assert_close, gradients, new_adapter, policy_row
from tests.server.engine.test_engine_training import (
    assert_same_outputs,
    bad,
    failing,
    mixed_rows,
    overflowing,
    run,
)
from tests.server.tiny_models import save_model
from tinsmith.errors import ConfigError
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.channels import LostPeerError
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.group import BrokenGroupError, MemberError
from tinsmith.server.engine.train import RowOutput
from tinsmith.types import AdamParams


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> Engine:
    return Engine.open(tiny_folder, DEVICE, "float32", train_token_budget=64)


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Iterator[Started]:
    with group_of(2, tiny_folder) as group:
        yield group
        group.engine.dismiss()
        group.members[0].join(60)
        assert group.members[0].exitcode == 0


def trained(engine: Engine, steps: int) -> tuple[list[RowOutput], list[Adapter]]:
    """Some steps with two adapters of different ranks, of which one makes its step half as often."""
    adapters = [engine.create_adapter(AdapterSpec(rank, seed)) for rank, seed in ((3, 1), (8, 2))]
    outputs: list[RowOutput] = []
    for step in range(steps):
        outputs += run(engine, mixed_rows(*adapters))
        for adapter in adapters[: 1 + step % 2]:
            # The engine's own eps would make the sign of rounding errors a full step.
            engine.optim_step(adapter, AdamParams(learning_rate=1e-3, eps=1e-6))
    return outputs, adapters


def assert_trains_like(engine: Engine, reference: Engine) -> None:
    (outputs, adapters), (expected, references) = trained(engine, 5), trained(reference, 5)
    assert_same_outputs(outputs, expected)
    for ours, theirs in zip(adapters, references, strict=True):
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-5)
        assert ours.has_gradient == theirs.has_gradient
        assert_close(gradients(ours), gradients(theirs), rtol=2e-5)


def first_token(token: int, row: TrainRow) -> TrainRow:
    """What a member does with it, see `faulty_member`."""
    return replace(row, tokens=np.concatenate([[token], row.tokens[1:]]))


def in_both(adapter: Adapter, token: int) -> list[TrainRow]:
    """Of two rows the longer one is the leader's."""
    return [policy_row(adapter, 20, "ppo", 1), first_token(token, policy_row(adapter, 12, "ppo", 2))]


def test_a_pair_trains_like_one_engine(pair: Started, alone: Engine) -> None:
    assert_trains_like(pair.engine, alone)


def test_a_group_of_one_is_an_engine(tiny_folder: Path, alone: Engine) -> None:
    with group_of(1, tiny_folder) as group:
        assert_trains_like(group.engine, alone)


def test_every_loss_gives_the_same_in_either_process(pair: Started, alone: Engine) -> None:
    ours, theirs = new_adapter(alone.model, rank=5), new_adapter(alone.model, rank=5)
    for loss in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"):
        rows = [policy_row(ours, length, loss, length, width=width) for length, width in ((9, None), (8, 2))]
        expected = run(alone, [replace(row, adapter=theirs) for row in rows])
        assert_same_outputs(run(pair.engine, rows), expected)
    assert_close(gradients(ours), gradients(theirs), rtol=1e-5)


def test_a_batch_gives_the_same_sum_every_time(pair: Started) -> None:
    found = []
    for _ in range(2):
        adapter = new_adapter(pair.engine.model)
        run(pair.engine, [policy_row(adapter, 10 + seed, "ppo", seed) for seed in range(7)])
        found.append(adapter.gradient)
    assert torch.equal(*found)


def test_members_learn_of_weights_whatever_changed_them(pair: Started, alone: Engine) -> None:
    adapter = new_adapter(pair.engine.model, seed=3)
    rows = [policy_row(adapter, 20, "ppo", seed, backward=False) for seed in range(2)]
    first = run(pair.engine, rows)
    assert_same_outputs(run(pair.engine, rows), first)
    adapter.load_state_dict(new_adapter(pair.engine.model, seed=4).state_dict())
    changed = run(pair.engine, rows)
    assert_same_outputs(changed, run(alone, rows))
    assert changed[1].loss != pytest.approx(first[1].loss)


def test_forward_only_rows_leave_no_gradient(pair: Started) -> None:
    adapter = new_adapter(pair.engine.model)
    run(pair.engine, [policy_row(adapter, 9, loss, 1, backward=False) for loss in ("ppo", "gspo", "ppo")])
    assert float(adapter.gradient.abs().sum()) == 0
    assert not adapter.has_gradient


@pytest.mark.parametrize("spoiled", [bad, overflowing, failing])
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_row_takes_its_job_with_it_and_nobody_else(
    pair: Started, alone: Engine, spoiled: Callable[[TrainRow], TrainRow], place: int
) -> None:
    """Of equal rows, the leader has the even places and the member the odd ones."""
    disturbed, other, expected = (new_adapter(alone.model, seed=seed) for seed in (1, 2, 1))
    for engine, adapter in ((pair.engine, disturbed), (alone, expected)):
        run(engine, [policy_row(adapter, 12, "ppo", 0)])
    spoilt = [policy_row(other, 16, "ppo", 1, job="spoilt"), policy_row(other, 16, "ppo", 2, job="spoilt")]
    spoilt[place] = spoiled(spoilt[place])
    rows = [policy_row(disturbed, 16, "ppo", 3, job="fine"), policy_row(disturbed, 16, "ppo", 4, job="fine")]
    outputs = pair.engine.forward_backward([*spoilt, *rows])
    assert all(output.error is not None for output in outputs[:2])
    assert_same_outputs(outputs[2:], run(alone, [replace(row, adapter=expected) for row in rows]))
    assert_close(gradients(disturbed), gradients(expected), rtol=1e-5)
    assert float(other.gradient.abs().sum()) == 0
    assert not other.has_gradient


def test_refusals_say_the_same_as_those_of_one_engine(pair: Started, alone: Engine) -> None:
    adapter = new_adapter(alone.model)
    rows = [policy_row(adapter, 20, "ppo", 1), failing(policy_row(adapter, 12, "ppo", 2))]
    ours, theirs = (engine.forward_backward(rows)[1].error for engine in (pair.engine, alone))
    assert ours is not None
    assert theirs is not None
    assert (ours.message, ours.field, ours.value) == (theirs.message, theirs.field, theirs.value)


def test_data_that_make_the_gradient_overflow_are_refused(pair: Started) -> None:
    adapter, other = (new_adapter(pair.engine.model, seed=seed) for seed in (1, 2))
    run(pair.engine, [policy_row(adapter, 12, "cross_entropy", 0)])
    before = adapter.gradient.clone()
    row = policy_row(adapter, 12, "cross_entropy", 1, job="huge")
    huge = replace(row, inputs={**row.inputs, "weights": np.full(12, 3e38)})
    fine, refused = pair.engine.forward_backward([policy_row(other, 20, "ppo", 2, job="fine"), huge])
    assert fine.error is None
    assert refused.error is not None
    assert "not finite" in refused.error.message
    assert torch.equal(adapter.gradient, before)
    with pytest.raises(FloatingPointError):
        pair.engine.forward_backward([policy_row(adapter, 20, "cross_entropy", 3, job="fine"), huge])
    assert torch.equal(adapter.gradient, before)


def test_an_error_in_a_member_leaves_every_gradient_as_it_was(pair: Started) -> None:
    adapter = new_adapter(pair.engine.model)
    run(pair.engine, [policy_row(adapter, 12, "ppo", 0)])
    before = adapter.gradient.clone()
    with pytest.raises(MemberError, match=r"Rank 1 .* RuntimeError: broken"):
        pair.engine.forward_backward(in_both(adapter, FAILS))
    assert torch.equal(adapter.gradient, before)
    run(pair.engine, in_both(adapter, 5))


def test_an_error_in_the_leader_leaves_every_gradient_as_it_was(
    pair: Started, monkeypatch: pytest.MonkeyPatch, alone: Engine
) -> None:
    adapter, expected = new_adapter(alone.model), new_adapter(alone.model)
    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.server.engine.engine.run_micro_batch", broken)
        with pytest.raises(RuntimeError, match="leader broke"):
            pair.engine.forward_backward(in_both(adapter, 5))
    assert float(adapter.gradient.abs().sum()) == 0
    run(pair.engine, in_both(adapter, 5))
    run(alone, in_both(expected, 5))
    assert_close(gradients(adapter), gradients(expected), rtol=1e-5)


def broken(*args: object, **options: object) -> None:
    raise RuntimeError("leader broke")


def test_a_member_that_runs_out_of_memory_halves_its_own_micro_batches(tiny_folder: Path, alone: Engine) -> None:
    ours, theirs = new_adapter(alone.model), new_adapter(alone.model)
    rows = [first_token(FILLS_MEMORY, policy_row(ours, 120, "ppo", seed)) for seed in range(6)]
    with group_of(2, tiny_folder, budget=512) as group:
        outputs = run(group.engine, rows)
        assert group.engine.train_token_budget == 512
    assert_same_outputs(outputs, run(alone, [replace(row, adapter=theirs) for row in rows]))
    assert_close(gradients(ours), gradients(theirs), rtol=1e-5)


def test_everything_that_members_compute_is_counted(pair: Started) -> None:
    before = pair.engine.usage()
    run(pair.engine, [policy_row(new_adapter(pair.engine.model), 40, "ppo", seed) for seed in range(4)])
    after = pair.engine.usage()
    assert after.trained_rows - before.trained_rows == 4
    assert after.trained_tokens - before.trained_tokens == 160
    assert after.micro_batches - before.micro_batches == 4
    assert pair.engine.batch_token_budget == 2 * 64


@pytest.mark.parametrize("size", [3, 4])
def test_more_train_like_one_engine_also_when_some_have_no_rows(size: int, tiny_folder: Path, alone: Engine) -> None:
    with group_of(size, tiny_folder) as group:
        assert_trains_like(group.engine, alone)
        ours, theirs = (engine.create_adapter(AdapterSpec(4, 1)) for engine in (group.engine, alone))
        for number in (1, size - 1):
            rows = [[policy_row(each, 12 + place, "ppo", place) for place in range(number)] for each in (ours, theirs)]
            assert_same_outputs(run(group.engine, rows[0]), run(alone, rows[1]))
        assert_close(gradients(ours), gradients(theirs), rtol=2e-5)


@pytest.mark.parametrize(("token", "seconds", "why"), [(IS_KILLED, 60, "closed"), (STOPS, 5, "silent for 5 s")])
def test_a_lost_member_is_named_and_leaves_every_gradient_as_it_was(
    tiny_folder: Path, alone: Engine, token: int, seconds: float, why: str
) -> None:
    with group_of(3, tiny_folder, seconds=seconds) as group:
        adapter = new_adapter(alone.model)
        run(group.engine, [policy_row(adapter, 12, "ppo", 0)])
        before = adapter.gradient.clone()
        rows = [*in_both(adapter, 5), first_token(token, policy_row(adapter, 11, "ppo", 3))]
        with pytest.raises(LostPeerError, match=f"Rank 2 .*{why}"):
            group.engine.forward_backward(rows)
        with pytest.raises(BrokenGroupError, match="Rank 2"):
            group.engine.forward_backward(rows[:1])
        assert torch.equal(adapter.gradient, before)


def test_a_group_listens_at_its_own_address_alone(pair: Started) -> None:
    """Torch would listen to every network of the machine."""
    assert {address.rpartition(":")[0] for address in listening_addresses()} == {"0100007F"}


def listening_addresses() -> set[str]:
    """Those of this process, as the system writes them: in hexadecimal digits, with the port."""
    own = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}


def test_members_with_another_base_model_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)
    with (
        pytest.raises(ConfigError, match=r"Rank 1 .* other weights"),
        group_of(2, tiny_folder, folder_of_members=other),
    ):
        pass
    smaller = save_model(tmp_path / "smaller", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="same model and dtype"), group_of(2, tiny_folder, folder_of_members=smaller):
        pass
