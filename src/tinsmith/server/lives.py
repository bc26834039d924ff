"""One life of a worker, as the API process sees it, wherever it is lived: in a process below, or on another machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from tinsmith.server.messages import WorkerSettings


class CannotBeginError(Exception):
    """A worker could not be started this time, for this reason."""


class Life(Protocol):
    """What may be called at any time never blocks and never fails, also when it is over."""

    def wake(self) -> None:
        """There is work."""

    def heard(self) -> AsyncIterator[bytes]:
        """What it says, a `Message` in JSON each, to its end."""

    async def ended(self) -> int:
        """Waits for its end, and gives back how it ended; below zero, by which signal."""

    def dismiss(self) -> None:
        """It shall end, after the step that it is in."""

    def kill(self) -> None:
        """It shall end at once."""


class Lives(Protocol):
    """Where workers live."""

    async def prepare(self) -> None:
        """Called once, before any begins; a `ConfigError` if there is no place for them."""

    async def begin(self, settings: WorkerSettings) -> Life:
        """Starts a worker; a `CannotBeginError` if that is not possible now."""

    async def close(self) -> None:
        """Called when all have ended."""
