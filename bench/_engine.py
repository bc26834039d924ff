"""What the benches of the engine share: processes that take turns at the same work, and the table of their figures.

A bench file plays two parts. Run by hand it conducts: for each case it starts the same file again with `--play`, once
for each side, and lets the sides do round after round in turns. A ratio is the median of those of the single rounds, so
that a busy machine is busy for both. A side is a process of its own: its peak of memory is its own, too.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from harness import clean_environment

from tinsmith.server.embedded import embedded_model
from tinsmith.server.process_life import WORKER_ENVIRONMENT

THREADS = 2
RANK = 32
OURS = "tinsmith"
PEER_LIBRARIES = ("peft", "transformers")
"""How the names of the sides that are not ours begin."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

# Threads of OpenMP wait by spinning, which makes both sides many times slower as soon as anything else runs. So neither
# does. Ours gets what else the server gives to its workers, too; the peer runs as it comes.
ENVIRONMENT = clean_environment() | {
    "GOMP_SPINCOUNT": WORKER_ENVIRONMENT["GOMP_SPINCOUNT"],
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

C = TypeVar("C")
Round = Callable[[int], float]
"""Does the work of one round, given its number, and returns the seconds it took."""


class Done(NamedTuple):
    """What a side tells about a round."""

    seconds: float
    peak_mb: float


Results = Mapping[str, Sequence[Done]]
"""The rounds of each side."""


def model_folder() -> str:
    return embedded_model().location


# --- conducting ------------------------------------------------------------------------------------------------------


class _Player:
    """The process of one side."""

    def __init__(self, side: str, case: str) -> None:
        self._part = [sys.argv[0], "--play", side, case]
        environment = ENVIRONMENT if side.startswith(PEER_LIBRARIES) else ENVIRONMENT | WORKER_ENVIRONMENT
        self._process = subprocess.Popen(
            [sys.executable, *self._part], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def round(self, number: int) -> Done:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{' '.join(self._part)} ended with {self._process.wait()}; see what it wrote above.")
        return Done(*json.loads(line))

    def __enter__(self) -> _Player:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def in_turns(case: str, sides: Iterable[str], rounds: int) -> Results:
    """The first round, in which each side loads the model and fills its caches, does not count."""
    with ExitStack() as stack:
        players = {side: stack.enter_context(_Player(side, case)) for side in sides}
        results: dict[str, list[Done]] = {side: [] for side in players}
        for number in range(rounds + 1):
            for side, player in list(players.items())[:: 1 if number % 2 else -1]:
                done = player.round(number)
                if number:
                    results[side].append(done)
    return results


def seconds(results: Results, side: str) -> float:
    return statistics.median(done.seconds for done in results[side])


def peak_mb(results: Results, side: str) -> float:
    return max(done.peak_mb for done in results[side])


def time_ratio(results: Results, side: str, other: str) -> float:
    """How often the time of one side holds that of another."""
    pairs = zip(results[side], results[other], strict=True)
    return statistics.median(one.seconds / two.seconds for one, two in pairs)


# --- playing ---------------------------------------------------------------------------------------------------------


def play(
    cases: Mapping[str, C],
    sides: Mapping[str, Callable[[C], Round]],
    conduct: Callable[[str, C, int], Iterable[Row]],
    default_rounds: int,
) -> None:
    """Does what this process was started for."""
    if sys.argv[1:2] == ["--play"]:
        side, case = sys.argv[2:]
        _do_rounds(sides[side](cases[case]))
        return
    options = _options(cases, default_rounds)
    print_line("figure", "peer", "peer's", "tinsmith", "ratio", "bar")
    for name in options.only or cases:
        for row in conduct(name, cases[name], options.rounds):
            print_line(*row.cells)


def _options(cases: Iterable[str], default_rounds: int) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=list(cases), metavar="CASE", help=", ".join(cases))
    parser.add_argument("--rounds", type=int, default=default_rounds)
    return parser.parse_args()


def _do_rounds(one_round: Round) -> None:
    for line in sys.stdin:
        spent = one_round(int(line))
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(Done(spent, peak_mb)), flush=True)


# --- the table -------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    figure: str
    peer: str
    theirs: float
    ours: float
    ratio: float
    """Ours to theirs, so that a bar says what it asks of us."""

    bar: float
    at_least: bool = True
    decimals: int = 0

    @property
    def cells(self) -> Sequence[str]:
        numbers = (f"{value:,.{self.decimals}f}" for value in (self.theirs, self.ours))
        met = self.ratio >= self.bar if self.at_least else self.ratio <= self.bar
        bar = f"{'>=' if self.at_least else '<='} {self.bar:.2f}{'' if met else ' MISSED'}"
        return self.figure, self.peer, *numbers, f"{self.ratio:.2f}", bar


def print_line(figure: str, peer: str, theirs: str, ours: str, ratio: str, bar: str) -> None:
    """Line by line, since a case takes a minute."""
    print(f"| {figure:<40} | {peer:<18} | {theirs:>8} | {ours:>8} | {ratio:>5} | {bar:<14} |", flush=True)
