"""The tokenizers of the base models, for endpoints that speak text. Each is loaded when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.errors import TokenizerError

if TYPE_CHECKING:
    from tinsmith.server.models import ModelFacts
    from tinsmith.text.fast_tokenizer import Tokenizer


class ModelText:
    """Text to token ids of one base model and back.

    The first call may take seconds, and long texts take some milliseconds: to be called in a thread. All of it raises
    `TokenizerError` if the model came without a tokenizer.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._loading = threading.Lock()
        self._loaded: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """As the model expects the beginning of a text, with its first token if it has one."""
        return self.tokenizer.encode(text, add_special_tokens=add_special)

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """A conversation by the model's own chat template, up to where the assistant begins to answer.

        It is complete: to be encoded without special tokens.
        """
        from tinsmith.text.chat_template import apply_chat_template

        return apply_chat_template(self.tokenizer, messages, tools=tools, tokenize=False, **variables)

    def _load(self) -> Tokenizer:
        from tinsmith.text.tokenizer_folder import read_tokenizer

        file = self._folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"The model {self._name!r} is served without a tokenizer: there is no tokenizer.json among its files. "
                "Send token ids, or have it put there together with tokenizer_config.json."
            )
        return read_tokenizer(file, name=self._name)


class Texts:
    """By the name of the base model."""

    def __init__(self, models: Mapping[str, ModelFacts]) -> None:
        self._by_name = {name: ModelText(name, facts.folder) for name, facts in models.items()}

    def of(self, base_model: str) -> ModelText:
        """`KeyError` if no such model is served."""
        return self._by_name[base_model]
