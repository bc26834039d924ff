"""When a sample ends before its last allowed token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tinsmith.errors import InvalidInputError
from tinsmith.types import SamplingParams

Decode = Callable[[list[int]], str]

# Tokens before those that can hold the stop text: they keep a cut character or a dropped first space away from it.
_MARGIN = 8


@dataclass(frozen=True)
class Stopper:
    """Stop tokens, or stop texts, which may begin and end in the middle of a token.

    The token that completes a stop is part of the sample. A list of stops replaces the end-of-text tokens.
    """

    tokens: frozenset[int]
    texts: tuple[str, ...] = ()
    decode: Decode | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        end_of_text: Collection[int],
        decode: Decode | None,
        end_tokens: Collection[int] = (),
    ) -> Stopper:
        """`end_tokens` end a sample whatever its stops are."""
        if params.stop is None:
            return cls(frozenset([*end_of_text, *end_tokens]))
        stops: Sequence[str | int] = [params.stop] if isinstance(params.stop, str) else params.stop
        texts = tuple(stop for stop in stops if isinstance(stop, str))
        if "" in texts:
            raise InvalidInputError(
                "An empty stop text would end every sample at once; leave it out of `stop`.",
                field="sampling_params.stop",
                value=params.stop,
            )
        if texts and decode is None:
            raise InvalidInputError(
                f"The stop text {texts[0]!r} needs a tokenizer, and this model's folder has none; pass token ids.",
                field="sampling_params.stop",
                value=params.stop,
            )
        tokens = (stop for stop in stops if not isinstance(stop, str))
        return cls(frozenset([*tokens, *end_tokens]), texts, decode)

    def stops(self, sampled: list[int]) -> bool:
        """Whether the last of these tokens ends the sample; the earlier ones did not."""
        if sampled[-1] in self.tokens:
            return True
        if not self.texts or self.decode is None:
            return False
        # A token stands for one byte at least, so no more tokens than this can take part in a stop text.
        window = max(len(text.encode()) for text in self.texts) + _MARGIN
        ending = self.decode(sampled[-window:])
        return any(text in ending for text in self.texts)
