"""Virtual environments of the benches, under `.bench/`: one per package, with and without torch.

They are made on first use and kept; delete `.bench/` to make them anew. Tinsmith is installed in editable mode, so
what is measured is the working tree.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".bench"

OURS = ("--editable", str(ROOT))
OFFICIAL = ("tinker==0.38.0",)
TORCH = ("--constraint", str(ROOT / "constraints-cpu.txt"), "torch")
SKYRL = ("skyrl[tinker,jax]==0.3.0", "uv", *TORCH)

REQUIREMENTS = {
    "plain": OURS,
    "plain-torch": (*OURS, *TORCH),
    "official": OFFICIAL,
    "official-torch": (*OFFICIAL, *TORCH),
    "skyrl": SKYRL,
}


def python_of(name: str) -> Path:
    """The interpreter of an environment, which is made if it is not there yet."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        sys.stderr.write(f"making {folder} ...\n")
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *REQUIREMENTS[name]], check=True)
        ready.touch()
    return python


def main() -> None:
    for name in REQUIREMENTS:
        print(python_of(name))


if __name__ == "__main__":
    main()
