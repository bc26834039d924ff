"""What the benches share: each figure is taken from both packages, in turns, and printed in one table.

A bench file plays two parts. Run by hand it is the conductor: it starts a stub server and calls `in_turns`. That
runs the same file in the environment of each package, in a process of its own, where `measure` gets the package and
returns numbers. So both packages are driven by the same text, and neither sees the other's imports or threads.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from environments import ROOT, python_of

sys.path.insert(0, str(ROOT))  # for tests.support: the stub server, the probes

KEY = "tml-bench"
Numbers = dict[str, float]


class Peer(NamedTuple):
    module: str
    environment: str


OFFICIAL = Peer("tinker", "official")
OURS = Peer("tinsmith", "plain")


def play(conduct: Callable[[], None], measure: Callable[..., Numbers]) -> None:
    """Does what this process was started for."""
    if sys.argv[1:2] != ["--measure"]:
        conduct()
        return
    module, arguments = importlib.import_module(sys.argv[2]), json.loads(sys.argv[3])
    sys.stdout.write("\n" + json.dumps(measure(module, **arguments)) + "\n")
    sys.stdout.flush()
    # What a package does when the interpreter exits is not part of the figure, and may wait for the server.
    os._exit(0)


def measured(peer: Peer, **arguments: Any) -> Numbers:
    """One run of this bench's `measure` in the environment of a package."""
    command = [str(python_of(peer.environment)), sys.argv[0], "--measure", peer.module, json.dumps(arguments)]
    done = subprocess.run(command, env=clean_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def in_turns(runs: int, make_arguments: Callable[[], dict[str, Any]] = dict) -> tuple[Numbers, Numbers]:
    """Medians of the official package and of ours, from alternating runs: a busy machine is busy for both."""
    results: tuple[list[Numbers], list[Numbers]] = ([], [])
    for _ in range(runs):
        for peer, mine in zip((OFFICIAL, OURS), results, strict=True):
            mine.append(measured(peer, **make_arguments()))
    return median(results[0]), median(results[1])


def median(results: Sequence[Numbers]) -> Numbers:
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def clean_environment() -> dict[str, str]:
    """This process's environment without what would change the figures: byte code is cached, as it is for users."""
    ours = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONSTARTUP")
    return {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("TINKER_")}


class Row(NamedTuple):
    figure: str
    official: float
    ours: float
    bar: str
    """What we promise."""
    met: bool
    decimals: int = 1

    @property
    def cells(self) -> tuple[str, ...]:
        ratio = f"{self.ours / self.official:.2f}" if self.official else "-"
        numbers = (f"{value:,.{self.decimals}f}" for value in (self.official, self.ours))
        return (self.figure, *numbers, self.bar, "yes" if self.met else "NO", ratio)


def print_table(rows: Sequence[Row]) -> None:
    head = ("figure", "tinker 0.36.0", "tinsmith", "bar", "met", "ratio")
    lines = [head, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, tuple("-" * width for width in widths))
    for line in lines:
        cells = (f"{cell:>{width}}" if column in (1, 2, 5) else f"{cell:<{width}}"
                 for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
        print("| " + " | ".join(cells) + " |")


def service(sdk: ModuleType, url: str) -> Any:
    return sdk.ServiceClient(base_url=url, api_key=KEY)


def script_name() -> str:
    return Path(sys.argv[0]).stem
