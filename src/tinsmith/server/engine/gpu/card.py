"""What the GPU at hand has, as far as kernels must know.

generation       which features it has
num_stages       how many tiles may be on their way to a multiprocessor at once
"""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver

_USEFUL_STAGES = 4
_FEWEST_STAGES = 2


@cache
def generation(device: torch.device) -> tuple[int, int]:
    """As the vendor counts: from (8, 0) for an A100 over (8, 9) for a GeForce 40 to (9, 0) for an H100; else (0, 0)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def num_stages(bytes_of_stage: int, device: torch.device) -> int:
    """As many as help and fit; each holds the tiles of one turn of a loop.

    A data center's GPU has 163 or 227 KiB for a program, that of a workstation 99: there, a kernel that asks for more
    does not start.
    """
    return max(_FEWEST_STAGES, min(_USEFUL_STAGES, _shared_memory(device) // bytes_of_stage))


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have close to its multiprocessor; where there is no GPU, nothing is scarce."""
    if generation(device) == (0, 0):
        return 2**30
    size: int = driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return size
