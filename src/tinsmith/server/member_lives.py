"""One life of a member of a training group, as its leader sees it, wherever it is lived: here, or on another machine.

A leader and its members talk through torch alone (`engine/channels.py`); this is how they begin and end.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tinsmith.server.messages import MemberSettings


class Begun(NamedTuple):
    where: str
    """The machine that it is on; empty if it is this one."""
    process: int


class Ending(NamedTuple):
    status: int
    """As of a process: below zero, by which signal."""
    why: str = ""
    """In its own words, if it could say so."""
    is_final: bool = False
    """Another try would end in the same way."""


class MemberLife(Protocol):
    def begun(self) -> Begun | None:
        """Waits for its start; nothing if there will be none."""

    def ended(self) -> Ending:
        """Waits for its end. Called after `begun`."""

    def kill(self) -> None:
        """It shall end at once. Never fails."""


class MemberLives(Protocol):
    """Where members live. They end with their leader, whatever that dies of."""

    host: str
    """The address at which they find their leader."""
    are_here: bool
    """Whether all of them share this machine with their leader, its threads and its GPUs."""

    def begin(self, settings: MemberSettings) -> MemberLife:
        """Returns at once."""
