"""A base model plus an adapter: W + scale * B A, in float32, rounded once to the format of the base.

The files of the base are written again one after the other, each matrix in blocks of rows, so that memory depends
neither on the model nor on its largest matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from tinsmith.errors import InvalidInputError
from tinsmith.export import tensor_files
from tinsmith.export.adapter import HEAD, Adapter
from tinsmith.export.base import CONFIG, EMBEDDING, INDEX, BaseModel
from tinsmith.export.card import Learned, Story, merged_card
from tinsmith.export.files import NewFile
from tinsmith.export.numbers import SIZES, from_floats, to_floats
from tinsmith.export.tensor_files import NewTensor, StoredTensor, tensors_file

_HEAD_WEIGHT = f"{HEAD}.weight"

Shards = Mapping[str, Mapping[str, NewTensor]]


def merged_files(adapter: Adapter, base: BaseModel, story: Story) -> list[NewFile]:
    """A model that needs no adapter any more."""
    shards = merged_tensors(adapter, base)
    weights = [tensors_file(name, tensors) for name, tensors in shards.items()]
    index = [] if base.index is None else [NewFile.json(INDEX, _index(base.index, shards))]
    return [*_companions(adapter, base), merged_card(Learned.of(adapter), story), *index, *weights]


# --- what will be in which file --------------------------------------------------------------------------------------


def merged_tensors(adapter: Adapter, base: BaseModel) -> Shards:
    """The tensors of every file of the base. Whatever does not fit is found here, before anything is written."""
    base.check_copies(adapter)
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
    weight = base.weight(module)
    name = f"{EMBEDDING if module == HEAD and base.is_tied else module}.weight"
    if weight is None:
        raise InvalidInputError(
            f"The adapter changes {module}, but the base {base.name} has no {name}. Give the model that the "
            "adapter was trained on as the base.",
            field=module,
        )
    if weight.shape != adapter.pairs[module].shape:
        raise InvalidInputError(
            f"The adapter changes {module} as a matrix of {list(adapter.pairs[module].shape)}, but {name} of the base "
            f"{base.name} is {list(weight.shape)}. Give the model that the adapter was trained on as the base.",
            field=module,
        )
    if weight.dtype not in SIZES:
        raise InvalidInputError(
            f"{name} of the base {base.name} is stored as {weight.dtype}, to which nothing can be added. Give the "
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


def _companions(adapter: Adapter, base: BaseModel) -> Iterator[NewFile]:
    for name in base.companions():
        if adapter.changes_head and name.as_posix() == CONFIG:
            yield NewFile.json(CONFIG, {**base.config, "tie_word_embeddings": False})
        else:
            yield NewFile.copy(name.as_posix(), base.folder / name)


def _index(index: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    total = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors.values())
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    return {**index, "metadata": {"total_size": total}, "weight_map": weight_map}
