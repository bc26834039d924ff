"""One sample as it is told: its tokens as text, without the stop that ended it, and what is certain of that so far."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tinsmith.server.texts import ModelText
from tinsmith.text.growing import GrowingText

Top: TypeAlias = Sequence[tuple[int, float]]
"""The most likely tokens in a place, with their log-probabilities."""


class Scored(NamedTuple):
    token: int
    logprob: float | None
    """`None` for the first token of a text, which nothing foretells."""
    top: Top
    offset: int
    """Where its text begins in that of the sample."""


class Piece(NamedTuple):
    text: str
    scored: list[Scored]


@dataclass(frozen=True)
class Ending:
    """What ends a sample, and is not part of its text."""

    tokens: Collection[int] = ()
    texts: Sequence[str] = ()


class Choice:
    """`add` what was drawn, `take` what of it is certain to be in the text; after `end` that is all of the rest."""

    def __init__(self, text: ModelText, ending: Ending, *, is_scored: bool) -> None:
        self._growing = GrowingText(text.decode)
        self._ending = ending
        self._is_scored = is_scored
        self._text = ""
        self._searched = 0
        self._cut: int | None = None
        """Where a stop begins."""
        self._taken = 0
        self._scored: list[Scored] = []
        self._is_over = False

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        topk: Sequence[Sequence[tuple[int, float]] | None],
    ) -> None:
        if tokens and tokens[-1] in self._ending.tokens:
            tokens = tokens[:-1]
        if not self._is_scored:
            self._text += self._growing.add(tokens)
        else:  # one by one, to know where each begins
            for place, token in enumerate(tokens):
                top = topk[place] or () if topk else ()
                self._scored.append(Scored(token, logprobs[place], top, len(self._text)))
                self._text += self._growing.add([token])
        self._look_for_stop()

    def end(self) -> None:
        self._text += self._growing.end()
        self._look_for_stop()
        self._is_over = True

    def take(self) -> Piece:
        certain = self._certain()
        piece, self._taken = self._text[self._taken : certain], max(self._taken, certain)
        is_whole = self._is_over and self._cut is None
        scored = [each for each in self._scored if is_whole or each.offset < certain]
        self._scored = self._scored[len(scored) :]
        return Piece(piece, scored)

    def _certain(self) -> int:
        """How much of the text will not turn out to be a stop."""
        if self._cut is not None:
            return self._cut
        if self._is_over:
            return len(self._text)
        return len(self._text) - max((_overlap(self._text, stop) for stop in self._ending.texts), default=0)

    def _look_for_stop(self) -> None:
        if self._cut is not None or not self._ending.texts:
            return
        found = [place for stop in self._ending.texts if (place := self._text.find(stop, self._searched)) >= 0]
        self._cut = min(found, default=None)
        self._searched = max(0, len(self._text) - max(map(len, self._ending.texts)))


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
