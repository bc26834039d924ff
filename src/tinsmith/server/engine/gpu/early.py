"""Kernels that are set up on the GPU while the one before them still runs.

A decode step is some three hundred kernels of a few microseconds, one after the other, and to set one up takes about
one. A kernel with these options is set up as soon as all programs of the one before it have begun; it waits itself for
that one to end. (The vendor calls it programmatic dependent launch; Hopper and later can do it.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tinsmith.server.engine.gpu import card


def early(device: torch.device) -> dict[str, bool]:
    """Options for a kernel that calls `wait_for_others` before it touches what others read or write."""
    if card.generation(device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def wait_for_others(EARLY: tl.constexpr) -> Any:
    """Until the kernels before this one have ended; the next one may be set up meanwhile."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
