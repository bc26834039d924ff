"""Who hears how a training run goes, and may stop it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple


class Progress(NamedTuple):
    """How it stands after a step."""

    step: int
    num_steps: int
    loss: float | None
    eval_loss: float | None
    """The last one that was measured."""
    tokens_per_second: float
    seconds_left: float


class Listener:
    """Hears how it goes. The methods do nothing here."""

    def tell(self, text: str) -> None:
        """Something that a person should know."""

    def prepared(self, done: int, total: int) -> None:
        """So many examples are made into tokens."""

    def report(self, progress: Progress) -> None:
        """A step is done."""

    def stops(self) -> AbstractContextManager[Callable[[], bool]]:
        """Around the training itself: gives a function that says whether to stop after the present step."""
        return nullcontext(lambda: False)
