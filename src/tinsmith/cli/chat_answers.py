"""How a model answers: in pieces, because the API has no stream.

Each piece continues the prompt and all that was written so far. A server that keeps what it computed for a prompt has
little to do again, and a person sees text after the first few tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from tinsmith.cli.errors import CommandFailed

if TYPE_CHECKING:
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.text.fast_tokenizer import Tokenizer
    from tinsmith.types import SampledSequence

FIRST_PIECES, LATER_PIECES = (4, 8, 16), 32
"""Tokens to ask for. The sizes are fixed, so that the same seed gives the same answer."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for the first bytes of a character whose last ones are in the next token."""

Messages = Sequence[Mapping[str, str]]


class Settings(NamedTuple):
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None


class Answer:
    """What a model has written. It grows piece by piece, and each gives the text that is certain by then."""

    def __init__(self, decode: Callable[[list[int]], str], num_prompt_tokens: int) -> None:
        self.tokens: list[int] = []
        self.num_prompt_tokens = num_prompt_tokens
        self.stop_reason = "interrupted"
        """Why it ended: `stop`, `length`, `context`, or that it did not end by itself."""
        self.text = ""
        self._decode = decode

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these add. Half a character waits for its other half."""
        self.tokens += tokens
        text = self._decode(self.tokens).rstrip(_UNFINISHED)
        # A decoder may think again about its last words, but what was shown cannot be taken back.
        return self._grow(text) if text.startswith(self.text) else ""

    def end(self, stop_reason: str) -> str:
        """The text that was still held back."""
        self.stop_reason = stop_reason
        return self._grow(self._decode(self.tokens))

    def _grow(self, text: str) -> str:
        new = text[len(self.text) :]
        self.text = text
        return new


class Model:
    """A model to talk to: prompts by its own template, answers up to its own end of a turn."""

    def __init__(
        self, name: str, sampler: SamplingClient, tokenizer: Tokenizer, context: int | None, settings: Settings
    ) -> None:
        self.name = name
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._context = context
        self._settings = settings
        self._seeds = random.Random(settings.seed)
        self._ends = end_of_turn(tokenizer)

    def begin(self, messages: Messages) -> tuple[list[int], Answer]:
        """The prompt for an answer to the last message, and the answer, still empty."""
        from tinsmith.text.chat_template import apply_chat_template

        prompt = apply_chat_template(self._tokenizer, messages)
        if self._context is not None and len(prompt) >= self._context:
            raise CommandFailed(
                "The conversation is too long",
                f"With this message it has {len(prompt)} tokens, and {self.name} takes {self._context}.",
                "Begin a new one with /reset, or write less.",
            )
        return prompt, Answer(self._decode, len(prompt))

    def write(self, prompt: list[int], answer: Answer) -> Iterator[str]:
        """Lets the model write, and gives the text as it comes."""
        most, at_most = self._limit(prompt)
        for size in chain(FIRST_PIECES, repeat(LATER_PIECES)):
            piece = self._sample([*prompt, *answer.tokens], min(size, most - len(answer.tokens)))
            has_ended = bool(piece.tokens) and piece.tokens[-1] in self._ends
            yield answer.add(piece.tokens[:-1] if has_ended else piece.tokens)
            if has_ended or piece.stop_reason == "stop" or not piece.tokens:
                yield answer.end("stop")
                return
            if len(answer.tokens) >= most:
                yield answer.end(at_most)
                return

    def _limit(self, prompt: list[int]) -> tuple[int, str]:
        """How many tokens the answer can have, and what it is that limits them."""
        room = self._settings.max_tokens if self._context is None else self._context - len(prompt)
        if room < self._settings.max_tokens:
            return room, "context"
        return self._settings.max_tokens, "length"

    def _sample(self, prompt: list[int], num_tokens: int) -> SampledSequence:
        from tinsmith.types import ModelInput, SamplingParams

        params = SamplingParams(
            max_tokens=num_tokens,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            stop=sorted(self._ends) or None,
            # The same seed for every piece would draw the same numbers again and again.
            seed=None if self._settings.seed is None else self._seeds.getrandbits(63),
        )
        future = self._sampler.sample(ModelInput.from_ints(prompt), 1, params)
        try:
            return future.result().sequences[0]
        finally:
            future.cancel()  # of use only if somebody lost patience

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def end_of_turn(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end what a model says: its end of text, and what its template puts after an answer."""
    ends = {tokenizer.eos_token_id, _after_an_answer(tokenizer)}
    return frozenset(token for token in ends if token is not None)


def _after_an_answer(tokenizer: Tokenizer) -> int | None:
    from tinsmith.text.chat_template import apply_chat_template

    said = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": "Answer."}]
    options: dict[str, Any] = {"add_generation_prompt": False, "tokenize": False}
    text: str = apply_chat_template(tokenizer, said, **options)
    following = tokenizer.encode(text.rpartition("Answer.")[2], add_special_tokens=False)
    return next((token for token in following if not tokenizer.decode([token], skip_special_tokens=True)), None)
