"""Values as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEPS = ((60, "minute"), (3600, "hour"), (86400, "day"))
_DAYS_IN_WORDS = 30


def size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "N/A"
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


def when(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago, or in how long; a date if that is far away."""
    if moment is None:
        return "N/A"
    seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    distance = abs(seconds)
    if distance < 60:
        return "just now" if seconds <= 0 else "in a moment"
    if distance >= _DAYS_IN_WORDS * 86400:
        return moment.date().isoformat()
    step, name = next((step, name) for step, name in reversed(_STEPS) if distance >= step)
    count = int(distance // step)
    text = f"{count} {name}{'' if count == 1 else 's'}"
    return f"{text} ago" if seconds < 0 else f"in {text}"


def expiry(moment: datetime | None) -> str:
    return "Never" if moment is None else when(moment)


def yes_no(value: bool | None) -> str:
    return "N/A" if value is None else "Yes" if value else "No"


def lora(is_lora: bool | None, rank: int | None) -> str:
    return f"Yes (Rank {rank})" if is_lora and rank is not None else yes_no(is_lora)
