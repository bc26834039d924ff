"""A sample ends with the token that completes a stop, wherever the tokens are cut."""

from __future__ import annotations

import pytest

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.stopping import Stopper
from tinsmith.types import SamplingParams

END = {2}


def from_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def length_until_stop(text: str, stop: str | list[str]) -> int | None:
    """How many byte tokens of the text are sampled before the stopper ends it."""
    stopper = Stopper.of(SamplingParams(stop=stop), END, from_bytes)
    tokens = list(text.encode())
    return next((end for end in range(1, len(tokens) + 1) if stopper.stops(tokens[:end])), None)


def test_without_stops_the_end_of_text_token_ends_a_sample() -> None:
    stopper = Stopper.of(SamplingParams(), END, None)
    assert stopper.stops([5, 2])
    assert not stopper.stops([2, 5])


def test_an_empty_list_never_ends_a_sample() -> None:
    assert not Stopper.of(SamplingParams(stop=[]), END, None).stops([2])


def test_stop_tokens_replace_the_end_of_text_token() -> None:
    stopper = Stopper.of(SamplingParams(stop=[7, 8]), END, None)
    assert stopper.stops([1, 8])
    assert not stopper.stops([2])


def test_a_stop_text_over_many_tokens_ends_with_its_last() -> None:
    assert length_until_stop("one two three", "two") == len("one two")
    assert length_until_stop("one two three", ["absent", "e t"]) == 5


def test_a_stop_text_of_wide_characters_ends_with_their_last_byte() -> None:
    assert length_until_stop("grüße 👋 x", "👋") == len("grüße 👋".encode())


def test_a_stop_text_longer_than_any_token_is_found_late_in_a_long_sample() -> None:
    stop = "\n\nHuman: " * 3
    assert length_until_stop("a" * 500 + stop + "b", stop) == 500 + len(stop)


def test_a_text_that_only_begins_like_the_stop_does_not_end_it() -> None:
    assert length_until_stop("abababab", "abc") is None


def test_a_stop_text_within_one_token_ends_with_that_token() -> None:
    pieces = {1: "Hello", 2: ".\n\nNext", 3: "never"}
    stopper = Stopper.of(SamplingParams(stop="\n"), END, lambda tokens: "".join(pieces[token] for token in tokens))
    assert not stopper.stops([1])
    assert stopper.stops([1, 2])


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="empty stop text"):
        Stopper.of(SamplingParams(stop=["a", ""]), END, from_bytes)


def test_a_stop_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="pass token ids"):
        Stopper.of(SamplingParams(stop="a"), END, None)
