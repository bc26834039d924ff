"""A base model plus an adapter: W + scale * B A, in float32, rounded once to the format of the base.

The files of the base are written again one after the other, each matrix in blocks of rows, so that memory depends
neither on the model nor on its largest matrix.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.errors import InvalidInputError
from tinsmith.export import tensor_files
from tinsmith.export.adapter import HEAD, Adapter, write_json
from tinsmith.export.base import CONFIG, INDEX, BaseModel
from tinsmith.export.card import merged_card, write_card
from tinsmith.export.numbers import SIZES, from_floats, to_floats
from tinsmith.export.tensor_files import NewTensor, StoredTensor, write_tensors

OnProgress = Callable[[str, int, int], None]
"""Hears which file is being written, how many bytes of all files are, and how many there will be."""

_EMBEDDING = "model.embed_tokens.weight"
_HEAD_WEIGHT = f"{HEAD}.weight"


def write_merged(
    adapter_folder: Path,
    base_folder: Path,
    folder: Path,
    *,
    base_model: str,
    origin: str,
    on_progress: OnProgress = lambda file, done, total: None,
) -> None:
    """Fills a folder with a model that needs no adapter any more. `origin` is the checkpoint's path, for the card."""
    adapter, base = Adapter(adapter_folder), BaseModel(base_folder)
    shards = _plan(adapter, base)
    _check_room(folder, shards)
    _write_companions(adapter, base, folder)
    _write_shards(shards, folder, on_progress)
    if base.index is not None:
        write_json(folder / INDEX, _index(base.index, shards))
    write_card(folder, merged_card(adapter, base_model, origin))


# --- what will be in which file --------------------------------------------------------------------------------------

Shards = Mapping[str, Mapping[str, NewTensor]]


def _plan(adapter: Adapter, base: BaseModel) -> Shards:
    """The tensors of every file. Whatever does not fit is found here, before anything is written."""
    merged = {f"{module}.weight": _merged(adapter, base, module) for module in adapter.pairs}
    shards = {
        file: {name: merged.get(name) or NewTensor.copy(tensor) for name, tensor in tensors.items()}
        for file, tensors in base.shards.items()
    }
    if adapter.changes_head and _HEAD_WEIGHT not in base.tensors:
        last = list(shards)[-1]
        shards[last] = {**shards[last], _HEAD_WEIGHT: merged[_HEAD_WEIGHT]}
    return shards


def _merged(adapter: Adapter, base: BaseModel, module: str) -> NewTensor:
    """Of a model whose embedding is also its output matrix, the changed output becomes a matrix of its own."""
    name = _EMBEDDING if module == HEAD and base.is_tied else f"{module}.weight"
    weight = base.tensors.get(name)
    if weight is None:
        raise InvalidInputError(
            f"The adapter changes {module}, but the base in {base.folder} has no {name}. Give the model that the "
            "adapter was trained on as the base.",
            field=module,
        )
    if weight.shape != adapter.pairs[module].shape:
        raise InvalidInputError(
            f"The adapter changes {module} as a matrix of {list(adapter.pairs[module].shape)}, but {name} of the base "
            f"in {base.folder} is {list(weight.shape)}. Give the model that the adapter was trained on as the base.",
            field=module,
        )
    if weight.dtype not in SIZES:
        raise InvalidInputError(
            f"{name} of the base in {base.folder} is stored as {weight.dtype}, to which nothing can be added. Give the "
            "release in bfloat16, float16 or float32 as the base.",
            field=module,
        )
    return NewTensor(weight.dtype, weight.shape, weight.num_bytes, partial(_sums, adapter, module, weight))


def _sums(adapter: Adapter, module: str, weight: StoredTensor) -> Iterator[bytes]:
    a, b = adapter.matrices(module)
    num_rows, num_columns = weight.shape
    row_bytes = num_columns * SIZES[weight.dtype]
    step = max(1, tensor_files.BLOCK_BYTES // (4 * num_columns))
    for start in range(0, num_rows, step):
        rows = min(step, num_rows - start)
        sums = to_floats(weight.read(start * row_bytes, rows * row_bytes), weight.dtype).reshape(rows, num_columns)
        sums += b[start : start + rows] @ a
        block = from_floats(sums, weight.dtype)
        if not np.isfinite(to_floats(block, weight.dtype)).all():
            raise InvalidInputError(
                f"The sum of base and adapter at {module} does not fit {weight.dtype}. Give a base in bfloat16 or "
                "float32, or export an earlier checkpoint.",
                field=module,
            )
        yield block


# --- files -----------------------------------------------------------------------------------------------------------


def _check_room(folder: Path, shards: Shards) -> None:
    """Better said at once than after half an hour of writing."""
    needed, free = _num_bytes(shards), shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidInputError(
            f"The merged model takes {needed / 1e9:.2f} GB, and the disk of {folder.parent} has {free / 1e9:.2f} GB "
            "left. Make room, or export to another disk.",
            field="folder",
            value=str(folder.parent),
        )


def _num_bytes(shards: Shards) -> int:
    return sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors.values())


def _write_companions(adapter: Adapter, base: BaseModel, folder: Path) -> None:
    for name in base.companions():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(base.folder / name, folder / name)
    if adapter.changes_head:
        write_json(folder / CONFIG, {**base.config, "tie_word_embeddings": False})


def _write_shards(shards: Shards, folder: Path, on_progress: OnProgress) -> None:
    done, total = 0, _num_bytes(shards)
    for file, tensors in shards.items():

        def count(num_bytes: int, file: str = file) -> None:
            nonlocal done
            done += num_bytes
            on_progress(file, done, total)

        write_tensors(folder / file, tensors, count)


def _index(index: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    return {**index, "metadata": {"total_size": _num_bytes(shards)}, "weight_map": weight_map}
