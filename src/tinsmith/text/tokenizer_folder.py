"""A tokenizer from a `tokenizer.json` and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.errors import MissingExtraError, TokenizerError
from tinsmith.text.fast_tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer(tokenizer_file: Path, *, name: str) -> Tokenizer:
    """Build a tokenizer from a tokenizer.json and what lies beside it; a file of another name stands alone."""
    backend = _read_backend(tokenizer_file)
    if tokenizer_file.name != "tokenizer.json":
        return Tokenizer(backend, name_or_path=name)
    try:
        return _configure(backend, tokenizer_file.parent, name)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"The tokenizer_config.json or special_tokens_map.json in {tokenizer_file.parent} holds something "
            f"unexpected: {error!r}. Fetch the files again."
        ) from error


def _configure(backend: tokenizers.Tokenizer, folder: Path, name: str) -> Tokenizer:
    config = read_json(folder / "tokenizer_config.json")
    tokens = config if "added_tokens_decoder" in config else config | read_json(folder / "special_tokens_map.json")
    named, extra = dict(_named_tokens(tokens)), list(_extra_tokens(tokens))
    _add_tokens(backend, config.get("added_tokens_decoder", {}), [*named.values(), *extra])
    return Tokenizer(
        backend,
        name_or_path=name,
        special_tokens_map={key: token["content"] for key, token in named.items()},
        extra_special_tokens=[token["content"] for token in extra],
        chat_template=_read_chat_template(folder, config),
    )


def _read_backend(tokenizer_file: Path) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "tokenizers", f"Reading {tokenizer_file}") from error
    try:
        return tokenizers.Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:
        raise TokenizerError(
            f"{tokenizer_file} cannot be read as a tokenizer: {error}. It may be damaged, a Git LFS pointer, or newer "
            f"than the installed tokenizers {tokenizers.__version__}."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; nothing if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}. Fetch the file again.") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not {type(content).__name__}. Fetch the file again.")
    return content


def _named_tokens(tokens: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The seven common names first, then the model's own, which a chat template may use as well."""
    for name in _NAMED_SPECIAL_TOKENS:
        if tokens.get(name) is not None:
            yield name, _token(tokens[name])
    for name, token in tokens.items():
        if name.endswith("_token") and name not in _NAMED_SPECIAL_TOKENS and isinstance(token, str):
            yield name, _token(token)
    if isinstance(extra := tokens.get("extra_special_tokens"), dict):
        for name, token in extra.items():
            yield name, _token(token)


def _extra_tokens(tokens: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    extra = tokens.get("extra_special_tokens") or tokens.get("additional_special_tokens")
    if isinstance(extra, list):
        yield from map(_token, extra)


def _token(value: str | Mapping[str, Any]) -> dict[str, Any]:
    fields = {"content": value} if isinstance(value, str) else value
    return {name: fields[name] for name in _ADDED_TOKEN_FIELDS if name in fields}


def _add_tokens(
    backend: tokenizers.Tokenizer, added_tokens_decoder: Mapping[str, Any], special: list[dict[str, Any]]
) -> None:
    """Add what the configuration names and tokenizer.json lacks, in the order that gives them their ids."""
    from tokenizers import AddedToken

    by_id = sorted(added_tokens_decoder.items(), key=lambda item: int(item[0]))
    backend.add_tokens([AddedToken(**_token(fields)) for _, fields in by_id])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens(
        [AddedToken(**{**fields, "special": True}) for fields in special if fields["content"] not in known]
    )


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Template files go before the configuration; several named templates become a dict."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        return templates["default"] if list(templates) == ["default"] else templates
    template = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template
