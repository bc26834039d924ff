"""Base models: from the name a user gives to a folder of files, and what the API must know of it without torch.

parse_source    a MODEL argument: a hub id, a folder, or NAME=FOLDER
find            the folder with its files, fetched from the hub where necessary
describe        its facts, read from config.json, generation_config.json and the heads of the safetensors files
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tinsmith.errors import ConfigError, MissingExtraError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM")

# Repositories hold the same weights in more formats than one; subfolders and other formats stay where they are.
_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)

_Form = TypeVar("_Form", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A base model: the name clients ask for, and the absolute folder or the hub id its files come from."""

    name: str
    location: str

    @property
    def is_folder(self) -> bool:
        return os.path.isabs(self.location)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the API must know of a base model."""

    name: str
    folder: Path
    architecture: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer_id: str
    """A hub id, or the folder for clients on the same machine."""
    num_parameters: int


# --- names -----------------------------------------------------------------------------------------------------------


def parse_source(text: str) -> ModelSource:
    """Read a MODEL argument. What exists as a folder is that folder, whatever the hub calls by the same name."""
    if (folder := _existing_folder(text)) is not None:
        return ModelSource(text, folder)
    name, separator, location = text.partition("=")
    if separator:
        return _named_folder(name, location)
    if text.startswith((".", "/", "~", "\\")) or os.path.exists(text):
        raise ConfigError(f"The model {text!r} is not a folder. Give a folder with config.json and safetensors files.")
    if not _HUB_ID.fullmatch(text):
        raise ConfigError(
            f"{text!r} is not a model: give a folder, NAME=FOLDER, or a hub id such as HuggingFaceTB/SmolLM2-135M."
        )
    return ModelSource(text, text)


def _named_folder(name: str, location: str) -> ModelSource:
    folder = _existing_folder(location)
    if not name.strip() or folder is None:
        problem = f"there is no folder {location!r}" if name.strip() else "the name is empty"
        raise ConfigError(f"{name}={location} is not a model: {problem}. Give NAME=FOLDER with an existing folder.")
    return ModelSource(name, folder)


def _existing_folder(text: str) -> str | None:
    path = os.path.expanduser(text)
    return os.path.abspath(path) if text and os.path.isdir(path) else None


# --- files -----------------------------------------------------------------------------------------------------------


def find(source: ModelSource, *, offline: bool = False) -> Path:
    """The folder with the model's files. Hub models are fetched into the Hugging Face cache, unless `offline`."""
    folder = Path(source.location) if source.is_folder else _fetch(source.location, offline=offline)
    missing = [name for name in ("config.json", *_weight_files(folder)) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"The folder {folder} of the model {source.name!r} lacks {', '.join(missing)}. A model folder holds "
            "config.json, tokenizer.json and the weights: model.safetensors, or model.safetensors.index.json and the "
            "files it names."
        )
    return folder


def _weight_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    return sorted(set(_read(index, _Index).weight_map.values()))


def _fetch(hub_id: str, *, offline: bool) -> Path:
    """The snapshot of a hub model; one in the cache will do where the hub does not answer."""
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "server", f"Fetching the model {hub_id!r}") from error
    if offline or constants.HF_HUB_OFFLINE:
        if (folder := _cached(hub_id)) is None:
            raise ConfigError(f"The model {hub_id!r} is not here, and offline nothing is fetched. {_remedy(hub_id)}")
        return folder
    try:
        # snapshot_download has no time limit of its own for a hub that takes the connection and then says nothing.
        HfApi().model_info(hub_id, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return Path(snapshot_download(hub_id, allow_patterns=list(_FILES)))
    except Exception as error:
        if (folder := _cached(hub_id)) is None:
            raise ConfigError(f"The model {hub_id!r} cannot be fetched: {_why(error)} {_remedy(hub_id)}") from error
        return folder


def _cached(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_FILES), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _why(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    reason = str(error).strip().partition("\n")[0] or "no reason was given"
    if isinstance(error, GatedRepoError):
        return f"its repository is gated. Accept the terms on its model page and set HF_TOKEN. ({reason})"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such repository, or it is private. Check the name, or set HF_TOKEN. ({reason})"
    return f"{type(error).__name__}: {reason}."


def _remedy(hub_id: str) -> str:
    from huggingface_hub import constants

    included = " ".join(f"--include '{pattern}'" for pattern in _FILES)
    return (
        f"Without a connection: run `hf download {hub_id} {included}` where there is one, and copy the folder "
        f"models--{hub_id.replace('/', '--')} from the cache there into {constants.HF_HUB_CACHE}; or put the files "
        f"into any folder and serve {hub_id}=FOLDER."
    )


# --- facts -----------------------------------------------------------------------------------------------------------


class _Config(msgspec.Struct):
    vocab_size: int
    max_position_embeddings: int
    architectures: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    quantization_config: dict[str, Any] | None = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    shape: list[int]
    data_offsets: tuple[int, int]


def describe(source: ModelSource, *, offline: bool = False) -> ModelFacts:
    folder = find(source, offline=offline)
    config = _read(folder / "config.json", _Config)
    return ModelFacts(
        name=source.name,
        folder=folder,
        architecture=_supported_architecture(source, config),
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(folder, config),
        bos_token_id=config.bos_token_id,
        tokenizer_id=source.location,
        num_parameters=_num_parameters(folder, config),
    )


def _read(path: Path, form: type[_Form]) -> _Form:
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be used: {error}. Fetch the file again.") from error


def _supported_architecture(source: ModelSource, config: _Config) -> str:
    architecture = next(iter(config.architectures or ()), None)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"The model {source.name!r} has the architecture {architecture}, which is not supported. "
            f"Supported are: {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "an unnamed method")
        raise ConfigError(
            f"The weights of the model {source.name!r} are quantised with {method}, which cannot be trained here. "
            "Use its release in bfloat16, float16 or float32."
        )
    return architecture


def _eos_token_ids(folder: Path, config: _Config) -> tuple[int, ...]:
    """Chat models name more tokens that end a turn in generation_config.json, so it goes first."""
    path = folder / "generation_config.json"
    ids = _read(path, _GenerationConfig).eos_token_id if path.is_file() else None
    if ids is None:
        ids = config.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _num_parameters(folder: Path, config: _Config) -> int:
    tensors = (item for name in _weight_files(folder) for item in _tensors(folder / name))
    # Some releases store a tied head all the same.
    return sum(
        prod(tensor.shape) for name, tensor in tensors if not (config.tie_word_embeddings and name == "lm_head.weight")
    )


def _tensors(path: Path) -> Iterator[tuple[str, _Tensor]]:
    """The tensors a safetensors file announces; a file shorter or longer than that is refused."""
    with path.open("rb") as file:
        head_size = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        head = file.read(head_size) if head_size < size else b""
    try:
        entries = msgspec.json.decode(head, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in entries.items()}
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}. Fetch it again.") from error
    announced = 8 + head_size + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size != announced:
        raise ConfigError(f"{path} has {size} bytes, but its head announces {announced}. Fetch it again.")
    yield from tensors.items()
