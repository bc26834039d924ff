"""What the clients saw, in memory until the end: writing it down while it happens would be load of our own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple


class Record(NamedTuple):
    """`time` is the clock that all processes of a machine share."""

    kind: str
    owner: str
    what: str
    time: float
    seconds: float


class Records:
    def __init__(self) -> None:
        self._all: list[Record] = []

    def note(self, kind: str, owner: str, what: str, seconds: float = 0.0) -> None:
        self._all.append(Record(kind, owner, what, time.monotonic(), seconds))

    def write(self, path: Path) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self._all))
        part.rename(path)


def read_records(path: Path) -> list[Record]:
    return [Record(*fields) for fields in json.loads(path.read_text())]
