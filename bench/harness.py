"""What the benches share: each figure is taken from both packages, in turns, and printed in one table.

A bench file plays two parts. Run by hand it conducts: it starts a stub server and calls `measured`, which runs the
same file again in the environment of a package, in a process of its own. There `measure` gets the package and
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
from types import ModuleType
from typing import Any, NamedTuple

from environments import ROOT, python_of

sys.path.insert(0, str(ROOT))  # for tests.support: the stub server and the probes

KEY = "tml-bench"
RUN_SECONDS = 120
Numbers = dict[str, float]


class Peer(NamedTuple):
    module: str
    environment: str


OFFICIAL = Peer("tinker", "official")
OURS = Peer("tinsmith", "plain")


def play(conduct: Callable[[], None], measure: Callable[..., Any]) -> None:
    """Does what this process was started for."""
    if sys.argv[1:2] != ["--measure"]:
        conduct()
        return
    module, arguments = importlib.import_module(sys.argv[2]), json.loads(sys.argv[3])
    result = measure(module, **arguments)
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    sys.stdout.flush()
    # What a package does when the interpreter exits is not part of the figure, and may wait for the server.
    os._exit(0)


def measured(peer: Peer, **arguments: Any) -> Any:
    """What this bench's `measure` returns for a package. Its log goes nowhere: the faults are meant."""
    command = [str(python_of(peer.environment)), sys.argv[0], "--measure", peer.module, json.dumps(arguments)]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False, timeout=RUN_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def median(results: Sequence[Numbers]) -> Numbers:
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def best(results: Sequence[Numbers]) -> Numbers:
    """The lowest of each number: what remains of a time when nothing else ran on the machine."""
    return {name: min(result[name] for result in results) for name in results[0]}


def in_turns(runs: int, one_run: Callable[[Peer], Numbers]) -> tuple[Numbers, Numbers]:
    """Medians of the official package and of ours, from alternating runs: a busy machine is busy for both."""
    results = [(one_run(OFFICIAL), one_run(OURS)) for _ in range(runs)]
    return median([official for official, _ in results]), median([ours for _, ours in results])


def clean_environment() -> dict[str, str]:
    """This process's environment without what would change the figures: byte code is cached, as it is for users."""
    unwanted = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONSTARTUP")
    return {
        name: value for name, value in os.environ.items() if name not in unwanted and not name.startswith("TINKER_")
    }


def service(sdk: ModuleType, url: str) -> Any:
    return sdk.ServiceClient(base_url=url, api_key=KEY)


class Row(NamedTuple):
    figure: str
    official_and_ours: Sequence[float]
    bar: str = "-"
    """What we promise, if anything."""
    met: bool = True
    decimals: int = 1

    @property
    def cells(self) -> tuple[str, ...]:
        official, ours = self.official_and_ours
        numbers = (f"{value:,.{self.decimals}f}" for value in (official, ours))
        ratio = f"{ours / official:.2f}" if official else "-"
        return (self.figure, *numbers, self.bar if self.met else f"{self.bar} MISSED", ratio)


def both(official: Numbers, ours: Numbers, name: str) -> tuple[float, float]:
    return official[name], ours[name]


def print_table(rows: Sequence[Row]) -> None:
    lines = [("figure", "tinker 0.38.0", "tinsmith", "bar", "ratio"), *(row.cells for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    for line in lines:
        figure, official, ours, bar, ratio = (
            cell.rjust(width) if column in (1, 2, 4) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print(f"| {figure} | {official} | {ours} | {bar} | {ratio} |", flush=True)
