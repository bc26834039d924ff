"""How fast the workers are just now: what they have counted between two looks at their figures."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tinsmith.server.messages import Figure

WINDOW_SECONDS = 15.0
"""What was counted longer ago does not matter; nor does who looked then."""
APART_SECONDS = 1.0
"""Workers tell their figures no oftener."""


class Rate(NamedTuple):
    """`None` where nothing was counted yet, or nobody has looked before."""

    train_tokens_per_second: float | None = None
    sample_tokens_per_second: float | None = None
    batch_fill: float | None = None
    """The share of a training batch's room that was used."""
    kv_used_share: float | None = None


class _Look(NamedTuple):
    time: float
    trained: float
    sampled: float
    batches: float


class Rates:
    """By base model. One for all who watch, on one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looks: defaultdict[str, deque[_Look]] = defaultdict(deque)

    def look(self, base_model: str, figures: Iterable[Figure]) -> Rate:
        by_place = {figure.place: figure.value for figure in figures}
        counted = (
            by_place.get((f"tinsmith_{name}_total",), 0.0)
            for name in ("training_tokens", "sampled_tokens", "training_batches")
        )
        now = _Look(self._now(), *counted)
        first = self._first(base_model, now)
        used, free = (by_place.get(("tinsmith_kv_blocks", state), 0.0) for state in ("used", "free"))
        kv_used_share = used / (used + free) if used + free else None
        if first is None:
            return Rate(kv_used_share=kv_used_share)
        seconds = now.time - first.time
        room = (now.batches - first.batches) * by_place.get(("tinsmith_training_batch_tokens",), 0.0)
        return Rate(
            (now.trained - first.trained) / seconds,
            (now.sampled - first.sampled) / seconds,
            (now.trained - first.trained) / room if room else None,
            kv_used_share,
        )

    def _first(self, base_model: str, now: _Look) -> _Look | None:
        """The earliest look that still counts, and is not of this moment."""
        looks = self._looks[base_model]
        while looks and now.time - looks[0].time > WINDOW_SECONDS:
            looks.popleft()
        if not looks or now.time - looks[-1].time >= APART_SECONDS:
            looks.append(now)
        return looks[0] if now.time - looks[0].time >= APART_SECONDS else None
