"""The worker's ear: a pipe or a connection in which every byte means that there is work, and whose end means that it
should stop.
"""

from __future__ import annotations

import os
import select


def first_line(descriptor: int) -> bytes:
    """What comes before the rings, and nothing of those."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise SystemExit("This process is started by the server; it expects its settings on standard input.")
        line += byte
    return line


class Bell:
    """`inner` is a pipe in which other threads of the worker ring, and which never ends."""

    def __init__(self, descriptor: int, inner: int | None = None) -> None:
        self._descriptors = [descriptor] if inner is None else [descriptor, inner]
        self.is_closed = False

    def rang(self, within_seconds: float = 0.0) -> bool:
        """Whether it has been rung since it was last asked, or is within some seconds; being closed ends the wait."""
        if self.is_closed:
            return False
        readable, _, _ = select.select(self._descriptors, [], [], within_seconds)
        self.is_closed = not all(self._is_open(each) for each in readable)
        return bool(readable) and not self.is_closed

    def _is_open(self, descriptor: int) -> bool:
        try:
            return bool(os.read(descriptor, 4096))
        except OSError:  # of a connection: whoever was at the other end is gone
            return False
