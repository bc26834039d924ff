"""A repr that stays short: what goes into messages and logs must not hold a whole prompt."""

from __future__ import annotations

from itertools import islice
from typing import Any

from tinsmith.types._token_ids import TokenIds

_ITEMS = 12
_CHARACTERS = 400


def brief(value: Any) -> str:
    """`repr(value)`, with long lists, dicts, texts, bytes and arrays cut short."""
    if isinstance(value, list | tuple | TokenIds):
        return f"[{joined([brief(item) for item in value[:_ITEMS]], len(value))}]"
    if isinstance(value, dict):
        shown = [f"{key!r}: {brief(item)}" for key, item in islice(value.items(), _ITEMS)]
        return f"{{{joined(shown, len(value))}}}"
    if isinstance(value, bytes) and len(value) > _ITEMS:
        return f"<{len(value):,} bytes>"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"<{value.dtype} {list(value.shape or ())}>"
    text = repr(value)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."


def joined(shown: list[str], total: int) -> str:
    """Some of `total` items, and how many there are if that is more."""
    return ", ".join(shown if len(shown) == total else [*shown, f"... {total:,} in all"])
