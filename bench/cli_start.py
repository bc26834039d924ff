"""What a command costs before it does anything: CPU and time of `--help` and `version`, with and without torch."""

from __future__ import annotations

import resource
import subprocess
import time

import environments
import harness
from environments import ROOT, TORCH, python_of
from harness import Numbers, Peer, Row, both, clean_environment

RUNS = 15
COMMANDS = ("--help", "version")

OURS = ("--editable", f"{ROOT}[cli]")
environments.REQUIREMENTS.update({"cli": OURS, "cli-torch": (*OURS, *TORCH)})
PEERS = [harness.OFFICIAL, Peer("tinsmith", "cli"), Peer("tinker", "official-torch"), Peer("tinsmith", "cli-torch")]


def started(peer: Peer, argument: str) -> Numbers:
    program = python_of(peer.environment).with_name(peer.module)
    before, wall = _cpu_of_children(), time.perf_counter()
    subprocess.run([program, argument], env=clean_environment(), stdout=subprocess.DEVNULL, check=True)
    return {"cpu": 1e3 * (_cpu_of_children() - before), "wall": 1e3 * (time.perf_counter() - wall)}


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def in_turns(argument: str) -> list[Numbers]:
    results: list[list[Numbers]] = [[] for _ in PEERS]
    for run in range(RUNS + 1):
        for peer, mine in zip(PEERS, results, strict=True):
            numbers = started(peer, argument)
            if run:  # the first one reads from the disk and writes byte code
                mine.append(numbers)
    return [harness.median(mine) for mine in results]


def rows(argument: str) -> list[Row]:
    official, ours, official_torch, ours_torch = in_turns(argument)
    found = []
    for where, theirs, mine in (("", official, ours), (", torch installed", official_torch, ours_torch)):
        light = 3 * mine["cpu"] <= official["cpu"] and mine["cpu"] <= 80
        found += [
            Row(f"{argument}: CPU{where} (ms)", both(theirs, mine, "cpu"), "a third, 80", light),
            Row(f"{argument}: wall{where} (ms)", both(theirs, mine, "wall")),
        ]
    return found


def main() -> None:
    harness.print_table([row for argument in COMMANDS for row in rows(argument)])


if __name__ == "__main__":
    main()
