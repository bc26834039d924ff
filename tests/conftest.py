"""What all tests rely on."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end import grounds

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--servers",
        choices=["here", "ray"],
        default="here",
        help="what servers under test stand on: this machine, or a Ray cluster with PostgreSQL and a bucket",
    )
    parser.addoption("--trainers", type=int, default=1, help="processes that share the training, with --servers=ray")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_machine(reason): left out with --servers=ray, for this reason")
    grounds.choose(config.getoption("servers"), config.getoption("trainers"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("one_machine")
    if mark is not None and item.config.getoption("servers") != "here":
        pytest.skip(mark.args[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that of the processes that share the files none ends long after the other."""
    places = {name: place for place, name in enumerate(_SLOW)}
    items.sort(key=lambda item: places.get(item.path.relative_to(Path(__file__).parent).parts[0], len(_SLOW)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """All that is imported and collected stays: to look for garbage in it meanwhile took a quarter of the time, and
    whoever collects garbage later need not look through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Native libraries complain of what is still there when the interpreter ends."""
    grounds.leave()
    gc.unfreeze()
