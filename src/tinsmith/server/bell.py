"""The worker's ear: a pipe in which every byte means that there is work, and whose end means that it should stop."""

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
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_closed = False

    def rang(self, within_seconds: float = 0.0) -> bool:
        """Whether it has been rung since it was last asked, or is within some seconds; being closed ends the wait."""
        if self.is_closed:
            return False
        readable, _, _ = select.select([self._descriptor], [], [], within_seconds)
        if not readable:
            return False
        self.is_closed = not os.read(self._descriptor, 4096)
        return not self.is_closed
