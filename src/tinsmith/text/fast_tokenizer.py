"""A light tokenizer on top of the `tokenizers` library, with the names a `transformers` fast tokenizer has.

It holds what training code calls. Text in, ids out and back: nothing is truncated, padded, cleaned up or templated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

from tinsmith.errors import InvalidInputError, InvalidTypeError

if TYPE_CHECKING:
    import tokenizers


class _TokenText:
    """The text of a special token, such as `eos_token`. Assigning moves the id too: both read one mapping."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, tokenizer: Tokenizer, owner: type) -> str | None:
        return tokenizer.special_tokens_map.get(self._name)

    def __set__(self, tokenizer: Tokenizer, token: str | None) -> None:
        if token is None:
            tokenizer.special_tokens_map.pop(self._name, None)
        else:
            tokenizer.special_tokens_map[self._name] = token


class _TokenId:
    """The id of a special token, such as `eos_token_id`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._text_name = name.removesuffix("_id")

    def __get__(self, tokenizer: Tokenizer, owner: type) -> int | None:
        token = tokenizer.special_tokens_map.get(self._text_name)
        return None if token is None else tokenizer.convert_tokens_to_ids(token)

    def __set__(self, tokenizer: Tokenizer, token_id: int | None) -> None:
        setattr(tokenizer, self._text_name, None if token_id is None else tokenizer.convert_ids_to_tokens(token_id))


class Tokenizer:
    """Text to token ids and back. `backend_tokenizer` is the `tokenizers.Tokenizer` underneath."""

    bos_token, bos_token_id = _TokenText(), _TokenId()
    eos_token, eos_token_id = _TokenText(), _TokenId()
    pad_token, pad_token_id = _TokenText(), _TokenId()
    unk_token, unk_token_id = _TokenText(), _TokenId()

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name_or_path: str = "",
        special_tokens_map: Mapping[str, str] | None = None,
        extra_special_tokens: Iterable[str] = (),
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        # A tokenizer.json may carry both from its training; ids that vanish or appear unasked would go unnoticed.
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer = backend
        self.name_or_path = name_or_path
        self.special_tokens_map = dict(special_tokens_map or {})
        self.extra_special_tokens = list(extra_special_tokens)
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Special tokens written out in it, such as `<|im_end|>`, become their one id."""
        if not isinstance(text, str):
            raise InvalidTypeError(
                f"encode takes one str, not {type(text).__name__}; encode several texts one by one.",
                field="text",
                value=text,
            )
        try:
            # In a batch, even of one: only that lets other threads run meanwhile.
            (found,) = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:  # the backend takes UTF-8, which has no form for half a character
            raise InvalidInputError(
                "The text holds lone surrogates, which are no characters. Replace them first, for instance with "
                "text.encode('utf-8', 'replace').decode().",
                field="text",
                value=text,
            ) from error
        ids: list[int] = found.ids
        return ids

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of one sequence of ids (list, array or tensor); bytes that are no UTF-8 become U+FFFD."""
        try:
            text: str = self.backend_tokenizer.decode(_flat_ids(token_ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            kind = InvalidTypeError if isinstance(error, TypeError) else InvalidInputError
            raise kind(
                f"decode takes one sequence of token ids: {error}. For several sequences there is batch_decode.",
                field="token_ids",
                value=token_ids,
            ) from error
        return text

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str] | tuple[str, ...]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str] | tuple[str, ...]) -> int | list[int | None] | None:
        """Ids of whole tokens; one that the vocabulary lacks gives the id of `unk_token`, or None without one."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id: int | None = self.backend_tokenizer.token_to_id(tokens)
        return self._unknown_id() if token_id is None else token_id

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Iterable[int], skip_special_tokens: bool = False) -> list[str | None]: ...
    def convert_ids_to_tokens(
        self, ids: int | Iterable[int], skip_special_tokens: bool = False
    ) -> str | list[str | None] | None:
        """Vocabulary entries of ids, as the model stores them (not text); None where no entry has the id."""
        if isinstance(ids, int):
            token: str | None = self.backend_tokenizer.id_to_token(ids)
            return token
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in _flat_ids(ids) if token_id not in skipped]

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int | None]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    @property
    def vocab_size(self) -> int:
        """Entries of the base vocabulary; `len(tokenizer)` counts the added tokens too."""
        size: int = self.backend_tokenizer.get_vocab_size(with_added_tokens=False)
        return size

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def __repr__(self) -> str:
        return f"Tokenizer({self.name_or_path!r}, size={len(self)}, special_tokens_map={self.special_tokens_map})"

    def _unknown_id(self) -> int | None:
        unknown = self.special_tokens_map.get("unk_token")
        token_id: int | None = None if unknown is None else self.backend_tokenizer.token_to_id(unknown)
        return token_id

    if not TYPE_CHECKING:  # a type checker should go on reporting attributes that do not exist

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(_advice(name, self.__dict__.get("name_or_path", "")), name=name, obj=self)


def _flat_ids(ids: Any) -> Sequence[int]:
    """A list from a list, a tuple, a generator, an array or a tensor; one id becomes a list of one."""
    plain = ids.tolist() if hasattr(ids, "tolist") else ids
    return [plain] if isinstance(plain, int) else list(plain)


def _advice(attribute: str, name_or_path: str) -> str:
    if attribute == "apply_chat_template":
        return (
            "A Tokenizer applies no chat template. Call tinsmith.apply_chat_template(tokenizer, messages), "
            "which renders the model's own template."
        )
    return (
        f"A Tokenizer has no attribute {attribute!r}. If you need all of transformers, load the same tokenizer with "
        f"transformers.AutoTokenizer.from_pretrained({name_or_path!r})."
    )
