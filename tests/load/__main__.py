"""`python -m tests.load`: 1,000 clients with 10,000 queued samples and 50 models in training, on one server.

The server runs with its default settings (float32, and one thread for the tiny products). Bounds are in `figures.py`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.load.campaign import Group, Load
from tests.load.figures import Figures, table

GROUPS = {
    "http-1": Group("http", samplers=425),
    "http-2": Group("http", samplers=425),
    "tinsmith": Group("tinsmith", samplers=100),
    "tinker": Group("tinker", samplers=50),
    "http-models": Group("http", models=20),
    "tinsmith-models": Group("tinsmith", models=20),
    "tinker-models": Group("tinker", models=10),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("--samples", type=int, default=10, help="of each of the 1,000 clients")
    parser.add_argument("--keys", type=int, default=10)
    parser.add_argument("--alone", type=float, default=15.0, help="seconds that one client is measured alone")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-load-"))
    say = partial(print, flush=True)
    say(f"load average: {os.getloadavg()[0]:.1f} before")
    seen = Load(folder, GROUPS, samples=options.samples, keys=options.keys).run(options.alone)
    say(f"load average: {os.getloadavg()[0]:.1f} after")
    for complaint in seen.complaints:
        say(complaint)
    samples = options.samples * sum(group.samplers for group in GROUPS.values())
    figures = Figures(seen, samples=samples, models=sum(group.models for group in GROUPS.values())).all()
    say(table(figures))
    if seen.complaints or not all(figure.is_kept for figure in figures):
        say(f"What the clients saw and the server's log are in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
