"""The command line of the official package manages what lies on our server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.end_to_end.scripts import train
from tests.end_to_end.serving import KEY, ServerProcess

_COMMAND = Path(sys.executable).with_name("tinker")

Command = Callable[..., Any]


@pytest.fixture
def command(server: ServerProcess, tmp_path: Path) -> Command:
    """Runs a command and gives back what it prints as JSON, or its text."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKER")}
    environment |= {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "HOME": str(tmp_path)}

    def run(*arguments: str) -> Any:
        ended = subprocess.run(
            [_COMMAND, "--format", "json", *arguments], env=environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout) if ended.stdout.startswith(("{", "[")) else ended.stdout

    return run


@pytest.fixture
def checkpoint(server: ServerProcess) -> str:
    with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client:
        model = client.create_lora_training_client("tiny/model-1", rank=4, seed=1)
        train(tinsmith, model, [1])
        return str(model.save_state("from-the-shell").result().path)


def test_runs_and_checkpoints_are_listed_published_downloaded_and_deleted(
    command: Command, checkpoint: str, tmp_path: Path
) -> None:
    run_id = checkpoint.removeprefix("tinker://").split("/")[0]
    assert run_id in json.dumps(command("run", "list"))
    assert "tiny/model-1" in json.dumps(command("run", "info", run_id))
    assert checkpoint in json.dumps(command("checkpoint", "list", "--run-id", run_id))
    command("checkpoint", "publish", checkpoint)
    assert json.dumps(command("checkpoint", "info", checkpoint)).count("true")
    command("checkpoint", "download", checkpoint, "--output", str(tmp_path / "here"))
    assert list((tmp_path / "here").rglob("adapter_model.safetensors"))
    command("checkpoint", "delete", checkpoint, "--yes")
    assert checkpoint not in json.dumps(command("checkpoint", "list", "--run-id", run_id))
