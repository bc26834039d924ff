"""A small file system for a test that fills it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.troubles import NOT_HERE, SmallDisk


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    folder.mkdir()
    try:
        disk = SmallDisk(folder)
    except NOT_HERE as error:
        pytest.skip(f"a small file system can be mounted by root alone: {error}")
    with disk:
        yield disk
