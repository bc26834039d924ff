"""The options that stand before the command and mean the same for all of them."""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    format: str
    base_url: str | None
    api_key: str | None
    timeout: float

    @property
    def wants_json(self) -> bool:
        return self.format == "json"

    def __repr__(self) -> str:
        """Tools that show local variables must not show the key."""
        return f"Options(format={self.format!r}, base_url={self.base_url!r}, timeout={self.timeout!r})"
