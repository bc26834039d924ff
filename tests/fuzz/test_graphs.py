"""Random custom losses in the engine: each gives a result or is refused, and none takes more memory than its share."""

from __future__ import annotations

import resource
import warnings
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
import torch

from tests.fuzz import graphs
from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.custom_graph import CustomLoss
from tinsmith.server.engine.graph_operations import FUNCTIONS, METHODS
from tinsmith.types import CustomLossGraph

INPUTS = 2000
MORE_BYTES = 4 * 2**30


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Whoever asks for gigabytes gets an error instead of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("little_memory")
def test_random_losses_are_computed_or_refused() -> None:
    every_function, every_method = sorted(FUNCTIONS), sorted(METHODS)
    outcomes = Counter[str]()
    for number in range(INPUTS):
        random = Random(f"graph:{number}")
        loss = graphs.random_loss(random, every_function, every_method) if number % 2 else graphs.random_loss(random)
        outcomes[_outcome(CustomLossGraph.from_builtins(loss["graph"]))] += 1
    assert set(outcomes) == {"computed", "refused"}, outcomes


def _outcome(graph: CustomLossGraph) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has much to say about arguments such as these
        try:
            CustomLoss.from_graph(graph).run(torch.linspace(-2, -0.1, 6), {})
        except InvalidInputError as error:
            return "out of memory" if "allocate" in error.message else "refused"
    return "computed"
