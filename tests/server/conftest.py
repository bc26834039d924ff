"""Fixtures for the server's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.server.tiny_models import save_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny products gain nothing from threads, and several test runs share the machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama as a model folder."""
    return save_model(tmp_path_factory.mktemp("models") / "llama")
