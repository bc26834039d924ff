"""The files of an export before there are any: their sizes are known, their content is made while it is read.

So an export can be written into a folder or sent over a network, and takes neither memory nor disk on its way.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tinsmith.errors import InvalidInputError

OnProgress = Callable[[str, int, int], None]
"""Hears which file is being written, how many bytes of all files are, and how many there will be."""

_COPIED_BYTES = 2**20


class NewFile(NamedTuple):
    name: str
    """Its path within the export, with slashes."""
    size: int
    blocks: Callable[[], Iterator[bytes]]

    @classmethod
    def holding(cls, name: str, content: bytes | str) -> NewFile:
        data = content.encode() if isinstance(content, str) else content
        return cls(name, len(data), lambda: iter((data,)))

    @classmethod
    def json(cls, name: str, content: Mapping[str, Any]) -> NewFile:
        return cls.holding(name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def copy(cls, name: str, file: Path) -> NewFile:
        return cls(name, file.stat().st_size, partial(_read, file))


def _read(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        yield from iter(partial(opened.read, _COPIED_BYTES), b"")


def write_files(
    files: Sequence[NewFile], folder: Path, on_progress: OnProgress = lambda file, done, total: None
) -> None:
    """All of them, on the disk when this returns."""
    done, total = 0, sum(file.size for file in files)
    _check_room(folder, total)
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as opened:
            for block in file.blocks():
                opened.write(block)
                done += len(block)
                on_progress(file.name, done, total)
            opened.flush()
            os.fsync(opened.fileno())


def _check_room(folder: Path, needed: int) -> None:
    """Better said at once than after half an hour of writing."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidInputError(
            f"The export takes {needed / 2**30:.2f} GiB, and the disk of {folder.parent} has {free / 2**30:.2f} GiB "
            "left. Make room, or export to another disk.",
            field="folder",
            value=str(folder.parent),
        )
