"""Where the kernels run: on a GPU, or on a CPU through Triton's interpreter, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The interpreter computes with numpy, which warns where a GPU goes on with infinity or NaN.
SILENT_AS_A_GPU = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_near(ours: Tensor, reference: Tensor, tolerance: float | None = None) -> None:
    """Within what one rounding to the dtype, more or less, can do; or what is known to come of roundings before."""
    assert ours.shape == reference.shape
    if tolerance is None:
        tolerance = 1e-5 if ours.dtype == torch.float32 else 1e-2
    assert float((ours.double() - reference.double()).norm()) <= tolerance * float(reference.double().norm())
