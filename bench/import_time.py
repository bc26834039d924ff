"""What `import` costs: CPU, time, memory and modules, with and without torch installed; and the way to a client."""

from __future__ import annotations

import json
import subprocess

import harness
from environments import python_of
from harness import Numbers, Peer, Row, both, clean_environment

RUNS = 15
HEAVY = ("torch", "transformers", "numpy", "pydantic", "httpx", "rich")

# Run as `python -c`, because a bench file would bring imports of its own.
TEXT = """
import sys, time
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
    return [harness.median(mine) for mine in results]


def import_rows(official: Numbers, ours: Numbers, official_torch: Numbers, ours_torch: Numbers) -> list[Row]:
    rows = []
    for where, theirs, mine in (("", official, ours), (", torch installed", official_torch, ours_torch)):
        rows += [
            Row(f"import: CPU{where} (ms)", both(theirs, mine, "cpu"), "a fifth", 5 * mine["cpu"] <= official["cpu"]),
            Row(f"import: wall{where} (ms)", both(theirs, mine, "wall"), "80", mine["wall"] <= 80),
            Row(f"import: memory{where} (MB)", both(theirs, mine, "rss"), "25", mine["rss"] <= 25),
            Row(f"import: modules{where}", both(theirs, mine, "modules"), "200", mine["modules"] <= 200, 0),
            Row(f"import: heavy packages loaded{where}", both(theirs, mine, "heavy"), "0", not mine["heavy"], 0),
        ]
    return rows


def client_rows(official: Numbers, ours: Numbers, official_torch: Numbers, ours_torch: Numbers) -> list[Row]:
    rows = []
    for where, theirs, mine in (("", official, ours), (", torch installed", official_torch, ours_torch)):
        light = 5 * mine["cpu"] <= official["cpu"]
        rows += [
            Row(f"import and a ServiceClient: CPU{where} (ms)", both(theirs, mine, "cpu"), "a fifth", light),
            Row(f"import and a ServiceClient: wall{where} (ms)", both(theirs, mine, "wall")),
            Row(f"import and a ServiceClient: memory{where} (MB)", both(theirs, mine, "rss")),
        ]
    return rows


def main() -> None:
    peers = [harness.OFFICIAL, harness.OURS, Peer("tinker", "official-torch"), Peer("tinsmith", "plain-torch")]
    harness.print_table(
        import_rows(*in_turns(peers, "pass"))
        + client_rows(*in_turns(peers, "sdk.ServiceClient(base_url='http://127.0.0.1:9', api_key='tml-bench')"))
    )


if __name__ == "__main__":
    main()
