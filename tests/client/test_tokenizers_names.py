"""Which tokenizer belongs to which model name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_tokenizer import write_folder
from tinsmith.client.tokenizers import TokenizerSource, resolve_tokenizer
from tinsmith.errors import InvalidInputError, InvalidTypeError

LLAMA_3 = TokenizerSource("thinkingmachineslabinc/meta-llama-3-instruct-tokenizer")


def pinned(name: str, revision: str) -> TokenizerSource:
    return TokenizerSource(name, "hub", revision, needs_remote_code=True)


K2_THINKING = pinned("moonshotai/Kimi-K2-Thinking", "612681931a8c906ddb349f8ad0f582cb552189cd")
K2_5 = pinned("moonshotai/Kimi-K2.5", "4d01dfe0332d63057c186e0b262165819efb6611")
K2_6 = pinned("moonshotai/Kimi-K2.6", "b5aabbfb20227ed42becbf5541dbffd213942c58")
K3 = pinned("moonshotai/Kimi-K3", "f831ab66814297da540d832a5235f8e904f29d06")

RULES = [
    # model name, tokenizer id, source
    ("Qwen/Qwen3-8B", None, TokenizerSource("Qwen/Qwen3-8B")),
    ("gpt2", None, TokenizerSource("gpt2")),
    ("Qwen/Qwen3-8B:peft:131072", None, TokenizerSource("Qwen/Qwen3-8B")),
    ("Qwen/Qwen3-8B/long-context", None, TokenizerSource("Qwen/Qwen3-8B")),
    ("Qwen/Qwen3-8B/long-context:2", None, TokenizerSource("Qwen/Qwen3-8B")),
    ("meta-llama/Llama-3.1-8B", None, LLAMA_3),
    ("meta-llama/Llama-3.3-70B-Instruct:peft", None, LLAMA_3),
    ("meta-llama/Llama-3.1-8B/variant", None, LLAMA_3),
    ("meta-llama/Llama-2-7b", None, TokenizerSource("meta-llama/Llama-2-7b")),
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", TokenizerSource("Qwen/Qwen3-0.6B")),
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B:fast", TokenizerSource("Qwen/Qwen3-0.6B")),
    ("Qwen/Qwen3-8B", "", TokenizerSource("Qwen/Qwen3-8B")),
    ("any", "meta-llama/Llama-3.1-8B", TokenizerSource("meta-llama/Llama-3.1-8B")),
    ("any", "org/model/variant", TokenizerSource("org/model/variant")),
    ("moonshotai/Kimi-K2-Thinking", None, K2_THINKING),
    ("moonshotai/Kimi-K2.5", None, K2_5),
    ("moonshotai/Kimi-K2.5-Text-Only", None, K2_5),
    ("moonshotai/Kimi-K2.5/variant", None, K2_5),
    ("moonshotai/Kimi-K2.6:peft", None, K2_6),
    ("moonshotai/Kimi-K3", None, K3),
    ("any", "moonshotai/Kimi-K2.5-Text-Only", K2_5),
    ("any", "moonshotai/Kimi-K3", K3),
    ("moonshotai/Kimi-K2-Instruct", None, TokenizerSource("moonshotai/Kimi-K2-Instruct")),
    ("TML/whatever", None, TokenizerSource("TML/whatever", "tml")),
    ("thinkingmachines/Inkling", None, TokenizerSource("thinkingmachines/Inkling", "tml")),
    ("thinkingmachines/Inkling/variant", None, TokenizerSource("thinkingmachines/Inkling", "tml")),
    ("any", "TML/whatever", TokenizerSource("TML/whatever", "tml")),
    ("thinkingmachineslabinc/x", None, TokenizerSource("thinkingmachineslabinc/x")),
]


@pytest.mark.parametrize(("model_name", "tokenizer_id", "source"), RULES)
def test_names_follow_the_rules(model_name: str, tokenizer_id: str | None, source: TokenizerSource) -> None:
    assert source == resolve_tokenizer(model_name, tokenizer_id, is_local=lambda name: False)


def test_the_official_package_asks_for_the_same_repository_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinker.lib.public_interfaces.sampling_client import _load_tokenizer_from_model_info
    from transformers import AutoTokenizer

    def asked(
        name: str, *, fast: bool, revision: str | None = None, trust_remote_code: bool = False
    ) -> TokenizerSource:
        return TokenizerSource(name, "hub", revision, trust_remote_code)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", asked)
    load = _load_tokenizer_from_model_info.__wrapped__  # without its cache
    for model_name, tokenizer_id, source in RULES:
        if source.kind == "hub":
            # The part after a colon is cut off before the id gets there; an empty id is no id.
            assert source == load(model_name, tokenizer_id.split(":")[0] if tokenizer_id else None)


@pytest.mark.parametrize(
    ("model_name", "tokenizer_id", "path"),
    [
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:peft", None, "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B", None, "meta-llama/Llama-3.1-8B"),
        ("models/mine/v2", None, "models/mine/v2"),
        ("/models/mine", None, "/models/mine"),
        ("C:/models/mine", None, "C:/models/mine"),
        ("any", "./mine", "./mine"),
        ("any", "mine/tokenizer.json", "mine/tokenizer.json"),
    ],
)
def test_what_exists_locally_wins_over_every_rule(model_name: str, tokenizer_id: str | None, path: str) -> None:
    source = resolve_tokenizer(model_name, tokenizer_id, is_local=lambda name: name == path)

    assert source == TokenizerSource(path, "local")


def test_a_folder_of_the_model_name_does_not_hide_the_given_tokenizer_id() -> None:
    source = resolve_tokenizer("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", is_local=lambda name: name == "Qwen/Qwen3-8B")

    assert source == TokenizerSource("Qwen/Qwen3-0.6B")


def test_the_file_system_is_asked_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "Qwen" / "Qwen3-8B")
    (tmp_path / "gpt2").write_text("a file that is no tokenizer")
    monkeypatch.chdir(tmp_path)

    assert resolve_tokenizer("Qwen/Qwen3-8B").kind == "local"
    assert resolve_tokenizer("Qwen/Qwen3-8B/tokenizer.json").kind == "local"
    assert resolve_tokenizer("any", tmp_path / "Qwen" / "Qwen3-8B").kind == "local"
    assert resolve_tokenizer("Qwen/Qwen3-0.6B").kind == "hub"
    assert resolve_tokenizer("gpt2").kind == "hub"


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "../model", "~/model", "", ":suffix"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"no such folder or \.json file") as caught:
        resolve_tokenizer(name)

    assert caught.value.field == "model_name"


@pytest.mark.parametrize(("model_name", "tokenizer_id"), [(None, None), (7, None), ("any", 7), ("any", b"x")])
def test_names_must_be_text(model_name: str, tokenizer_id: str) -> None:
    with pytest.raises(InvalidTypeError, match="must be a str, not"):
        resolve_tokenizer(model_name, tokenizer_id)
