"""An adapter made elsewhere becomes one of ours: the same function, in the form in which ours are kept.

Ours have one rank, one scale and a matrix for every module of a kind. Theirs need not: smaller ranks and missing
modules are filled up with what a new adapter begins with, a random A and a B of zeros, which changes nothing and can be
trained. Another scale becomes a part of B. numpy alone, in blocks: this runs beside the API.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from tinsmith.errors import InvalidInputError
from tinsmith.export import Adapter, BaseModel, write_files
from tinsmith.export.numbers import Floats
from tinsmith.export.tensor_files import NewTensor, tensors_file
from tinsmith.server.checks import MAX_RANK
from tinsmith.server.engine.adapter_facts import ALPHA, ATTENTION, MLP, UNEMBED, WEIGHTS, Facts, write_facts
from tinsmith.server.store.records import Lora

_LAYER = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)")
_GROUPS = (ATTENTION, MLP, (UNEMBED,))
"""What is adapted as a whole, or not at all."""
_SMALL_FILES_BYTES = 4 * 2**20


def largest_bytes(base: BaseModel) -> int:
    """Of an adapter that can be used with this base: of the highest rank, for everything, in float32.

    It may bring along the embedding and the output matrix.
    """
    shapes = _shapes(base)
    head = shapes.get(UNEMBED, (0, 0))
    copies = 2 * 4 * head[0] * head[1]
    return _SMALL_FILES_BYTES + copies + sum(4 * MAX_RANK * (out + inner) for out, inner in shapes.values())


class Adoption:
    """An adapter that was checked against its base, and can be written."""

    def __init__(self, folder: Path, base: BaseModel, base_model: str, seed: int) -> None:
        self._adapter = Adapter(folder)
        self._base_model = base_model
        shapes = _shapes(base)
        self._check(shapes)
        base.check_copies(self._adapter)
        kinds = {_kind(module) for module in self._adapter.pairs}
        attention, mlp, unembed = (not kinds.isdisjoint(group) for group in _GROUPS)
        self.lora = Lora(rank=self._adapter.rank, seed=seed, train_attn=attention, train_mlp=mlp, train_unembed=unembed)
        trained = {kind for group in _GROUPS if not kinds.isdisjoint(group) for kind in group}
        self._modules = {module: shape for module, shape in shapes.items() if _kind(module) in trained}

    @property
    def size_bytes(self) -> int:
        return _SMALL_FILES_BYTES + sum(4 * self.lora.rank * (out + inner) for out, inner in self._modules.values())

    def write(self, folder: Path) -> None:
        lora = self.lora
        tensors = {}
        for module, (num_out, num_in) in self._modules.items():
            name = f"base_model.model.{module}.lora_"
            tensors[f"{name}A.weight"] = _tensor((lora.rank, num_in), partial(self._a, module))
            tensors[f"{name}B.weight"] = _tensor((num_out, lora.rank), partial(self._b, module))
        write_files([tensors_file(WEIGHTS, tensors)], folder)
        flags = (lora.train_attn, lora.train_mlp, lora.train_unembed)
        write_facts(folder, Facts(self._base_model, lora.rank, lora.seed or 0, *flags))

    def _a(self, module: str) -> Floats:
        num_in = self._modules[module][1]
        matrix = _first_a(self.lora.rank, num_in, zlib.crc32(module.encode(), self.lora.seed or 0))
        if module in self._adapter.pairs:
            theirs = self._matrices(module)[0]
            matrix[: theirs.shape[0]] = theirs
        return matrix

    def _b(self, module: str) -> Floats:
        matrix = np.zeros((self._modules[module][0], self.lora.rank), np.float32)
        if module in self._adapter.pairs:
            theirs = self._matrices(module)[1]
            matrix[:, : theirs.shape[1]] = theirs
        return matrix

    def _matrices(self, module: str) -> tuple[Floats, Floats]:
        return self._adapter.matrices(module, unit=ALPHA / self._adapter.rank)

    def _check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        pairs, rank = self._adapter.pairs, self._adapter.rank
        if not pairs or not 1 <= rank <= MAX_RANK:
            problem = f"has rank {rank}, and ranks go from 1 to {MAX_RANK}" if pairs else "holds no matrices"
            raise InvalidInputError(f"The adapter {problem}. Import another one.", field="adapter")
        for module, pair in pairs.items():
            if module not in shapes:
                raise InvalidInputError(
                    f"The adapter changes {module}, which cannot be trained here or is not in the base. Import one for "
                    f"{', '.join(kind for group in _GROUPS for kind in group)} of the layers that the base has.",
                    field="adapter",
                )
            if pair.shape != shapes[module]:
                raise InvalidInputError(
                    f"The adapter changes {module} as a matrix of {list(pair.shape)}, but it is {list(shapes[module])} "
                    "in the base. Name the model that the adapter was trained on.",
                    field="base_model",
                )
            self._matrices(module)  # what is infinite, or becomes so, is said before anything is written


def _tensor(shape: tuple[int, int], made: Callable[[], Floats]) -> NewTensor:
    def blocks() -> Iterator[bytes]:
        yield np.ascontiguousarray(made(), "<f4").tobytes()

    return NewTensor("F32", shape, 4 * shape[0] * shape[1], blocks)


def _first_a(rank: int, num_in: int, seed: int) -> Floats:
    bound = 1 / np.sqrt(num_in)
    return np.random.default_rng(seed % 2**64).uniform(-bound, bound, (rank, num_in)).astype(np.float32)


def _shapes(base: BaseModel) -> dict[str, tuple[int, int]]:
    """Every matrix that can be adapted, by its module, as [out, in]."""
    found: dict[str, tuple[int, int]] = {}
    for name, tensor in base.tensors.items():
        module = name.removesuffix(".weight")
        layer = _LAYER.fullmatch(module)
        if layer is not None and layer[1] in (*ATTENTION, *MLP):
            found[module] = (tensor.shape[0], tensor.shape[1])
    head = base.weight(UNEMBED)
    return found if head is None else {**found, UNEMBED: (head.shape[0], head.shape[1])}


def _kind(module: str) -> str:
    return module.rpartition(".")[2]
