"""One real server for the whole session, and a process with each client package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.compat.runner import Runner
from tests.end_to_end.environments import environment
from tests.end_to_end.serving import ServerProcess
from tests.support.tiny_tokenizer import byte_level_bpe

SCRIPTS = "tests.end_to_end.scripts"
OLDER_CLIENTS = ("tinker==0.24.1", "tinker==0.36.0")
"""The oldest that we serve, which is the newest that speaks JSON only, and the last before clients were futures."""

RunScript = Callable[[str], Any]
"""Runs the script of this name, or gives back what its one run gave."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Two random models with a tokenizer: one with its own unembedding, one that shares it with the embedding."""
    from tests.server.tiny_models import save_model

    tokenizer = byte_level_bpe()
    folders = {}
    for name, family in (("tiny/model-1", "qwen3"), ("tiny/model-2", "smollm2")):
        folders[name] = save_model(
            tmp_path_factory.mktemp(family), family, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512
        )
        tokenizer.save(str(folders[name] / "tokenizer.json"))
    return folders


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("state"), models) as running:
        yield running


@pytest.fixture(scope="session")
def official_runner() -> Iterator[Runner]:
    with closing(_runner("tinker")) as runner:
        yield runner


@pytest.fixture(scope="session")
def our_runner() -> Iterator[Runner]:
    with closing(_runner("tinsmith")) as runner:
        yield runner


@pytest.fixture(scope="session")
def official(server: ServerProcess, official_runner: Runner) -> RunScript:
    """Runs a script with the official package, once."""
    return cache(lambda name: official_runner.run(name, server.url))


@pytest.fixture(scope="session")
def ours(server: ServerProcess, our_runner: Runner) -> RunScript:
    """Runs a script with this package, once."""
    return cache(lambda name: our_runner.run(name, server.url))


@pytest.fixture(scope="session", params=["tinker", "tinsmith"])
def either(request: pytest.FixtureRequest) -> RunScript:
    """First the one package, then the other."""
    run: RunScript = request.getfixturevalue("official" if request.param == "tinker" else "ours")
    return run


@pytest.fixture(scope="session", params=OLDER_CLIENTS)
def older(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[RunScript]:
    """Runs a script with an older official client, once."""
    with closing(_runner("tinker", environment(request.param))) as runner:
        yield cache(lambda name: runner.run(name, server.url))


def _runner(package: str, python: Path | str = sys.executable) -> Runner:
    return Runner(package, SCRIPTS, python=python, timeout=90)
