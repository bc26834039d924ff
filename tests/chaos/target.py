"""What a campaign attacks: one server, or several that share everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tinsmith.server.checkpoints import Folders


class Target(Protocol):
    @property
    def url(self) -> str:
        """Where clients find it, whatever of it is there at the moment."""

    @property
    def calm_seconds(self) -> float:
        """How long it is left in peace at most when it is back."""

    @property
    def starts(self) -> int:
        """Of all its servers."""

    @property
    def is_alive(self) -> bool:
        """Whether anything of it runs."""

    def bring_back(self) -> None:
        """Waits until all of it is ready; what has ended, or refuses to start, is started again."""

    def revive(self) -> None:
        """Starts what has ended, and does not wait."""

    def log(self) -> str: ...

    # What it keeps

    @property
    def database(self) -> str: ...

    @property
    def states(self) -> Sequence[Path]:
        """The folder of each server."""

    @property
    def checkpoints(self) -> Folders: ...

    @property
    def snapshots(self) -> Folders: ...

    # Its ends

    @property
    def ways(self) -> Mapping[str, Callable[[], bool]]:
        """How it can be killed, by name; each says whether there was anything to kill."""

    def end(self) -> list[str]:
        """SIGTERM; gives back complaints about its end."""

    def destroy(self) -> None:
        """Whatever of it still runs, runs no more."""

    def left_over(self) -> list[int]:
        """The processes of any of its lives that run now."""
