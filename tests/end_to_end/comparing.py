"""Results of two runs side by side."""

from __future__ import annotations

import re
from typing import Any

import pytest

_VARYING = {
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}": "(id)",
    r"copy-[0-9a-f]{24}": "(copy)",
    r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00": "(time)",
    r"(signature|expires)=[^&]+": "(signed)",
}


def differences(theirs: Any, mine: Any) -> list[str]:
    """Where two results differ, beyond what is different in every run; numbers to float32's accuracy."""
    return _differences(_comparable(theirs), _comparable(mine), "")


def _comparable(value: Any) -> Any:
    """A result without what is different in every run."""
    match value:
        case str():
            for pattern, name in _VARYING.items():
                value = re.sub(pattern, name, value)
            return value
        case {"failure": _}:
            return {name: _comparable(item) for name, item in value.items() if name not in ("failure", "caught_by")}
        case dict():
            # Files hold ids, so their sizes differ by a byte or two.
            return {_comparable(name): _comparable(item) for name, item in value.items() if "bytes" not in name}
        case list():
            return [_comparable(item) for item in value]
    return value


def _differences(theirs: Any, mine: Any, place: str) -> list[str]:
    match theirs, mine:
        case dict(), dict():
            return [
                found
                for name in theirs.keys() | mine.keys()
                for found in _differences(theirs.get(name, "(absent)"), mine.get(name, "(absent)"), f"{place}.{name}")
            ]
        case list(), list() if len(theirs) == len(mine):
            pairs = enumerate(zip(theirs, mine, strict=True))
            return [found for index, pair in pairs for found in _differences(*pair, f"{place}[{index}]")]
        case float(), float():
            return [] if theirs == pytest.approx(mine, rel=1e-4, abs=1e-5) else [f"{place}: {theirs} and {mine}"]
    return [] if theirs == mine else [f"{place}: {theirs!r} and {mine!r}"]
