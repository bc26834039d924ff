"""One running API for all tests that need no settings of their own; each works in a session of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compat.runner import Runner
from tests.server.api.running import RunningServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture(scope="module", params=["tinker", "tinsmith"])
def client(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """A process with the official package, then one with ours."""
    runner = Runner(request.param)
    yield runner
    runner.close()
