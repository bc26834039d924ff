"""The chunked head gives the log-probabilities and gradients of the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.server.engine.oracle import assert_close, gradients, new_adapter
from tinsmith.server.engine import head
from tinsmith.server.engine.head import score
from tinsmith.server.engine.lora import LoraRows
from tinsmith.server.engine.weights import load_model


@pytest.mark.parametrize("rows_in_chunk", [1, 7, 1000])
def test_chunks_do_not_change_log_probabilities_or_gradients(
    tiny_folder: Path, rows_in_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_MAX_LOGITS", {"cpu": rows_in_chunk * 97})
    model = load_model(tiny_folder, "cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 32, generator=generator)
    targets = torch.randint(0, 97, (20, 3), generator=generator)
    targets[:, 1] = targets[:, 0]  # the same target twice must count twice
    weights = torch.randn(20, 3, generator=generator)
    first, second = new_adapter(model, rank=2, seed=1), new_adapter(model, rank=5, seed=2)
    lora = LoraRows([(0, 6, first), (6, 9, None), (9, 20, second)])

    leaf = hidden.clone().requires_grad_()
    whole = model.logits(leaf, lora).log_softmax(-1).gather(-1, targets)
    (whole * weights).sum().backward()
    expected = [gradients(adapter) for adapter in (first, second)]
    for adapter in (first, second):
        adapter.clear_gradient()

    with torch.no_grad():
        logprobs, dhidden = score(model, hidden, targets, lora, lambda start, end, _: weights[start:end])
    torch.testing.assert_close(logprobs, whole.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dhidden, leaf.grad, rtol=1e-4, atol=1e-5)
    for adapter, reference in zip((first, second), expected, strict=True):
        assert_close(gradients(adapter), reference)


def test_scoring_alone_leaves_no_gradient(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, "cpu", torch.float32)
    adapter = new_adapter(model)
    with torch.no_grad():
        _, dhidden = score(model, torch.randn(4, 32), torch.zeros(4, 1, dtype=torch.long), LoraRows([(0, 4, adapter)]))
    assert dhidden is None
    assert float(adapter.gradient.abs().sum()) == 0


def test_very_large_logits_stay_finite(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, "cpu", torch.float32)
    with torch.no_grad():
        logprobs, _ = score(model, 1e4 * torch.randn(4, 32), torch.zeros(4, 1, dtype=torch.long), LoraRows([]))
    assert bool(logprobs.isfinite().all())
