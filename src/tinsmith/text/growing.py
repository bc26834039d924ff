"""The text of tokens that come one after the other: what is certain of it, piece by piece.

A character may be spread over several tokens, and how a token is written may depend on the one before it. So tokens are
decoded together with some that came before them, and what may still change is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]

_HALF_A_CHARACTER = "\ufffd"

_LONGEST_WAIT = 32
"""Tokens after which bytes that are no character yet will not become one."""


class GrowingText:
    """`add` tokens, and it gives the text that they make certain; `end` gives what was held back.

    All pieces together are the text of all tokens.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        """Those from the one before the last whole piece on."""
        self._whole = 0
        """How many of them are part of a whole piece."""
        self._given = 0
        """How much of their text was given out."""

    def add(self, tokens: Sequence[int]) -> str:
        self._tokens += tokens
        text = self._decode(self._tokens)
        certain = text.rstrip(_HALF_A_CHARACTER)
        if len(self._tokens) - self._whole > max(_LONGEST_WAIT, len(tokens)):
            certain = text
        piece, self._given = certain[self._given :], max(self._given, len(certain))
        if certain == text:
            self._forget()
        return piece

    def end(self) -> str:
        piece = self._decode(self._tokens)[self._given :] if self._tokens else ""
        self._given += len(piece)
        return piece

    def _forget(self) -> None:
        """Keep the last piece only, if it can stand for what came before the next: with nothing in it, it cannot."""
        last = self._tokens[self._whole :]
        if self._whole and (text := self._decode(last)):
            self._tokens, self._given = last, len(text)
        self._whole = len(self._tokens)
