"""Ends of a command that are not the SDK's errors."""

from __future__ import annotations

from collections.abc import Iterable


class CommandFailed(Exception):
    """The command could not do its work, for a reason it knows."""

    def __init__(self, headline: str, details: str = "", remedy: str = "") -> None:
        super().__init__(headline)
        self.headline = headline
        self.details = details
        self.remedy = remedy


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A sentence about the name that is likest, with a space for the next one; nothing if none is like it."""
    import difflib

    close = difflib.get_close_matches(given, known, n=1)
    return f"Did you mean '{close[0]}'? " if close else ""


class ClosedPipe(Exception):
    """Whoever read our output has seen enough."""
