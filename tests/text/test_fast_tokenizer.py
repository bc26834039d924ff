"""The light tokenizer gives what transformers gives, from the same files."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_tokenizer import CHATML_CONFIG, byte_level_bpe, write_folder
from tinsmith.errors import InvalidInputError, InvalidTypeError, TokenizerError
from tinsmith.text.fast_tokenizer import Tokenizer
from tinsmith.text.tokenizer_folder import read_tokenizer

TEXTS = [
    "",
    " ",
    "The quick brown fox",
    "  spaces , and .  don 't  ",
    "naïve café 你好 🙂 e\u0301",
    "line\r\nbreaks\n\n\tand tabs",
    "<|im_start|>user\nHello<|im_end|>\n<|endoftext|>",
    "an <img> and <tool> and <late> and <unk> and <s> here",
]


def word_level() -> tokenizers.Tokenizer:
    words = ["<unk>", "<s>", "</s>", "The", "quick", "brown", "fox", "Hello"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def with_truncation_and_padding() -> tokenizers.Tokenizer:
    backend = byte_level_bpe()
    backend.enable_truncation(3)
    backend.enable_padding(length=9, pad_token="<|endoftext|>")
    return backend


def added(content: str, **flags: bool) -> dict[str, Any]:
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content} | defaults | flags


FOLDERS: Mapping[str, tuple[tokenizers.Tokenizer, Mapping[str, Mapping[str, Any]]]] = {
    "chatml": (byte_level_bpe(), {"tokenizer_config.json": CHATML_CONFIG}),
    "starts every text with bos": (
        byte_level_bpe(["<s>", "</s>"], bos="<s>"),
        {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}},
    ),
    "tokens that only the configuration has": (
        byte_level_bpe(),
        {
            "tokenizer_config.json": {
                "eos_token": "<|im_end|>",
                "pad_token": {"__type": "AddedToken"} | added("<late>", lstrip=True),
                "added_tokens_decoder": {
                    "402": added("<tool>", special=False),
                    "401": added("<img>", lstrip=True, rstrip=True),
                    "2": added("<|im_end|>", rstrip=True),
                },
            },
            "special_tokens_map.json": {"eos_token": "ignored, because the configuration lists its tokens"},
        },
    ),
    "older files": (
        byte_level_bpe(),
        {
            "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
            "special_tokens_map.json": {
                "eos_token": added("<|im_end|>"),
                "unk_token": "<unk>",
                "additional_special_tokens": ["<|im_start|>", "<img>"],
            },
        },
    ),
    "special tokens with names of their own": (
        byte_level_bpe(),
        {
            "tokenizer_config.json": {
                "eos_token": "<|im_end|>",
                "boi_token": "<img>",
                "extra_special_tokens": {"image_token": "<tool>", "boi_token": "<img>"},
            }
        },
    ),
    "words with an unknown token": (
        word_level(),
        {"tokenizer_config.json": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}},
    ),
    "truncation and padding left in the file": (
        with_truncation_and_padding(),
        {"tokenizer_config.json": CHATML_CONFIG},
    ),
}


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    backend, files = FOLDERS[request.param]
    return write_folder(tmp_path, backend, files)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return read_tokenizer(write_folder(tmp_path) / "tokenizer.json", name="tiny")


def test_ids_and_texts_equal_those_of_transformers(folder: Path) -> None:
    ours = read_tokenizer(folder / "tokenizer.json", name=str(folder))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)

    for text in TEXTS:
        for add_special_tokens in (True, False):
            ids = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ids == ours.encode(text, add_special_tokens=add_special_tokens)
            assert theirs.decode(ids) == ours.decode(ids)
            assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids, skip_special_tokens=True)
            assert theirs.convert_ids_to_tokens(ids) == ours.convert_ids_to_tokens(ids)
            assert theirs.convert_ids_to_tokens(ids, skip_special_tokens=True) == ours.convert_ids_to_tokens(ids, True)


def test_names_and_sizes_equal_those_of_transformers(folder: Path) -> None:
    ours = read_tokenizer(folder / "tokenizer.json", name=str(folder))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)

    tokens = [f"{name}_token{suffix}" for name in ("bos", "eos", "pad", "unk") for suffix in ("", "_id")]
    for name in [*tokens, "special_tokens_map", "all_special_tokens", "all_special_ids", "vocab_size", "name_or_path"]:
        assert getattr(theirs, name) == getattr(ours, name), name
    assert len(theirs) == len(ours)
    for token in ("The", "<|im_end|>", "<img>", "no such token"):
        assert theirs.convert_tokens_to_ids(token) == ours.convert_tokens_to_ids(token)


def test_assigning_a_token_moves_its_id_and_the_reverse(tokenizer: Tokenizer) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.eos_token_id == tokenizer.pad_token_id

    tokenizer.eos_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer.eos_token == "<|endoftext|>"

    tokenizer.pad_token = None
    assert tokenizer.pad_token_id is None


BYTE_LEVEL = Tokenizer(byte_level_bpe())


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    assert text == BYTE_LEVEL.decode(BYTE_LEVEL.encode(text, add_special_tokens=False))


def test_ids_may_come_as_any_kind_of_sequence(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick fox")

    for sequence in (tuple(ids), iter(ids), numpy.array(ids), torch.tensor(ids), [numpy.int64(i) for i in ids]):
        assert tokenizer.decode(sequence) == "The quick fox"
    assert tokenizer.decode(ids[0]) == tokenizer.decode(numpy.int64(ids[0])) == tokenizer.decode(ids[:1])
    assert tokenizer.batch_decode([ids, numpy.array(ids[:1]), []]) == ["The quick fox", tokenizer.decode(ids[0]), ""]


def test_a_long_text_is_never_cut(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox. " * 5000

    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("copied", [lambda t: pickle.loads(pickle.dumps(t)), copy.copy, copy.deepcopy])
def test_it_can_be_copied_and_sent_to_another_process(tokenizer: Tokenizer, copied: Any) -> None:
    twin = copied(tokenizer)

    assert tokenizer.encode("The quick fox") == twin.encode("The quick fox")
    assert (tokenizer.eos_token_id, "tiny") == (twin.eos_token_id, twin.name_or_path)


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a list"]])
def test_only_text_can_be_encoded(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidTypeError, match="encode takes one str, not"):
        tokenizer.encode(text)


def test_half_a_character_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInputError, match="lone surrogates"):
        tokenizer.encode("broken \ud83d emoji")


@pytest.mark.parametrize("ids", [None, "text", [1.5], [[1, 2], [3]], ["a"]])
def test_only_a_sequence_of_ids_can_be_decoded(tokenizer: Tokenizer, ids: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"decode takes one sequence of token ids: .*batch_decode"):
        tokenizer.decode(ids)


@pytest.mark.parametrize("ids", [[-1], [2**40]])
def test_an_id_out_of_range_is_refused(tokenizer: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="decode takes one sequence of token ids"):
        tokenizer.decode(ids)


def test_what_it_lacks_is_said_with_the_way_out(tokenizer: Tokenizer) -> None:
    with pytest.raises(AttributeError, match=r"Call tinsmith\.apply_chat_template\(tokenizer, messages\)"):
        _ = tokenizer.apply_chat_template
    with pytest.raises(AttributeError, match=r"transformers\.AutoTokenizer\.from_pretrained\('tiny'\)"):
        _ = tokenizer.save_pretrained
    assert not hasattr(tokenizer, "is_special_token")


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    turns: list[float] = []
    encoding = threading.Thread(target=tokenizer.encode, args=("The quick brown fox " * 100_000,))
    encoding.start()
    while encoding.is_alive():
        turns.append(time.monotonic())
        time.sleep(0.001)
    assert len(turns) > 10


def test_a_file_of_another_name_stands_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "tokenizer.json").rename(folder / "mine.json")

    tokenizer = read_tokenizer(folder / "mine.json", name="mine")

    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    assert tokenizer.eos_token is None


@pytest.mark.parametrize("content", ["", "{}", "version https://git-lfs.github.com/spec/v1", "[1]"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (write_folder(tmp_path) / "tokenizer.json").write_text(content)

    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read as a tokenizer: .*Git LFS pointer"):
        read_tokenizer(tmp_path / "tokenizer.json", name="tiny")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"eos_token": 7}', "holds something unexpected"),
        ('{"added_tokens_decoder": [1]}', "holds something unexpected"),
        ('{"added_tokens_decoder": {"x": {"content": "<y>"}}}', "holds something unexpected"),
        ('{"chat_template": [{"name": "default"}]}', "holds something unexpected"),
    ],
)
def test_a_damaged_configuration_is_named(tmp_path: Path, content: str, problem: str) -> None:
    write_folder(tmp_path, files={"tokenizer_config.json": content})

    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json.* {problem}"):
        read_tokenizer(tmp_path / "tokenizer.json", name="tiny")
