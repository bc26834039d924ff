"""A model with its adapter merged in as one file for llama.cpp. The library `gguf` knows the format and the names.

Numbers stay in the format of the base, but norms and biases, which llama.cpp wants in float32, are widened. Weights go
through memory in blocks, as everywhere here; the library writes only what is before them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from tinsmith.errors import InvalidInputError, MissingExtraError
from tinsmith.export.adapter import HEAD, Adapter
from tinsmith.export.base import BaseModel
from tinsmith.export.card import Learned, Story, gguf_card
from tinsmith.export.files import NewFile
from tinsmith.export.gguf_model import ARCHITECTURES, Shape, add_model, rope_divisors
from tinsmith.export.gguf_vocab import add_vocab
from tinsmith.export.merge import merged_tensors
from tinsmith.export.numbers import SIZES, from_floats, to_floats
from tinsmith.export.tensor_files import NewTensor

_ALIGNMENT = 32
_ROPE_DIVISORS = "rope_freqs.weight"
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
_HALVES = re.compile(r".*\.([qk])_proj\.(?:weight|bias)")
_NOT_IN_NAMES = re.compile(r"[^\w.-]+", re.ASCII)
_LEGAL = ("LICENSE", "NOTICE")


def gguf_files(adapter: Adapter, base: BaseModel, story: Story) -> list[NewFile]:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("gguf", "gguf", "Exporting to GGUF") from error
    shape = Shape.of(base.config)
    tensors = _tensors(adapter, base, shape)
    dtype = tensors["token_embd.weight"].dtype
    head = _head(tensors, base, shape, dtype, story)
    size = len(head) + sum(_padded(tensor.num_bytes) for tensor in tensors.values())
    name = _file_name(story, dtype)
    legal = [each for each in base.companions() if each.name.startswith(_LEGAL)]
    return [
        *(NewFile.copy(each.as_posix(), base.folder / each) for each in legal),
        gguf_card(Learned.of(adapter), story, name),
        NewFile(name, size, partial(_content, head, tensors)),
    ]


def _file_name(story: Story, dtype: str) -> str:
    parts = (story.base_model.rstrip("/").rpartition("/")[2], story.origin.rpartition("/")[2], dtype)
    return f"{_NOT_IN_NAMES.sub('-', '-'.join(parts))}.gguf"


# --- weights ---------------------------------------------------------------------------------------------------------


def _tensors(adapter: Adapter, base: BaseModel, shape: Shape) -> dict[str, NewTensor]:
    """By the names of llama.cpp. An output matrix that is the embedding is left out, for there it is found so."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH[ARCHITECTURES[shape.family]], shape.num_layers)
    found: dict[str, NewTensor] = {}
    if (divisors := rope_divisors(shape)) is not None:
        data = divisors.tobytes()
        found[_ROPE_DIVISORS] = NewTensor("F32", divisors.shape, len(data), lambda: iter((data,)))
    for shard in merged_tensors(adapter, base).values():
        for name, tensor in shard.items():
            if name == f"{HEAD}.weight" and base.is_tied and not adapter.changes_head:
                continue
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if known is None or tensor.dtype not in SIZES:
                raise InvalidInputError(
                    f"The base {base.name} has {name} in {tensor.dtype}, which has no place in a GGUF file of "
                    f"{shape.family}. Export with --to merged instead.",
                    field="base",
                )
            found[known] = _as_llama_cpp_wants(name, tensor, shape)
    return found


def _as_llama_cpp_wants(name: str, tensor: NewTensor, shape: Shape) -> NewTensor:
    if len(tensor.shape) == 1 and tensor.dtype != "F32":
        size = tensor.num_bytes // SIZES[tensor.dtype] * SIZES["F32"]
        tensor = NewTensor("F32", tensor.shape, size, partial(_widened, tensor))
    found = _HALVES.fullmatch(name) if shape.turns_pairs else None
    if found is None:
        return tensor
    num_heads = shape.num_heads if found[1] == "q" else shape.num_kv_heads
    return tensor._replace(blocks=partial(_as_neighbours, tensor, num_heads))


def _widened(tensor: NewTensor) -> Iterator[bytes]:
    for block in tensor.blocks():
        yield from_floats(to_floats(block, tensor.dtype), "F32")


def _as_neighbours(tensor: NewTensor, num_heads: int) -> Iterator[bytes]:
    """Rows of a head that rotate together lie half a head apart in published weights, and side by side here."""
    row_bytes = tensor.num_bytes // tensor.shape[0]
    half = tensor.shape[0] // num_heads // 2
    head_bytes = 2 * half * row_bytes
    rest = b""
    for block in tensor.blocks():
        rest += block
        end = len(rest) // head_bytes * head_bytes
        heads = np.frombuffer(rest[:end], np.uint8).reshape(-1, 2, half, row_bytes)
        yield heads.swapaxes(1, 2).tobytes()
        rest = rest[end:]


# --- the file --------------------------------------------------------------------------------------------------------


def _head(tensors: Mapping[str, NewTensor], base: BaseModel, shape: Shape, dtype: str, story: Story) -> bytes:
    """All that is before the weights."""
    import gguf

    architecture = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[ARCHITECTURES[shape.family]]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "head"
        writer = gguf.GGUFWriter(file, architecture)
        writer.add_type("model")
        writer.add_name(f"{story.base_model}, fine-tuned")
        writer.add_description(story.origin)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_model(writer, shape)
        add_vocab(writer, base, base.config["vocab_size"])
        for name, tensor in tensors.items():
            kind = gguf.GGMLQuantizationType[tensor.dtype]
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        head = file.read_bytes()
    return head.ljust(_padded(len(head)), b"\0")


def _content(head: bytes, tensors: Mapping[str, NewTensor]) -> Iterator[bytes]:
    yield head
    for tensor in tensors.values():
        yield from tensor.blocks()
        yield bytes(_padded(tensor.num_bytes) - tensor.num_bytes)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
