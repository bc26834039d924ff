"""From a tokenizer's source to the loaded tokenizer: find its files, read them, build it.

A `tokenizer.json` is read by the `tokenizers` library. Only sources without one, or with code of their own, are handed
to `transformers`. All optional packages are imported on first use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tinsmith.client.fast_tokenizer import Tokenizer
from tinsmith.errors import InvalidInputError, MissingExtraError, TokenizerError

if TYPE_CHECKING:
    import tokenizers

    from tinsmith.client.tokenizers import TokenizerSource

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_FILES_FOR_TRANSFORMERS = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")
_OLDER_VOCABULARIES = ("*.model", "*.tiktoken", "tekken.json", "vocab.*")

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(source: TokenizerSource, *, offline: bool = False) -> Tokenizer:
    """Find and load a tokenizer. With `offline` no connection is opened."""
    if source.kind == "local":
        return _load_local(source, Path(source.id))
    if source.kind == "tml" and (tokenizer := _load_tml(source.id)) is not None:
        return tokenizer
    return _load_from_hub(source, offline=offline)


def _load_local(source: TokenizerSource, path: Path) -> Tokenizer:
    tokenizer_file = path / "tokenizer.json" if path.is_dir() else path
    if tokenizer_file.is_file():
        return read_tokenizer(tokenizer_file, name=source.id)
    return _load_with_transformers(source, path)


def _load_tml(tokenizer_id: str) -> Tokenizer | None:
    try:
        from tml_tokenizers.tinker_tokenizers import get_tinker_tokenizer
    except ImportError as error:
        raise TokenizerError(
            f"The tokenizer of {tokenizer_id!r} comes with the package 'tml_tokenizers', which is not installed. "
            "Build prompts for this model with a renderer of the package 'tml-renderers' instead."
        ) from error
    return cast("Tokenizer | None", get_tinker_tokenizer(tokenizer_id))


def _load_from_hub(source: TokenizerSource, *, offline: bool) -> Tokenizer:
    if not source.needs_remote_code:
        folder = _fetch(source, _TOKENIZER_FILES, offline=offline)
        if (folder / "tokenizer.json").is_file():
            return read_tokenizer(folder / "tokenizer.json", name=source.id)
    return _load_with_transformers(source, _fetch(source, _FILES_FOR_TRANSFORMERS, offline=offline))


def _fetch(source: TokenizerSource, patterns: tuple[str, ...], *, offline: bool) -> Path:
    """The cached snapshot of a repository, with the files that match; downloads what is missing unless offline."""
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "tokenizers", f"Finding the tokenizer of {source.id!r}") from error
    offline = offline or constants.HF_HUB_OFFLINE
    try:
        folder = snapshot_download(
            source.id, revision=source.revision, allow_patterns=list(patterns), local_files_only=offline
        )
    except HFValidationError as error:
        raise InvalidInputError(
            f"{source.id!r} is neither an existing folder nor a hub id of the form 'organisation/model'.",
            field="tokenizer_id",
            value=source.id,
        ) from error
    except Exception as error:
        problem = _not_cached(source, constants.HF_HUB_CACHE) if offline else _not_fetched(error)
        raise TokenizerError(f"No tokenizer for {source.id!r}: {problem}") from error
    return Path(folder)


def _not_cached(source: TokenizerSource, cache: str) -> str:
    patterns = _FILES_FOR_TRANSFORMERS if source.needs_remote_code else _TOKENIZER_FILES
    included = " ".join(f"--include '{pattern}'" for pattern in patterns)
    revision = f" --revision {source.revision}" if source.revision else ""
    remedy = (
        f"its files are not, or not all, in the Hugging Face cache {cache}, and offline nothing is downloaded. Run "
        f"`hf download {source.id}{revision} {included}` where there is a connection and copy the folder "
        f"models--{source.id.replace('/', '--')} from the cache there into the cache here"
    )
    if source.needs_remote_code:
        return f"{remedy}."
    return f"{remedy}; or put tokenizer.json and tokenizer_config.json into a folder and pass that as the tokenizer id."


def _not_fetched(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, GatedRepoError):
        return f"its repository is gated. Accept the terms on its model page and set HF_TOKEN. ({reason})"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such repository, or it is private. Check the name, or set HF_TOKEN. ({reason})"
    return f"{type(error).__name__}: {reason}. Check the connection, or place the files yourself and use offline=True."


def _load_with_transformers(source: TokenizerSource, folder: Path) -> Tokenizer:
    # Without a vocabulary transformers makes up an empty one and says nothing.
    if not any(any(folder.glob(pattern)) for pattern in _OLDER_VOCABULARIES):
        raise TokenizerError(_no_tokenizer(source, folder))
    try:
        from transformers import AutoTokenizer
        from transformers.dynamic_module_utils import get_class_from_dynamic_module
    except ImportError as error:
        purpose = f"Loading the tokenizer of {source.id!r}, which is more than a tokenizer.json,"
        raise MissingExtraError("transformers", "transformers", purpose) from error
    try:
        if source.needs_remote_code and (own_class := _own_tokenizer_class(folder)) is not None:
            # Asking for the class by name spares the model's configuration code, which AutoTokenizer runs first.
            tokenizer_class = get_class_from_dynamic_module(own_class, str(folder), local_files_only=True)
            loaded = tokenizer_class.from_pretrained(str(folder), local_files_only=True)
        else:
            # Left open, trust_remote_code makes transformers stop and ask on the terminal.
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise TokenizerError(
            f"transformers cannot load the tokenizer of {source.id!r} from {folder}: {error}. "
            "To load it in your own way, pass a function as loader=."
        ) from error
    loaded.name_or_path = source.id
    # It has every method of Tokenizer; its own type would oblige all users to install transformers to check theirs.
    return cast("Tokenizer", loaded)


def _no_tokenizer(source: TokenizerSource, folder: Path) -> str:
    found = f"{source.id!r} has no tokenizer: there is neither a tokenizer.json nor another vocabulary in {folder}."
    if source.kind == "local":
        return (
            f"{found} Put the model's tokenizer.json and tokenizer_config.json there; if you mean the hub model of "
            "that name, run from a place where no folder is called so."
        )
    return f"{found} Pass the id of the model that it was made from as the tokenizer id."


def _own_tokenizer_class(folder: Path) -> str | None:
    """Which class in which file of the repository tokenizes, as in 'tokenization_kimi.TikTokenTokenizer'."""
    classes = _read_json(folder / "tokenizer_config.json").get("auto_map", {}).get("AutoTokenizer", ())
    return next((name for name in reversed(classes) if name is not None), None)


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
    config = _read_json(folder / "tokenizer_config.json")
    tokens = config if "added_tokens_decoder" in config else config | _read_json(folder / "special_tokens_map.json")
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


def _read_json(path: Path) -> dict[str, Any]:
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
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template
