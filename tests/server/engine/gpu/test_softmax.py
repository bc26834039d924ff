"""Scores and gradients straight from the logits equal those in plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.server.engine.gpu.devices import DEVICE, assert_near, normal
from tinsmith.server.engine import softmax as plain
from tinsmith.server.engine.gpu import softmax as kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.parametrize("size", [97, 4096, 9000])
def test_log_probabilities_and_their_gradient(size: int, num_targets: int, dtype: torch.dtype) -> None:
    y = 5 * normal(4, size, dtype=dtype)
    targets = torch.randint(0, size, (4, num_targets), device=DEVICE)
    targets[:, -1] = targets[:, 0]  # one target twice
    dlogprobs = normal(4, num_targets)
    ours, reference = (module.Softmax(y.clone(), targets) for module in (kernels, plain))
    assert_near(ours.logprobs, reference.logprobs)
    assert_near(ours.gradient(dlogprobs), reference.gradient(dlogprobs))


def test_logits_of_minus_infinity_and_very_large_ones() -> None:
    y = torch.full((2, 5000), -torch.inf, device=DEVICE)
    y[0, 4999] = 1e30
    y[1, 17] = y[1, 4500] = -1e4
    softmax = kernels.Softmax(y, torch.tensor([[4999], [17]], device=DEVICE))
    torch.testing.assert_close(softmax.logprobs.cpu(), torch.tensor([[0.0], [-0.6931472]]))
    assert bool(softmax.gradient(torch.ones(2, 1, device=DEVICE)).isfinite().all())
