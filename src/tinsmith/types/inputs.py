"""What goes into a model: chunks of tokens, images and audio, and the datum that training uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

import msgspec
from msgspec.structs import force_setattr

from tinsmith.errors import InvalidInputError, InvalidTypeError
from tinsmith.types._brief import brief
from tinsmith.types._codecs import Define
from tinsmith.types._model import Request, pass_for_dataclass
from tinsmith.types._packing import packed
from tinsmith.types._token_ids import TokenIds
from tinsmith.types.tensors import TensorData, TensorDtype, is_torch_tensor, to_wire_array

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Token ids travel as 32-bit integers."""

Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Seeds travel as 64-bit integers."""

ImageFormat: TypeAlias = Literal["png", "jpeg"]


class EncodedTextChunk(Request):
    """A run of token ids. They are read like a list, which they are equal to, and cannot be changed."""

    tokens: Sequence[TokenId]
    type: Literal["encoded_text"] = "encoded_text"

    def __post_init__(self) -> None:
        ids = TokenIds.of(self.tokens)
        if ids is None or self.type != "encoded_text":
            super().__post_init__()
            ids = TokenIds(packed(self.tokens, "i") or b"")
        force_setattr(self, "tokens", ids)

    def to_builtins(self, *, nulls: bool = False) -> dict[str, Any]:
        return {"tokens": list(self.tokens), "type": self.type}

    @property
    def packed(self) -> bytes:
        """The ids as they travel."""
        return cast("TokenIds", self.tokens).packed

    @property
    def length(self) -> int:
        return len(self.tokens)


class _Image(Request):
    """What both kinds of image share. The last three fields belong to older releases and are sent only if given."""

    format: ImageFormat

    expected_tokens: int | None = None
    """How many tokens the image stands for. The server counts for itself and may refuse another number."""

    height: int | None = None
    width: int | None = None
    tokens: int | None = None

    @property
    def length(self) -> int:
        known = self.tokens if self.expected_tokens is None else self.expected_tokens
        if known is None:
            raise InvalidInputError(
                f"The length of a {type(self).__name__} is known only if expected_tokens is set",
                field=f"{type(self).__name__}.expected_tokens",
            )
        return known


class ImageChunk(_Image):
    """An image by value. In JSON the bytes are base64 text, which is accepted here too."""

    data: bytes
    type: Literal["image"] = "image"


class ImageAssetPointerChunk(_Image):
    """An image by reference. Only sampling takes these."""

    location: str
    """A path or URL of the image."""

    type: Literal["image_asset_pointer"] = "image_asset_pointer"


class DmelChunk(Request):
    """Audio tokens, as a serialized tensor."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    @property
    def length(self) -> int:
        """The first dimension, read from the header."""
        return _first_dimension(self.dmel)


ModelInputChunk: TypeAlias = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk


class ModelInput(Request):
    """A sequence of chunks."""

    chunks: list[ModelInputChunk]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> Self:
        """One text chunk of these token ids; a list, tuple, range, numpy array or torch tensor."""
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def empty(cls) -> Self:
        return cls(chunks=[])

    def append(self, chunk: ModelInputChunk) -> Self:
        """A new input with one more chunk."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """A new input with one more token, in the last chunk if that is text."""
        added = EncodedTextChunk(tokens=[token])
        if not self.chunks or not isinstance(self.chunks[-1], EncodedTextChunk):
            return self.append(added)
        grown = copy(self.chunks[-1])
        force_setattr(grown, "tokens", TokenIds(grown.packed + added.packed))  # both were checked when they were made
        return type(self)(chunks=[*self.chunks[:-1], grown])

    def to_ints(self) -> list[int]:
        """All token ids. An input with anything but text has none."""
        texts = [chunk.tokens for chunk in self.chunks if isinstance(chunk, EncodedTextChunk)]
        if len(texts) < len(self.chunks):
            kinds = ", ".join(sorted({chunk.type for chunk in self.chunks}))
            raise InvalidInputError(f"Only a text input can be turned into token ids; this one has {kinds}")
        return list(chain.from_iterable(texts))

    @property
    def length(self) -> int:
        """How much context this input takes."""
        return sum(chunk.length for chunk in self.chunks)


class _ProvenanceSpan(Request):
    sequence_id: Annotated[str, msgspec.Meta(min_length=1)]
    """`SampledSequence.sequence_id` of the sample these tokens come from."""

    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    length: Annotated[int, msgspec.Meta(ge=0)]


pass_for_dataclass(_ProvenanceSpan)


class PromptProvenanceSpan(_ProvenanceSpan):
    """A run of tokens that were part of a sample's prompt, from `offset` on."""


class SampledProvenanceSpan(_ProvenanceSpan):
    """A run of tokens that were generated as part of a sample, from `offset` on."""


ProvenanceSpans: TypeAlias = list[PromptProvenanceSpan | SampledProvenanceSpan]
"""Runs that together cover one field of a datum, in order; see `Datum.with_provenance`."""

LossFnInputs: TypeAlias = dict[str, TensorData]

_LIST_DTYPES: Mapping[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
"""What a plain list under these names holds. Under any other name, integers are int64 and floats float32."""

_SPARSE_IF_SMALLER = frozenset({"target_tokens", "weights"})


class Datum(Request, kw_only=False):
    """One training example: an input, and the tensors that the loss function reads.

    The values of `loss_fn_inputs` may be lists, numpy arrays, torch tensors or `TensorData`; they are converted once,
    here. NaN and infinity are refused.
    """

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = msgspec.field(default_factory=dict)
    model_input_spans: ProvenanceSpans | None = None
    """Where the input tokens come from; see `with_provenance`."""

    loss_fn_input_spans: ProvenanceSpans | None = None
    """Where the target tokens come from; see `with_provenance`."""

    def __post_init__(self) -> None:
        force_setattr(self, "model_input", _model_input(self.model_input))
        force_setattr(self, "loss_fn_inputs", _loss_fn_inputs(self.loss_fn_inputs))
        _check_spans("model_input_spans", self.model_input_spans)
        _check_spans("loss_fn_input_spans", self.loss_fn_input_spans)
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise InvalidInputError("Provenance comes as a pair: give both span lists or neither")

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> Self:
        """A copy that says which samples its tokens come from.

        The spans of `model_input` cover the input tokens, those of `loss_fn_inputs` cover `target_tokens`, each
        completely and in order.
        """
        _check_cover("model_input", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and targets.shape is not None and len(targets.shape) == 1:
            _check_cover("loss_fn_inputs", loss_fn_inputs, targets.shape[0])
        return msgspec.structs.replace(self, model_input_spans=model_input, loss_fn_input_spans=loss_fn_inputs)

    def to_builtins(self, *, nulls: bool = False) -> dict[str, Any]:
        if self.model_input_spans is not None:
            raise InvalidInputError(
                "Provenance spans have no form in JSON; they need a server that takes protobuf",
                field="Datum.model_input_spans",
            )
        tensors = {key: tensor.to_builtins(nulls=nulls) for key, tensor in self.loss_fn_inputs.items()}
        return {"loss_fn_inputs": tensors, "model_input": self.model_input.to_builtins(nulls=nulls)}

    @classmethod
    def json_schema(cls, define: Define) -> dict[str, Any]:
        return {
            "title": cls.__name__,
            "type": "object",
            "properties": {
                "loss_fn_inputs": {"type": "object", "additionalProperties": define(TensorData)},
                "model_input": define(ModelInput),
            },
            "required": ["loss_fn_inputs", "model_input"],
            "additionalProperties": False,
        }


def _model_input(value: object) -> ModelInput:
    if isinstance(value, ModelInput):
        return value
    if isinstance(value, Mapping):
        return ModelInput.from_builtins(value)
    raise InvalidTypeError(
        f"Datum.model_input must be a ModelInput, not {brief(value)}. For token ids, use ModelInput.from_ints(...)",
        field="Datum.model_input",
        value=value,
    )


def _loss_fn_inputs(values: object) -> LossFnInputs:
    if not isinstance(values, Mapping):
        raise InvalidTypeError(
            f"Datum.loss_fn_inputs must be a dict of tensors, not {brief(values)}",
            field="Datum.loss_fn_inputs",
            value=values,
        )
    return {key: _loss_fn_input(key, value) for key, value in values.items()}


def _loss_fn_input(key: object, value: Any) -> TensorData:
    if not isinstance(key, str):
        raise InvalidTypeError(
            f"The keys of Datum.loss_fn_inputs are names such as 'target_tokens', not {brief(key)}",
            field="Datum.loss_fn_inputs",
            value=key,
        )
    where = f"loss_fn_inputs[{key!r}]"
    try:
        tensor = _tensor(key, value)
    except InvalidInputError as error:
        raise type(error)(f"{where}: {error.message}", field=where, value=value) from None
    if not tensor.is_finite():
        raise InvalidInputError(
            f"{where} holds NaN or infinity, which no loss can use. Give such positions a finite value and no weight",
            field=where,
            value=tensor,
        )
    return tensor


def _tensor(key: str, value: Any) -> TensorData:
    if isinstance(value, TensorData):
        return value
    if is_torch_tensor(value):
        sparse = key in _SPARSE_IF_SMALLER and value.ndim == 2
        return TensorData.from_torch_sparse(value) if sparse else TensorData.from_torch(value)
    if isinstance(value, Mapping):
        return TensorData.from_builtins(value)
    if hasattr(value, "dtype"):
        return TensorData.from_numpy(value)
    if isinstance(value, str | bytes) or value is None:
        raise InvalidTypeError(f"a tensor or a list of numbers is needed, not {brief(value)}")
    values = to_wire_array(value, _LIST_DTYPES.get(key))
    return TensorData.from_parts(values, values.shape)


def _check_spans(name: str, spans: object) -> None:
    if spans is None:
        return
    if isinstance(spans, list | tuple) and all(isinstance(span, _ProvenanceSpan) for span in spans):
        return
    raise InvalidTypeError(
        f"Datum.{name} must be a list of PromptProvenanceSpan and SampledProvenanceSpan, not {brief(spans)}",
        field=f"Datum.{name}",
        value=spans,
    )


def _check_cover(name: str, spans: ProvenanceSpans, length: int) -> None:
    _check_spans(f"{name} spans", spans)
    covered = sum(span.length for span in spans)
    if covered != length:
        raise InvalidInputError(
            f"The {name} spans cover {covered} positions, but there are {length}; they must cover all of them exactly",
            field=name,
            value=spans,
        )


def _first_dimension(data: bytes) -> int:
    """A header is: an optional byte 254, a byte for the dtype (0 to 7), the number of dimensions, the dimensions."""
    start = 1 if data[:1] == b"\xfe" else 0
    if data[start : start + 1] not in (bytes([kind]) for kind in range(8)):
        raise InvalidInputError("DmelChunk.dmel does not start with the header of a tensor", field="DmelChunk.dmel")
    count, position = _varint(data, start + 1)
    shape = []
    for _ in range(count):
        length, position = _varint(data, position)
        shape.append(length)
    if not shape:
        raise InvalidInputError("DmelChunk.dmel holds a scalar, which has no length", field="DmelChunk.dmel")
    return shape[0]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number in groups of seven bits, lowest first; the high bit of a byte says that more follow."""
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise InvalidInputError("DmelChunk.dmel ends inside its header", field="DmelChunk.dmel")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise InvalidInputError("DmelChunk.dmel has a number of more than 63 bits in its header", field="DmelChunk.dmel")
