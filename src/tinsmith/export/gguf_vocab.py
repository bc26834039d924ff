"""A tokenizer in the form of llama.cpp: tables, and the name of what it does to a text before it looks at them.

llama.cpp knows the ways to split a text by name alone. Its own converter finds the name by hashing what a tokenizer
makes of a sample; here it follows from the rules themselves, so that it does not matter which words are in the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tinsmith.errors import InvalidInputError
from tinsmith.export.adapter import read_json
from tinsmith.export.base import BaseModel

if TYPE_CHECKING:
    from gguf import GGUFWriter

TOKENIZER = "tokenizer.json"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES, _WORDS_AND_BYTES, _DIGITS = "bytes", "words and bytes", "digits"
_PRE_TOKENIZERS = {
    (f"{_WORDS}|\\p{{N}}{{1,3}}|{_REST}", _BYTES): "llama-bpe",
    (f"{_WORDS}|\\p{{N}}|{_REST}", _BYTES): "qwen2",
    (_DIGITS, _WORDS_AND_BYTES): "smollm",
    (_WORDS_AND_BYTES,): "gpt-2",
}
"""What is done one after the other, and what llama.cpp calls it."""
_TAKES_WHOLE_WORDS = ("llama-bpe",)
"""Where llama.cpp takes a word that is in the table as it is, whatever the merges say."""


def add_vocab(writer: GGUFWriter, base: BaseModel, vocab_size: int) -> None:
    import gguf

    if not (base.folder / TOKENIZER).is_file():
        raise _refusal(base, f"there is no {TOKENIZER}")
    tokenizer = read_json(base.folder / TOKENIZER)
    name = _pre_tokenizer(base, tokenizer)
    tokens, kinds = _tables(base, tokenizer, vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    special = gguf.SpecialVocab(base.folder, load_merges=True, n_vocab=vocab_size)
    special.add_special_token.setdefault("bos", False)  # where nothing is said llama.cpp goes by the name
    special.add_to_gguf(writer, quiet=True)


def _pre_tokenizer(base: BaseModel, tokenizer: Mapping[str, Any]) -> str:
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback (SentencePiece)" if model.get("byte_fallback") else model.get("type")
        raise _refusal(base, f"its model is {kind}, and only byte-level BPE can be written")
    normalizer = (tokenizer.get("normalizer") or {}).get("type", "NFC")
    steps = tuple(_steps(tokenizer.get("pre_tokenizer") or {}))
    name = _PRE_TOKENIZERS.get(steps)
    if name is None or normalizer != "NFC":
        raise _refusal(base, f"it splits a text by {steps} after {normalizer}, for which llama.cpp has no known name")
    if bool(model.get("ignore_merges")) != (name in _TAKES_WHOLE_WORDS):
        raise _refusal(base, f"its ignore_merges is not what llama.cpp does for {name!r}")
    return name


def _steps(step: Mapping[str, Any]) -> Iterator[str]:
    kind = step.get("type")
    if kind == "Sequence":
        for each in step["pretokenizers"]:
            yield from _steps(each)
    elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        yield str(step["pattern"].get("Regex"))
    elif kind == "Digits" and step.get("individual_digits"):
        yield _DIGITS
    elif kind == "ByteLevel" and not step.get("add_prefix_space"):
        yield _WORDS_AND_BYTES if step.get("use_regex", True) else _BYTES
    else:
        yield str(kind)


def _tables(base: BaseModel, tokenizer: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Every id of the model's embedding has a token, although some releases have fewer."""
    from gguf import TokenType

    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = [int(TokenType.UNUSED)] * vocab_size
    added = {each["id"]: each for each in tokenizer.get("added_tokens") or ()}
    words = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    if (last := max([*added, *words])) >= vocab_size:
        raise _refusal(base, f"it has a token {last}, and the model ends at {vocab_size - 1}")
    for index, token in words.items():
        tokens[index], kinds[index] = token, int(TokenType.NORMAL)
    for index, entry in added.items():
        kind = TokenType.CONTROL if entry.get("special") else TokenType.USER_DEFINED
        tokens[index], kinds[index] = entry["content"], int(kind)
    return tokens, kinds


def _refusal(base: BaseModel, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The tokenizer of the base {base.name} cannot be written as GGUF: {why}. Export with --to merged, and convert "
        "the folder with llama.cpp's convert_hf_to_gguf.py.",
        field="tokenizer",
    )
