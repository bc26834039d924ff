"""One process per package for a file of tests, and one run of every case with each.

Not for the whole session: the clients of the official package would go on looking for servers that are long gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.compat.cases import CASES, RunCase, run_case
from tests.compat.runner import Runner


@pytest.fixture(scope="module")
def official_runner() -> Iterator[Runner]:
    runner = Runner("tinker")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def our_runner() -> Iterator[Runner]:
    runner = Runner("tinsmith")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def official(official_runner: Runner) -> RunCase:
    """Runs a case with the official package, once."""
    return cache(lambda name: run_case(CASES[name], official_runner))


@pytest.fixture(scope="module")
def ours(our_runner: Runner) -> RunCase:
    """Runs a case with this package, once."""
    return cache(lambda name: run_case(CASES[name], our_runner))
