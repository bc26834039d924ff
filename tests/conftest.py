"""What all tests rely on."""

import gc
import os
import signal
from pathlib import Path

import pytest

# The threads of two tests that compute at the same time would spin against each other. It is read when torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Kernels for a GPU run step by step where there is none. Triton reads this when whoever comes first imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell lets what it starts in the background ignore Ctrl-C, and so would every program that we start; but some tests
# send it to them.
signal.signal(signal.SIGINT, signal.default_int_handler)

_SLOW = ("examples", "chaos", "load", "end_to_end", "web", "docs", "cli")
"""Folders whose files take minutes, the slowest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that of the processes that share the files none ends long after the other."""
    places = {name: place for place, name in enumerate(_SLOW)}
    items.sort(key=lambda item: places.get(item.path.relative_to(Path(__file__).parent).parts[0], len(_SLOW)))


def pytest_collection_finish() -> None:
    """All that was imported and collected stays; whoever collects garbage need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Native libraries complain of what is still there when the interpreter ends."""
    gc.unfreeze()
