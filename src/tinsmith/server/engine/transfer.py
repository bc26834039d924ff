"""From the host to the device of the model."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; a GPU fetches it while the host goes on."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def upload_array(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return upload(torch.from_numpy(array), device)
