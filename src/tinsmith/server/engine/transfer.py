"""From the host to the device of the model, and back."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; a GPU fetches it while the host goes on."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def download(tensor: Tensor) -> Tensor:
    """A copy on the host, which a GPU writes while the host goes on: it may be read after `wait_for` the device."""
    return tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor.cpu()


def wait_for(device: torch.device) -> None:
    """Until everything asked of it so far is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def upload_array(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return upload(torch.from_numpy(array), device)
