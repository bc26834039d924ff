"""What goes wrong besides kills, for a while each: a full disk, a database out of reach, a clock that is set."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Protocol, Self

from tests.server.postgres import Postgres

NOT_HERE = (OSError, subprocess.CalledProcessError)
"""What is raised where a trouble cannot be made."""


class Trouble(Protocol):
    name: str

    def begin(self) -> None: ...

    def end(self) -> None: ...


class SmallDisk:
    """A file system in memory that can be filled. Only root can mount one."""

    name = "disk full"
    _SIZE = "256m"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ballast = folder / "ballast"
        _run("mount", "-t", "tmpfs", "-o", f"size={self._SIZE}", "tmpfs", folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", self.folder)

    def begin(self) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    def end(self) -> None:
        self.ballast.unlink()


class DatabaseCut:
    """PostgreSQL ends as in a crash, with every connection, and comes back."""

    name = "database cut"

    def __init__(self, postgres: Postgres) -> None:
        self.begin, self.end = postgres.stop, postgres.start


class SteppedClock:
    """The wall clock of the server jumps by up to two hours in either direction, and back later."""

    name = "clock stepped"
    _SECONDS = 7200

    def __init__(self, folder: Path, random: Random) -> None:
        self._random = random
        self._library, self._offset = folder / "clock.so", folder / "clock"
        self._set(0)
        _run("cc", "-shared", "-fPIC", "-O2", "-o", self._library, Path(__file__).with_name("clock.c"))

    @property
    def environment(self) -> Mapping[str, str]:
        return {"LD_PRELOAD": str(self._library), "TINSMITH_CLOCK": str(self._offset)}

    def begin(self) -> None:
        self._set(self._random.randint(-self._SECONDS, self._SECONDS))

    def end(self) -> None:
        self._set(0)

    def _set(self, seconds: int) -> None:
        """In place: the processes have mapped the file."""
        descriptor = os.open(self._offset, os.O_CREAT | os.O_WRONLY)
        os.pwrite(descriptor, struct.pack("l", seconds), 0)
        os.close(descriptor)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)
