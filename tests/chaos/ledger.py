"""What a client was told, written down by the client itself: one file for each, a line of JSON for each thing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Ledger:
    """A client's own book. A line is in the file before the client goes on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def note(self, event: str, **details: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": round(time.monotonic(), 3), **details}) + "\n")

    def close(self) -> None:
        self._file.close()


@dataclass
class Round:
    """One run of a program, as its ledger tells it."""

    name: str
    models: dict[str, list[str]] = field(default_factory=dict)
    """The operations called on each model, in order."""
    results: list[tuple[str, Any]] = field(default_factory=list)
    """What came back, with the kind of operation, in the order in which the program asked for it."""
    acknowledged: list[str] = field(default_factory=list)
    """The ids of the requests that the server took, where the client can see them."""
    longest_wait: float = 0.0
    """Seconds between two lines."""
    error: str | None = None
    is_over: bool = False


def read_rounds(folder: Path) -> list[Round]:
    return [each for path in sorted(folder.glob("*.ledger")) for each in _rounds_of(path)]


def _rounds_of(path: Path) -> Iterator[Round]:
    current: Round | None = None
    before = 0.0
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] == "round":
            current = Round(f"{path.stem}, round {entry['number']}")
            yield current
        else:
            assert current is not None, f"{path} begins with {entry}"
            _add(current, entry)
            current.longest_wait = max(current.longest_wait, entry["at"] - before)
        before = entry["at"]


def _add(current: Round, entry: dict[str, Any]) -> None:
    match entry:
        case {"event": "called", "model": model, "kind": kind}:
            current.models.setdefault(model, []).append(kind)
        case {"event": "result", "kind": kind, "value": value}:
            current.results.append((kind, value))
        case {"event": "acknowledged", "request_id": request_id}:
            current.acknowledged.append(request_id)
        case {"event": "failed", "error": error}:
            current.error = error
        case {"event": "over"}:
            current.is_over = True
        case _:
            raise AssertionError(f"what is {entry}?")


def program_of(name: str) -> str:
    """The program that a round ran: the ledger of a client is named `PROGRAM.PACKAGE`."""
    return name.partition(".")[0]
