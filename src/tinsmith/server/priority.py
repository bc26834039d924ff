"""Who comes first where the processes of a server share the cores of a machine."""

from __future__ import annotations

import os

from tinsmith.server.engine.engine import choose_device

_STEPS_BACK = 5
"""A third of the weight of a process that does not step back, for Linux: enough that requests come first, and little
enough that work goes on beside other programs of the machine."""


def give_way(device: str) -> None:
    """To the API, if this process computes on the CPU: it needs milliseconds, and a step of training can wait for them.

    To be called before there are threads that compute, which take it over from the one that calls.
    """
    if choose_device(device).type == "cpu" and hasattr(os, "nice"):  # which Windows has not
        os.nice(_STEPS_BACK)
