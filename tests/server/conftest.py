"""Fixtures for the server's tests. Torch is imported only by the tests that use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.workbench import Workbench


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny products gain nothing from threads, and several test runs share the machine."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama as a model folder."""
    from tests.server.tiny_models import save_model

    return save_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def bench(tmp_path: Path, tiny_folder: Path) -> Iterator[Workbench]:
    from tests.server.workbench import Workbench

    made = Workbench(tmp_path, tiny_folder)
    yield made
    made.store.close()
    assert made.died_of is None
