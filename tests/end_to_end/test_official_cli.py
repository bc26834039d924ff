"""The command line of the official package manages what lies on our server."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.end_to_end.scripts import train
from tests.end_to_end.serving import KEY, ServerProcess

_COMMAND = Path(sys.executable).with_name("tinker")
_SECONDS = 120.0

# One command after the other in one process, because to import the package takes seconds.
_OBEY = """
import contextlib, io, json, sys
from tinker.cli.__main__ import main_cli
for line in sys.stdin:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main_cli.main(json.loads(line), standalone_mode=False)
    print(json.dumps(printed.getvalue()), flush=True)
"""

Command = Callable[..., Any]


@pytest.fixture
def environment(server: ServerProcess, tmp_path: Path) -> Mapping[str, str]:
    ours = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "HOME": str(tmp_path)}
    return {name: value for name, value in os.environ.items() if not name.startswith("TINKER")} | ours


@pytest.fixture
def command(environment: Mapping[str, str]) -> Iterator[Command]:
    """Runs a command and gives back what it prints as JSON, or its text."""
    with subprocess.Popen(
        [sys.executable, "-c", _OBEY], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def run(*arguments: str) -> Any:
            print(json.dumps(["--format", "json", *arguments]), file=stdin, flush=True)
            assert select.select([stdout], [], [], _SECONDS)[0], "it does not answer"
            return _understood(json.loads(stdout.readline()))

        yield run
        process.kill()


def _understood(printed: str) -> Any:
    return json.loads(printed) if printed.startswith(("{", "[")) else printed


@pytest.fixture
def checkpoint(server: ServerProcess) -> str:
    with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client:
        model = client.create_lora_training_client("tiny/model-1", rank=4, seed=1)
        train(tinsmith, model, [1])
        return str(model.save_state("from-the-shell").result().path)


def test_runs_and_checkpoints_are_listed_published_downloaded_and_deleted(
    command: Command, checkpoint: str, tmp_path: Path
) -> None:
    run_id = _run_id(checkpoint)
    assert "tiny/model-1" in json.dumps(command("run", "info", run_id))
    assert checkpoint in json.dumps(command("checkpoint", "list", "--run-id", run_id))
    command("checkpoint", "publish", checkpoint)
    assert json.dumps(command("checkpoint", "info", checkpoint)).count("true")
    command("checkpoint", "download", checkpoint, "--output", str(tmp_path / "here"))
    assert list((tmp_path / "here").rglob("adapter_model.safetensors"))
    command("checkpoint", "delete", checkpoint, "--yes")
    assert checkpoint not in json.dumps(command("checkpoint", "list", "--run-id", run_id))


def test_the_program_lists_runs(environment: Mapping[str, str], checkpoint: str) -> None:
    listed = [_COMMAND, "--format", "json", "run", "list"]
    ended = subprocess.run(listed, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    # Once it was seen to abort after it had said everything, probably because a thread of its own was inside the native
    # code of its HTTP library when the interpreter went down. JSON that was cut off would not be understood.
    assert ended.returncode in (0, -signal.SIGABRT), ended.stderr
    assert _run_id(checkpoint) in json.dumps(json.loads(ended.stdout))


def _run_id(checkpoint: str) -> str:
    return checkpoint.removeprefix("tinker://").split("/")[0]
