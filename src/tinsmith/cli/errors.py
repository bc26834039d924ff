"""Ends of a command that are not the SDK's errors."""

from __future__ import annotations


class CommandFailed(Exception):
    """The command could not do its work, for a reason it knows."""

    def __init__(self, headline: str, details: str = "", remedy: str = "") -> None:
        super().__init__(headline)
        self.headline = headline
        self.details = details
        self.remedy = remedy


class ClosedPipe(Exception):
    """Whoever read our output has seen enough."""
