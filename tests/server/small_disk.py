"""A small file system for a test that fills it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.troubles import NOT_HERE, SmallDisk


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk | None]:
    """Only root can mount one; others have none, and nothing to test."""
    folder.mkdir()
    try:
        disk = SmallDisk(folder)
    except NOT_HERE:
        yield None
        return
    with disk:
        yield disk
