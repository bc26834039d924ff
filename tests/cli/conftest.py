"""A scripted server with something on it, a real server, and the program in front of either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tinsmith
from tests.cli.program import KEY, Done, InProcess, Program, environment, variables_of
from tests.support.server import FakeServer
from tinsmith.cli.main import run
from tinsmith.client.config import Config


class Stock(NamedTuple):
    """What is on the scripted server."""

    run_id: str
    session_id: str
    training: str
    sampler: str
    exported: str


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def stock(server: FakeServer) -> Stock:
    """One run with a checkpoint of each kind."""
    config = Config(base_url=server.url, api_key=KEY, telemetry=False)
    with tinsmith.ServiceClient(config=config) as client:
        trainer = client.create_lora_training_client("tiny/model-1", rank=8, user_metadata={"note": "first"})
        training = trainer.save_state("one").result().path
        sampler = trainer.save_weights_for_sampler("two", ttl_seconds=7200).result().path
        exported = trainer.save_weights_external("three").result().path
        (session_id,) = client.rest.list_sessions().result().sessions
    server.requests.clear()
    return Stock(training.split("/")[2], session_id, training, sampler, exported)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def cli(
    server: FakeServer, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> InProcess:
    """Runs a command line in this process, against the scripted server."""
    wanted = environment(home, **variables_of(server.url))
    monkeypatch.setattr("os.environ", wanted)
    monkeypatch.chdir(home)

    def call(*arguments: str | Path) -> Done:
        code = run([str(each) for each in arguments])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def program(server: FakeServer, home: Path) -> Program:
    """The program as a process, against the scripted server."""
    return Program(home, **variables_of(server.url))
