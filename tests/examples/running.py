"""Runs an example with either package: `python -m tests.examples.running tinker URL` gives each one step."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples"
TRAINING = ("demo", "preference", "reinforcement", "custom_loss", "distillation")
OUR_IMPORT = "import tinsmith as tinker\n"
SMALLER = {
    "demo": {"HELD_OUT": ["What is a library?", "How do I stay healthy?"]},
}
"""Sizes with which an example makes its point in less time than with those that are good to read."""


def load(name: str, package: str = "tinsmith") -> ModuleType:
    """The example as a module, after the one change that it needs for another package: its import line."""
    path = FOLDER / f"{name}.py"
    source = path.read_text(encoding="utf-8")
    assert source.count("tinsmith as") == 1
    spec = importlib.util.spec_from_file_location(f"examples.{name}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))  # where it finds its neighbour when it is run as a script
    exec(compile(source.replace(OUR_IMPORT, f"import {package} as tinker\n"), path, "exec"), module.__dict__)
    assert module.tinker.__name__ == package
    smaller: dict[str, Any] = SMALLER.get(name, {})
    assert smaller.keys() <= vars(module).keys()
    vars(module).update(smaller)
    return module


def main(package: str, url: str) -> None:
    """Writes what each of them found as the last line."""
    found: dict[str, Any] = {name: load(name, package).main(base_url=url, steps=1) for name in TRAINING}
    found["evaluation"] = load("evaluation", package).main(base_url=url)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
