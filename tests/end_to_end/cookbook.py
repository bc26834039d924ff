"""tinker-cookbook as its users run it: recipes on the command line, in an environment of its own.

It asks the hub for tokenizers and data by name. A folder of that name below the one it runs in goes first, with the
tokenizer as with the data, so nothing of it has to be changed to do without a hub.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.end_to_end.serving import KEY, ServerProcess
from tests.support.hub import clean_environment

PACKAGE = "tinker-cookbook[math-rl]==0.5.8"
RUN_SECONDS = 480.0

_WITH_OUR_CLIENT = """
import runpy, sys
import tinsmith.compat
tinsmith.compat.install()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Cookbook:
    python: Path
    """The interpreter that has it."""
    server: ServerProcess
    models: Mapping[str, Path]

    def run_recipe(self, name: str, folder: Path, *, with_our_client: bool = False, **options: Any) -> Run:
        """Run a recipe in a folder, with the data that `write_data` put there."""
        start = ["-c", _WITH_OUR_CLIENT] if with_our_client else ["-m"]
        log = folder / "log"
        settings = [f"{key}={value}" for key, value in {**options, "log_path": log}.items()]
        self.run(*start, f"tinker_cookbook.recipes.{name}", *settings, folder=folder)
        return Run(log)

    def run(self, *arguments: str, folder: Path) -> None:
        self._link_models(folder)
        # Nothing of the developer's own settings or credentials may matter.
        variables = {"TINKER_BASE_URL": self.server.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
        variables |= {"HOME": str(folder), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [self.python, *arguments],
            cwd=folder,
            env=clean_environment(**variables),
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}\n{self.server.log()[-2000:]}"

    def _link_models(self, folder: Path) -> None:
        for name, source in self.models.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(source, target_is_directory=True)


@dataclass(frozen=True)
class Run:
    """What a recipe has left behind."""

    log: Path

    def metric(self, name: str) -> list[float]:
        """Its value at every step."""
        return [step[name] for step in _read_lines(self.log / "metrics.jsonl")]

    @property
    def state_path(self) -> str:
        """Of its last checkpoint."""
        return str(_read_lines(self.log / "checkpoints.jsonl")[-1]["state_path"])


def write_data(folder: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """A dataset as the hub has them: with one configuration, one split, and a card that says so."""
    data = folder / name
    data.mkdir(parents=True)
    _write_lines(data / "train.jsonl", rows)
    (data / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n")


def begin_from(folder: Path, state_path: str) -> None:
    """Lets the recipe in a folder find a checkpoint, as if it had been interrupted before its first step."""
    (folder / "log").mkdir()
    _write_lines(folder / "log" / "checkpoints.jsonl", [{"name": "taught", "batch": 0, "state_path": state_path}])


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
