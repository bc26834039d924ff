"""Runs scripts with one package in a process of its own: `python -m tests.compat.runner tinker tests.compat.scripts`.

Importing the official package costs seconds, so one process serves all scripts. The parent writes one JSON line
per script, `{"script": name, "url": url}`, and reads one line with the result or the error.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


class ScriptFailed(Exception):
    """A script ended with an error nobody expected; the text is its traceback."""


class Runner:
    """The parent's end of such a process."""

    def __init__(
        self,
        package: str,
        scripts: str = "tests.compat.scripts",
        *,
        python: Path | str = sys.executable,
        timeout: float = 30.0,
    ) -> None:
        self.package = package
        self._command = [str(python), "-m", "tests.compat.runner", package, scripts]
        self._timeout = timeout
        self._home = tempfile.TemporaryDirectory()
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        # Nothing of the developer's own settings or credentials may leak into a comparison.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKER")}
        environment |= {"HOME": self._home.name, "TINKER_TELEMETRY": "0", "PYTHONWARNINGS": "ignore"}
        return subprocess.Popen(
            self._command,
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, url: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"script": script, "url": url}) + "\n")
        self._process.stdin.flush()
        # A script that hangs must fail the test, not the whole run.
        timer = threading.Timer(self._timeout, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            self._end()
            self._process = self._started()
            raise ScriptFailed(f"{script} with {self.package} killed its process, or took over {self._timeout:.0f} s")
        answer = json.loads(line)
        if "error" in answer:
            raise ScriptFailed(f"{script} with {self.package}:\n{answer['error']}")
        return answer["result"]

    def close(self) -> None:
        self._end()
        self._home.cleanup()

    def _end(self) -> None:
        with self._process:
            self._process.kill()


def serve(package: str, scripts: str) -> None:
    """The child's end. `scripts` is the module that knows them all."""
    known = importlib.import_module(scripts).SCRIPTS
    answers, sys.stdout = sys.stdout, sys.stderr
    module = importlib.import_module(package)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"result": known[job["script"]](module, job["url"])}
        except Exception:  # noqa: BLE001 - the parent reports it
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(*sys.argv[1:])
