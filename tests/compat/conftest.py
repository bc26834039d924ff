"""One process per package for the whole session, and one run of every case with each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.compat.cases import CASES, RunCase, run_case
from tests.compat.runner import Runner


def _runs_with(package: str) -> Iterator[RunCase]:
    runner = Runner(package)
    yield cache(lambda name: run_case(CASES[name], runner))
    runner.close()


@pytest.fixture(scope="session")
def official() -> Iterator[RunCase]:
    """Runs a case with the official package, once."""
    yield from _runs_with("tinker")


@pytest.fixture(scope="session")
def ours() -> Iterator[RunCase]:
    """Runs a case with this package, once."""
    yield from _runs_with("tinsmith")
