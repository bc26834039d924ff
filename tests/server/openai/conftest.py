"""One running API with a tokenizer for all tests here; behind it, the stand-in worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.openai.talking import Talking


@pytest.fixture(scope="package")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talking]:
    with Talking(tmp_path_factory.mktemp("talking")) as running:
        yield running


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Talking]:
    """For tests that stop it."""
    with Talking(tmp_path) as running:
        yield running
