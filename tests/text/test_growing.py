"""Text piece by piece is the text of the whole, and no piece holds half a character."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from tests.support.tiny_tokenizer import byte_level_bpe
from tinsmith.text.fast_tokenizer import Tokenizer
from tinsmith.text.growing import GrowingText

BYTES = Tokenizer(byte_level_bpe())
WORDS = ["▁The", "▁quick", "fox", "▁", "<s>", "ing"]


def word_pieces() -> tokenizers.Tokenizer:
    """As of SentencePiece: a space belongs to the word after it, and the first one of a text is dropped."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return backend


def pieces(tokenizer: Tokenizer, groups: list[list[int]]) -> list[str]:
    text = GrowingText(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
    return [*(text.add(group) for group in groups), text.end()]


@given(st.text())
def test_no_piece_of_a_text_holds_half_a_character(text: str) -> None:
    found = pieces(BYTES, [[token] for token in BYTES.encode(text)])
    assert "".join(found) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


@given(st.lists(st.lists(st.integers(0, len(BYTES) - 1), max_size=3), max_size=60))
def test_whatever_the_tokens_the_pieces_are_the_whole(groups: list[list[int]]) -> None:
    whole = BYTES.decode([token for group in groups for token in group], skip_special_tokens=True)
    assert "".join(pieces(BYTES, groups)) == whole


@given(st.lists(st.lists(st.integers(0, len(WORDS) - 1), max_size=3), max_size=20))
def test_spaces_between_pieces_are_those_of_the_whole(groups: list[list[int]]) -> None:
    tokenizer = Tokenizer(word_pieces())
    whole = tokenizer.decode([token for group in groups for token in group], skip_special_tokens=True)
    assert "".join(pieces(tokenizer, groups)) == whole


def test_bytes_that_never_become_a_character_are_not_waited_for_for_ever() -> None:
    half = BYTES.encode("你")[:1]
    text = GrowingText(BYTES.decode)
    given = [text.add(half) for _ in range(100)]
    assert sum(map(len, given)) > 50
