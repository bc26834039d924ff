"""One process per package for the whole session, and one run of every case with each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.compat.cases import CASES, RunCase, run_case
from tests.compat.runner import Runner


@pytest.fixture(scope="session")
def official_runner() -> Iterator[Runner]:
    runner = Runner("tinker")
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def our_runner() -> Iterator[Runner]:
    runner = Runner("tinsmith")
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def official(official_runner: Runner) -> RunCase:
    """Runs a case with the official package, once."""
    return cache(lambda name: run_case(CASES[name], official_runner))


@pytest.fixture(scope="session")
def ours(our_runner: Runner) -> RunCase:
    """Runs a case with this package, once."""
    return cache(lambda name: run_case(CASES[name], our_runner))
