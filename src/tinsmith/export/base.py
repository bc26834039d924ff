"""The model that an adapter was trained on: a folder of config.json, safetensors files and what belongs to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tinsmith.errors import InvalidInputError
from tinsmith.export.adapter import HEAD, Adapter, read_json
from tinsmith.export.tensor_files import StoredTensor, read_head

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING = "model.embed_tokens"

_COMPANIONS = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.py",
    "*.tiktoken",
    "*.txt",
    "LICENSE*",
    "NOTICE*",
    "additional_chat_templates/*.jinja",
)
"""What goes into a merged folder besides the weights. Weights in other formats would not be merged ones."""


_NOT_FOR_OTHERS = (".index.json", "tinsmith.json")
"""What is said there is true of the base alone: which file holds which tensor, and how the folder was made."""


class BaseModel:
    def __init__(self, folder: Path, name: str | None = None) -> None:
        """Errors call it by its name, which is that of its folder where none is given."""
        self.name = name or str(folder)
        if not (folder / CONFIG).is_file():
            raise InvalidInputError(
                f"{self.name} has no {CONFIG}. Give the folder of a model as the base, or its hub id.", field="base"
            )
        self.folder = folder
        self.config = read_json(folder / CONFIG)
        self.index = read_json(folder / INDEX) if (folder / INDEX).is_file() else None
        self.shards = {name: read_head(folder / name) for name in self._shard_names()}
        self.tensors: dict[str, StoredTensor] = {
            name: tensor for tensors in self.shards.values() for name, tensor in tensors.items()
        }
        self._check_not_quantised()

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the output matrix too; some releases store it twice all the same."""
        return bool(self.config.get("tie_word_embeddings")) or "lm_head.weight" not in self.tensors

    def weight(self, module: str) -> StoredTensor | None:
        """The matrix of a module; that of the output may be the embedding."""
        return self.tensors.get(f"{EMBEDDING if module == HEAD and self.is_tied else module}.weight")

    def check_copies(self, adapter: Adapter) -> None:
        """What an adapter holds of its base must be so here, or it was trained, or belongs to another base."""
        for module, copy in adapter.copies.items():
            own = self.weight(module)
            if own is None or not own.equals(copy):
                raise InvalidInputError(
                    f"The adapter brings {module} along, and it is not that of the base {self.name}: it was "
                    "trained as a whole, or for another base. Train it as LoRA only, or give its own base.",
                    field=module,
                )

    def companions(self) -> Iterator[Path]:
        """Configuration, tokenizer, templates and licence, by their path within the folder."""
        found = {path for pattern in _COMPANIONS for path in self.folder.glob(pattern) if path.is_file()}
        for path in sorted(found):
            if not path.name.endswith(_NOT_FOR_OTHERS):
                yield path.relative_to(self.folder)

    def _shard_names(self) -> list[str]:
        names = sorted(set(self.index["weight_map"].values())) if self.index is not None else [SINGLE]
        for name in names:
            if not (self.folder / name).is_file():
                raise InvalidInputError(
                    f"{self.name} lacks {name}. A base model has its weights as {SINGLE}, or as {INDEX} and the "
                    "files that this names; fetch it again, or choose a release with safetensors.",
                    field="base",
                )
        return names

    def _check_not_quantised(self) -> None:
        if (settings := self.config.get("quantization_config")) is not None:
            method = settings.get("quant_method", "an unnamed method")
            raise InvalidInputError(
                f"The weights of {self.name} are quantised with {method}, so nothing can be added to them. Give the "
                "release in bfloat16, float16 or float32 as the base.",
                field="base",
            )
