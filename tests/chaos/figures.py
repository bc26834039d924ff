"""The campaign in numbers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from statistics import median

from tests.chaos.ledger import Round

_REBUILT = re.compile(r"Rebuilt \S+ in ([\d.]+) s: replayed (\d+) operations")


@dataclass
class Part:
    """What came of one part of the campaign."""

    name: str
    kills: int
    faults: Counter[str]
    rounds: list[Round]
    seconds: float
    starts: int
    log: str
    complaints: list[str]

    @property
    def operations(self) -> int:
        return sum(len(called) for each in self.rounds for called in each.models.values())

    @property
    def samples(self) -> int:
        return sum(kind == "sample" for each in self.rounds for kind, _ in each.results)


def describe(part: Part) -> str:
    faults = ", ".join(f"{name} {count}" for name, count in sorted(part.faults.items()))
    lines = [
        f"{part.name}: {part.kills} kills in {part.seconds:.0f} s, {part.starts} starts ({faults})",
        f"  {len(part.rounds)} rounds, {part.operations} training operations, {part.samples} samples",
        f"  {_replays(part.log)}",
    ]
    if part.rounds:
        longest = max(each.longest_wait for each in part.rounds)
        lines.append(f"  the longest wait of a client: {longest:.1f} s")
    return "\n".join([*lines, *(f"  WRONG: {complaint}" for complaint in part.complaints)])


def _replays(log: str) -> str:
    found = [(float(seconds), int(operations)) for seconds, operations in _REBUILT.findall(log)]
    if not found:
        return "no model was built again"
    seconds, operations = zip(*found, strict=True)
    return (
        f"{len(found)} models built again: median {median(operations):.0f} operations in {median(seconds):.2f} s, "
        f"most {max(operations)} in {max(seconds):.2f} s"
    )
