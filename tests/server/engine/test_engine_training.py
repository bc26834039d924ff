"""The engine trains any mix of rows as if each were alone, and bad rows leave no trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.server.engine.oracle import assert_close, gradients, new_adapter, peft_tensors, policy_row, with_peft
from tests.server.tiny_models import save_model
from tinsmith.client.loss_graph import trace_loss
from tinsmith.errors import ConfigError
from tinsmith.server.engine import engine as engine_module
from tinsmith.server.engine import steps
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.engine import Engine, choose_device, choose_dtype
from tinsmith.server.engine.train import RowOutput
from tinsmith.types import AdamParams


@pytest.fixture
def engine(tiny_folder: Path) -> Engine:
    return Engine.open(tiny_folder, "cpu", "float32", train_token_budget=64)


def reinforce(logprobs: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logprobs * advantages).sum(), {"custom/mean:mean": logprobs.mean()}


CUSTOM = trace_loss(reinforce, {"logprobs": 1, "advantages": 1}).graph


def mixed_rows(first: Adapter, second: Adapter) -> list[TrainRow]:
    """Lengths, adapters, ranks, losses, widths, forward-only rows: all mixed."""
    return [
        policy_row(first, 12, "cross_entropy", 1),
        policy_row(second, 30, "ppo", 2),
        policy_row(first, 7, "cross_entropy", 3, width=3),
        policy_row(second, 12, "gspo", 4),
        policy_row(first, 12, "importance_sampling", 5, backward=False),
        policy_row(first, 25, "custom", 6, graph=CUSTOM, config={"loss_id": "x"}),
        policy_row(second, 1, "dro", 7),
        policy_row(first, 12, "cispo", 8, config={"clip_high_threshold": 1.5}),
        policy_row(second, 40, "gspo", 9, width=2),
        policy_row(second, 9, "custom", 10, graph=CUSTOM, backward=False),
        policy_row(first, 100, "cross_entropy", 11),
    ]


def run(engine: Engine, rows: list[TrainRow]) -> list[RowOutput]:
    outputs = engine.forward_backward(rows)
    assert [output.error for output in outputs] == [None] * len(rows)
    return outputs


def assert_same_outputs(ours: list[RowOutput], theirs: list[RowOutput], rtol: float = 1e-5) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.logprobs, other.logprobs, rtol=rtol, atol=1e-5)
        assert mine.loss == pytest.approx(other.loss, rel=rtol, abs=1e-4)
        assert mine.metrics == pytest.approx(other.metrics, rel=rtol)


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen2", "qwen3"])
def test_log_probabilities_loss_and_gradients_equal_transformers_with_peft(family: str, tmp_path: Path) -> None:
    engine = Engine.open(save_model(tmp_path, family), "cpu", "float32")
    adapter = new_adapter(engine.model)
    peft = with_peft(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), adapter)
    rows = [policy_row(adapter, length, "cross_entropy", seed) for seed, length in enumerate((20, 33, 20))]
    for row, output in zip(rows, run(engine, rows), strict=True):
        logits = peft(torch.from_numpy(row.tokens)[None]).logits[0]
        targets = torch.from_numpy(row.inputs["target_tokens"])
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        loss = -(logprobs * torch.from_numpy(row.inputs["weights"])).sum()
        loss.backward()
        np.testing.assert_allclose(output.logprobs, logprobs.detach(), rtol=1e-4, atol=1e-5)
        assert output.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    assert_close(gradients(adapter), {name: tensor.grad for name, tensor in peft_tensors(peft).items()})


def test_ten_training_steps_follow_peft_and_torch(tmp_path: Path) -> None:
    engine = Engine.open(save_model(tmp_path, "smollm2"), "cpu", "float32")
    adapter = engine.create_adapter(AdapterSpec(4, 0))
    peft = with_peft(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), adapter)
    tensors = peft_tensors(peft)
    # The engine's eps of 1e-12 would make the sign of rounding errors a full step; both use torch's.
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    row = policy_row(adapter, 30, "cross_entropy", 1)
    targets, weights = (torch.from_numpy(row.inputs[name]) for name in ("target_tokens", "weights"))
    for _ in range(10):
        logits = peft(torch.from_numpy(row.tokens)[None]).logits[0]
        loss = -(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0] * weights).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tensors.values(), 5.0)
        optimizer.step()
        (output,) = run(engine, [row])
        engine.optim_step(adapter, AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.01, grad_clip_norm=5.0))
        assert output.loss == pytest.approx(float(loss.detach()), rel=1e-3)


@pytest.mark.parametrize("budget", [16, 64, 4096])
def test_a_mixed_batch_equals_its_rows_one_by_one_at_any_budget(engine: Engine, budget: int) -> None:
    alone = [new_adapter(engine.model, rank=3, seed=1), new_adapter(engine.model, rank=8, seed=2)]
    together = [new_adapter(engine.model, rank=3, seed=1), new_adapter(engine.model, rank=8, seed=2)]
    engine.train_token_budget = 4096
    expected = [run(engine, [row])[0] for row in mixed_rows(*alone)]
    engine.train_token_budget = budget
    assert_same_outputs(run(engine, mixed_rows(*together)), expected)
    for ours, reference in zip(together, alone, strict=True):
        assert_close(gradients(ours), gradients(reference), rtol=1e-5)


def test_gradients_add_up_over_calls_until_the_step(engine: Engine) -> None:
    twice, once = new_adapter(engine.model), new_adapter(engine.model)
    rows = [policy_row(twice, 12, "ppo", seed) for seed in range(4)]
    run(engine, rows[:2])
    run(engine, rows[2:])
    run(engine, [replace(row, adapter=once) for row in rows])
    assert_close(gradients(twice), gradients(once), rtol=1e-5)
    engine.optim_step(twice, AdamParams())
    assert float(twice.gradient.abs().sum()) == 0


def test_forward_only_rows_leave_no_gradient(engine: Engine) -> None:
    adapter = new_adapter(engine.model)
    outputs = run(engine, [policy_row(adapter, 9, loss, 1, backward=False) for loss in ("ppo", "gspo")])
    assert all(output.loss != 0 for output in outputs)
    assert float(adapter.gradient.abs().sum()) == 0
    assert not adapter.has_gradient


def test_outputs_have_the_shape_of_their_targets(engine: Engine) -> None:
    adapter = new_adapter(engine.model)
    outputs = run(engine, [policy_row(adapter, 9, "cross_entropy", 1, width=width) for width in (None, 1, 4)])
    assert [output.logprobs.shape for output in outputs] == [(9,), (9, 1), (9, 4)]
    assert all(output.logprobs.dtype == np.float32 for output in outputs)


def test_custom_metrics_are_reported_for_their_row(engine: Engine) -> None:
    (output,) = run(engine, [policy_row(new_adapter(engine.model), 9, "custom", 1, graph=CUSTOM)])
    assert output.metrics == {"custom/mean:mean": pytest.approx(float(output.logprobs.mean()))}


def bad(row: TrainRow) -> TrainRow:
    return replace(row, tokens=np.array([5, 1000, 7]))


def overflowing(row: TrainRow) -> TrainRow:
    return replace(row, inputs={**row.inputs, "logprobs": np.full(len(row.tokens), -3e38)})


def failing(row: TrainRow) -> TrainRow:
    """A custom loss that only running it shows to be impossible."""
    return replace(row, loss="custom", graph=CUSTOM, inputs={**row.inputs, "advantages": np.ones(3)})


@pytest.mark.parametrize("spoiled", [bad, overflowing, failing])
def test_a_bad_row_does_not_disturb_the_others(engine: Engine, spoiled: Any) -> None:
    disturbed, alone = new_adapter(engine.model), new_adapter(engine.model)
    for adapter in (disturbed, alone):
        run(engine, [policy_row(adapter, 12, "ppo", 0)])
    rows = [policy_row(disturbed, 12 + seed, "ppo", seed) for seed in range(1, 6)]
    outputs = engine.forward_backward([*rows[:2], spoiled(rows[2]), *rows[3:]])
    expected = run(engine, [replace(row, adapter=alone) for row in (*rows[:2], *rows[3:])])
    assert outputs[2].error is not None
    assert_same_outputs([*outputs[:2], *outputs[3:]], expected)
    assert_close(gradients(disturbed), gradients(alone), rtol=1e-5)


@pytest.mark.parametrize("spoiled", [bad, overflowing])
def test_rows_of_one_job_stand_or_fall_together(engine: Engine, spoiled: Any) -> None:
    first, second = new_adapter(engine.model, seed=1), new_adapter(engine.model, seed=2)
    rows = [policy_row(first, 9, "ppo", 1, job="a"), policy_row(second, 9, "ppo", 2, job="b")]
    outputs = engine.forward_backward([*rows, spoiled(policy_row(first, 9, "ppo", 3, job="a"))])
    assert outputs[0].error is outputs[2].error
    assert outputs[0].error is not None
    assert outputs[1].error is None
    assert float(first.gradient.abs().sum()) == 0
    assert float(second.gradient.abs().sum()) > 0
    assert (first.has_gradient, second.has_gradient) == (False, True)


def test_data_that_make_the_gradient_overflow_are_refused_and_leave_it_as_it_was(engine: Engine) -> None:
    adapter = new_adapter(engine.model)
    run(engine, [policy_row(adapter, 12, "cross_entropy", 0)])
    before = adapter.gradient.clone()
    row = policy_row(adapter, 12, "cross_entropy", 1, job="huge")
    huge = replace(row, inputs={**row.inputs, "weights": np.full(12, 3e38)})
    [output] = engine.forward_backward([huge])
    assert output.error is not None
    assert "not finite" in output.error.message
    assert torch.equal(adapter.gradient, before)
    with pytest.raises(FloatingPointError):
        engine.forward_backward([policy_row(adapter, 12, "cross_entropy", 2, job="fine"), huge])
    assert torch.equal(adapter.gradient, before)


def test_an_empty_batch_has_no_outputs(engine: Engine) -> None:
    assert engine.forward_backward([]) == []


def test_a_crash_in_the_middle_leaves_every_gradient_as_it_was(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = new_adapter(engine.model)
    run(engine, [policy_row(adapter, 12, "ppo", 0)])
    before = adapter.gradient.clone()
    crash_at(monkeypatch, RuntimeError("broken"), after=1)
    with pytest.raises(RuntimeError, match="broken"):
        engine.forward_backward([policy_row(adapter, 60, "ppo", seed) for seed in range(3)])
    assert torch.equal(adapter.gradient, before)


def test_running_out_of_gpu_memory_halves_the_budget_and_tries_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.train_token_budget = 1024
    rows = [policy_row(new_adapter(engine.model), 100, "ppo", seed) for seed in range(12)]
    crash_at(monkeypatch, torch.OutOfMemoryError("full"), after=1)
    run(engine, rows)
    assert engine.train_token_budget == 512


def crash_at(monkeypatch: pytest.MonkeyPatch, error: Exception, after: int) -> None:
    """Let the micro-batch after that many raise, once."""
    calls = iter([False] * after + [True])
    real = engine_module.run_micro_batch

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if next(calls, False):
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(engine_module, "run_micro_batch", sometimes)


def test_the_mixed_mode_trains_like_float32(tiny_folder: Path) -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        engine = Engine.open(tiny_folder, "cpu", dtype)
        adapter = engine.create_adapter(AdapterSpec(8, 0))
        row = policy_row(adapter, 40, "cross_entropy", 1)
        row = replace(row, inputs={**row.inputs, "weights": np.ones(40, np.float32)})
        for _ in range(8):
            run(engine, [row])
            engine.optim_step(adapter, AdamParams(learning_rate=0.01))
        losses.append(run(engine, [row])[0].loss)
    assert losses[0] < 40 * 4.5 * 0.7
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_auto_chooses_what_the_machine_has_and_wrong_names_are_refused() -> None:
    assert choose_device("auto").type in ("cpu", "cuda")
    assert choose_dtype("float32", torch.device("cpu")) == torch.float32
    with pytest.raises(ConfigError, match="float16"):
        choose_dtype("float16", torch.device("cpu"))


def test_kernels_are_left_out_where_triton_is_too_old_for_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_kernels = steps.has_kernels.__wrapped__  # which is asked once for each process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for version, is_new_enough in (("3.5.1", False), ("3.6.0", True), ("3.10.0+git1", True), ("4.0", True)):
        monkeypatch.setattr("triton.__version__", version)
        assert has_kernels() == is_new_enough
    (message,) = caplog.messages
    assert "Triton 3.5.1 cannot compile them; install torch 2.10" in message
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not has_kernels()
    assert "NVIDIA" in caplog.messages[-1]


def test_a_gpu_that_does_not_multiply_bfloat16_computes_in_float32_with_torch_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda")
    has_kernels = steps.has_kernels.__wrapped__  # which is asked once for each process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert choose_dtype("auto", gpu) == choose_dtype("bfloat16", gpu) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert choose_dtype("auto", gpu) == choose_dtype("float32", gpu) == torch.float32
    assert not has_kernels()
    with pytest.raises(ConfigError, match=r"Tesla T4.*'float32'"):
        choose_dtype("bfloat16", gpu)
