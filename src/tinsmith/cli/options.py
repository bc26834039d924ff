"""The options that stand before the command and mean the same for all of them."""

from __future__ import annotations

import shlex
from typing import NamedTuple


class Options(NamedTuple):
    format: str
    base_url: str | None
    api_key: str | None
    timeout: float

    @property
    def program(self) -> str:
        """How a command begins that shall reach the same server when it is pasted; the key is not repeated."""
        return f"tinsmith --base-url {shlex.quote(self.base_url)}" if self.base_url else "tinsmith"

    @property
    def wants_json(self) -> bool:
        return self.format == "json"

    def __repr__(self) -> str:
        """Tools that show local variables must not show the key."""
        return f"Options(format={self.format!r}, base_url={self.base_url!r}, timeout={self.timeout!r})"
