"""Troubles that pass by themselves, in the log: when one begins, every minute while it lasts, and when it is over."""

from __future__ import annotations

import logging
import time

AGAIN_SECONDS = 60.0


class Outage:
    """Something that is needed and that is tried again and again. `over` is logged when it works again."""

    def __init__(self, log: logging.Logger, over: str = "Work goes on") -> None:
        self._log = log
        self._over = over
        self._since: float | None = None
        self._say_at = 0.0

    @property
    def is_on(self) -> bool:
        return self._since is not None

    def met(self, what: str, error: Exception) -> None:
        """It was tried in vain. `what` says what is wrong and what that means."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._say_at = now, now + AGAIN_SECONDS
            self._log.error("%s: %s", what, first_line(error))
        elif now >= self._say_at:
            self._say_at = now + AGAIN_SECONDS
            self._log.error("%s, for %.0f s now: %s", what, now - self._since, first_line(error))

    def is_over(self) -> None:
        """It works, which may be nothing new."""
        if self._since is not None:
            self._log.warning("%s after %.0f s.", self._over, time.monotonic() - self._since)
            self._since = None


def first_line(error: Exception) -> str:
    """An error of a database goes on with the statement and with advice about its library."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
