"""A group with shards of the layers trains and samples like one engine, and holds its part of the layers alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.server.engine.faulty_member import FAILS, FILLS_MEMORY, IS_KILLED, STOPS
from tests.server.engine.groups import Started, group_of
from tests.server.engine.oracle import assert_close, gradients, new_adapter, policy_row
from tests.server.engine.test_engine_training import assert_same_outputs, failing, mixed_rows, run
from tests.server.engine.test_group import broken, first_token, in_both, listening_addresses
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.group import BrokenGroupError, GroupEngine, MemberError
from tinsmith.server.engine.sharding import BrokenShardsError, ShardedLayers, Turns
from tinsmith.server.engine.train import RowOutput
from tinsmith.types import AdamParams

STEPS = 20


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> Engine:
    return Engine.open(tiny_folder, "cpu", "float32", train_token_budget=64)


@pytest.fixture(scope="module")
def sharded(tiny_folder: Path) -> Iterator[Started]:
    with group_of(2, tiny_folder, shard_base="always") as group:
        yield group
        group.engine.dismiss()
        group.members[0].join(60)
        assert group.members[0].exitcode == 0


def trained(engine: Engine) -> tuple[list[RowOutput], list[Adapter]]:
    """With several adapters, one of them only in the unembedding, and batches of very different sizes."""
    specs = [AdapterSpec(3, 1), AdapterSpec(8, 2), AdapterSpec(4, 3, train_attn=False, train_mlp=False)]
    adapters = [engine.create_adapter(spec) for spec in specs]
    outputs: list[RowOutput] = []
    for step in range(STEPS):
        rows = mixed_rows(*adapters[:2])
        if step % 4 == 1:
            rows = [policy_row(adapters[1], 9, "ppo", step)]  # nothing for the member
        if step % 4 == 2:  # of three micro-batches, the leader has two
            rows = [policy_row(adapters[place], 60, "ppo", step + place, backward=place > 0) for place in range(3)]
        if step % 4 == 3:
            rows = [policy_row(adapters[2], 20, "cross_entropy", step), policy_row(adapters[0], 150 % 128, "ppo", step)]
        outputs += run(engine, rows)
        for adapter in {id(row.adapter): row.adapter for row in rows if row.backward}.values():
            # The engine's own eps would make the sign of rounding errors a full step.
            engine.optim_step(adapter, AdamParams(learning_rate=1e-3, eps=1e-6))
    return outputs, adapters


def test_twenty_steps_give_the_same_adapters_alone_replicated_and_sharded(
    sharded: Started, alone: Engine, tiny_folder: Path
) -> None:
    expected_outputs, expected = trained(alone)
    with group_of(2, tiny_folder) as replicated:
        for engine in (sharded.engine, replicated.engine):
            outputs, adapters = trained(engine)
            assert_same_outputs(outputs, expected_outputs)
            for ours, theirs in zip(adapters, expected, strict=True):
                torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-5)
