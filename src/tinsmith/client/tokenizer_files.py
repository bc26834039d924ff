"""From a tokenizer's source to the loaded tokenizer: find its files and have them read.

A `tokenizer.json` is read by the `tokenizers` library. Only sources without one, or with code of their own, are handed
to `transformers`. All optional packages are imported on first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from tinsmith.errors import InvalidInputError, MissingExtraError, TokenizerError
from tinsmith.text.fast_tokenizer import Tokenizer
from tinsmith.text.tokenizer_folder import read_json, read_tokenizer

if TYPE_CHECKING:
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
    classes = read_json(folder / "tokenizer_config.json").get("auto_map", {}).get("AutoTokenizer", ())
    return next((name for name in reversed(classes) if name is not None), None)
