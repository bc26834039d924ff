"""What `import` costs: CPU, time, memory and modules, with and without torch installed; and the way to a client."""

from __future__ import annotations

import json
import statistics
import subprocess

import harness
from environments import python_of
from harness import Numbers, Peer, Row, clean_environment

RUNS = 15
HEAVY = ("torch", "transformers", "numpy", "pydantic", "httpx", "rich")

# Run as `python -c`, because a bench file would bring imports of its own.
TEXT = """
import sys, time
before = len(sys.modules)
wall, cpu = time.perf_counter(), time.process_time()
import {module} as sdk
{then}
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
rss = int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
heavy = sum(name in sys.modules for name in {heavy})
sys.stdout.write('{{"cpu": %r, "wall": %r, "rss": %r, "modules": %d, "heavy": %d}}'
                 % (1e3 * cpu, 1e3 * wall, rss, len(sys.modules), heavy))
sys.stdout.flush()
import os
os._exit(0)
"""
NOTHING = "pass"
MAKE_A_CLIENT = "sdk.ServiceClient(base_url='http://127.0.0.1:9', api_key='tml-bench')"


def imported(peer: Peer, then: str) -> Numbers:
    text = TEXT.format(module=peer.module, then=then, heavy=HEAVY)
    command = [str(python_of(peer.environment)), "-c", text]
    done = subprocess.run(command, env=clean_environment(), stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def in_turns(peers: list[Peer], then: str) -> list[Numbers]:
    results: list[list[Numbers]] = [[] for _ in peers]
    for run in range(RUNS + 1):
        for peer, mine in zip(peers, results, strict=True):
            numbers = imported(peer, then)
            if run:  # the first one reads from the disk and writes byte code
                mine.append(numbers)
    return [{name: statistics.median(run[name] for run in mine) for name in mine[0]} for mine in results]


def main() -> None:
    peers = [harness.OFFICIAL, harness.OURS, Peer("tinker", "official-torch"), Peer("tinsmith", "plain-torch")]
    official, ours, official_torch, ours_torch = in_turns(peers, NOTHING)
    official_client, our_client, official_client_torch, our_client_torch = in_turns(peers, MAKE_A_CLIENT)
    fifth = "a fifth"
    rows = [
        Row("import, CPU (ms)", official["cpu"], ours["cpu"], fifth, 5 * ours["cpu"] <= official["cpu"]),
        Row("import, CPU, torch installed (ms)", official_torch["cpu"], ours_torch["cpu"], "unchanged by torch",
            abs(ours_torch["cpu"] - ours["cpu"]) <= max(5, 0.25 * ours["cpu"])),
        Row("import, wall (ms)", official["wall"], ours["wall"], "80", ours["wall"] <= 80),
        Row("import, wall, torch installed (ms)", official_torch["wall"], ours_torch["wall"], "80",
            ours_torch["wall"] <= 80),
        Row("memory after import (MB)", official["rss"], ours["rss"], "25", ours["rss"] <= 25),
        Row("memory after import, torch installed (MB)", official_torch["rss"], ours_torch["rss"], "25",
            ours_torch["rss"] <= 25),
        Row("modules after import", official["modules"], ours["modules"], "200", ours["modules"] <= 200, 0),
        Row("heavy packages loaded by import", official_torch["heavy"], ours_torch["heavy"], "0",
            not ours_torch["heavy"], 0),
        Row("import and a ServiceClient, CPU (ms)", official_client["cpu"], our_client["cpu"], fifth,
            5 * our_client["cpu"] <= official_client["cpu"]),
        Row("import and a ServiceClient, CPU, torch installed (ms)", official_client_torch["cpu"],
            our_client_torch["cpu"], fifth, 5 * our_client_torch["cpu"] <= official_client_torch["cpu"]),
        Row("import and a ServiceClient, wall (ms)", official_client["wall"], our_client["wall"], fifth,
            5 * our_client["wall"] <= official_client["wall"]),
        Row("memory with a ServiceClient (MB)", official_client["rss"], our_client["rss"], "-", True),
        Row("heavy packages loaded with a ServiceClient", official_client_torch["heavy"], our_client_torch["heavy"],
            "no torch", True, 0),
    ]
    harness.print_table(rows)


if __name__ == "__main__":
    main()
