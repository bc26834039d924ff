"""Rows are checked one by one and packed within the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.server.engine.oracle import new_adapter, policy_row
from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapters import Adapter
from tinsmith.server.engine.batch import TrainRow, check_row, pack
from tinsmith.server.engine.model import ModelShape
from tinsmith.server.engine.weights import load_model, read_config


@pytest.fixture(scope="module")
def adapter(tiny_folder: Path) -> Adapter:
    return new_adapter(load_model(tiny_folder, "cpu", torch.float32))


@pytest.fixture(scope="module")
def shape(tiny_folder: Path) -> ModelShape:
    return ModelShape.from_config(read_config(tiny_folder))


def with_input(row: TrainRow, name: str, values: Any) -> TrainRow:
    return replace(row, inputs={**row.inputs, name: np.asarray(values)})


def without_input(row: TrainRow, name: str) -> TrainRow:
    return replace(row, inputs={key: values for key, values in row.inputs.items() if key != name})


BAD_ROWS: dict[str, tuple[Any, str, str]] = {
    "a token beyond the vocabulary": (
        lambda row: replace(row, tokens=np.array([1, 97, 2])), "model_input", r"token 97.*0 to 96.*tokenizer"),
    "a negative token": (lambda row: replace(row, tokens=np.array([-1, 2, 2])), "model_input", "token -1"),
    "no tokens": (lambda row: replace(row, tokens=np.array([], np.int64)), "model_input", "1 to 128 tokens"),
    "more tokens than the context": (
        lambda row: replace(row, tokens=np.zeros(129, np.int64)), "model_input", r"\[129\].*1 to 128"),
    "tokens that are no integers": (
        lambda row: replace(row, tokens=np.array([1.0, 2.0, 3.0])), "model_input", "float64"),
    "no targets": (lambda row: without_input(row, "target_tokens"), "loss_fn_inputs['target_tokens']", "missing"),
    "too few targets": (
        lambda row: with_input(row, "target_tokens", [1, 2]), "loss_fn_inputs['target_tokens']", r"\[2\].*3 tokens"),
    "targets of three dimensions": (
        lambda row: with_input(row, "target_tokens", np.zeros((3, 1, 1), np.int64)), "loss_fn_inputs['target_tokens']",
        "one target"),
    "a target beyond the vocabulary": (
        lambda row: with_input(row, "target_tokens", [1, 2, 500]), "loss_fn_inputs['target_tokens']", "token 500"),
    "a missing input": (
        lambda row: without_input(row, "advantages"), "loss_fn_inputs['advantages']", "missing.*advantages"),
    "an input of another length": (
        lambda row: with_input(row, "advantages", [1.0]), "loss_fn_inputs['advantages']", r"\[1\].*\[3\]"),
    "an input that is not finite": (
        lambda row: with_input(row, "advantages", [1.0, np.nan, 1.0]), "loss_fn_inputs['advantages']", "nan.*finite"),
    "an input of another type": (
        lambda row: with_input(row, "advantages", ["a", "b", "c"]), "loss_fn_inputs['advantages']", "give numbers"),
    "an unknown input": (
        lambda row: with_input(row, "advantage", [1.0, 1, 1]), "loss_fn_inputs['advantage']", "clip_low_threshold"),
    "an unknown setting": (
        lambda row: replace(row, config={"clip": 0.1}), "loss_fn_config['clip']", "clip_low_threshold"),
    "a setting that is no number": (
        lambda row: replace(row, config={"clip_low_threshold": "low"}), "loss_fn_config['clip_low_threshold']",
        "'low'"),
    "bounds in the wrong order": (
        lambda row: replace(row, config={"clip_low_threshold": 2.0}), "loss_fn_config['clip_low_threshold']", "above"),
    "an unknown loss": (lambda row: replace(row, loss="stable_reinforce"), "loss_fn", "stable_reinforce.*cispo"),
    "a custom loss without a graph": (
        lambda row: replace(row, loss="custom"), "loss_fn_config['loss_id']", "loss_id"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_refused_with_field_value_and_remedy(case: str, adapter: Adapter, shape: ModelShape) -> None:
    change, field, text = BAD_ROWS[case]
    with pytest.raises(InvalidInputError, match=text) as caught:
        check_row(0, change(policy_row(adapter, 3, "ppo", seed=0)), shape)
    assert caught.value.field == field


def test_a_loss_without_settings_says_so(adapter: Adapter, shape: ModelShape) -> None:
    with pytest.raises(InvalidInputError, match="its settings are: none"):
        check_row(0, policy_row(adapter, 3, "cross_entropy", 0, config={"beta": 1.0}), shape)


def test_micro_batches_keep_the_budget_and_lose_no_row(tiny_folder: Path, adapter: Adapter, shape: ModelShape) -> None:
    other = new_adapter(load_model(tiny_folder, "cpu", torch.float32))
    rng = np.random.default_rng(0)
    rows = [
        policy_row(adapter if rng.random() < 0.5 else other, int(rng.integers(1, 60)), "gspo" if i % 3 else "ppo", i,
                   backward=bool(i % 4))
        for i in range(50)
    ]  # fmt: skip
    batches = pack([check_row(i, row, shape) for i, row in enumerate(rows)], token_budget=64)
    assert sorted(example.index for batch in batches for example in batch.examples) == list(range(50))
    for batch in batches:
        assert batch.num_tokens <= 64
        assert len({example.backward for example in batch.examples}) == 1
        segments = batch.lora.segments
        assert len({id(segment[2]) for segment in segments}) == len(segments)


def test_a_row_longer_than_the_budget_goes_alone(adapter: Adapter, shape: ModelShape) -> None:
    rows = [policy_row(adapter, length, "ppo", 0) for length in (5, 100, 6)]
    batches = pack([check_row(i, row, shape) for i, row in enumerate(rows)], token_budget=20)
    assert [batch.num_tokens for batch in batches] == [100, 11]


def test_a_packed_batch_starts_every_sequence_at_position_zero(adapter: Adapter, shape: ModelShape) -> None:
    rows = [policy_row(adapter, length, "ppo", 0) for length in (3, 2)]
    (batch,) = pack([check_row(i, row, shape) for i, row in enumerate(rows)], token_budget=20)
    assert batch.positions().tolist() == [0, 1, 2, 0, 1]
