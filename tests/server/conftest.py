"""Fixtures for the server's tests. Torch is imported only by the tests that use it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


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
