"""Protobuf in and out, for both ends: the only place where shared types and `tinker.proto` meet.

A client sends `ForwardBackwardRequest` and receives `ForwardBackwardOutput` and `SampleResponse`; a server the other
way round. Whatever is wrong with received bytes is an `InvalidInputError` that names the field.

Arrays are decoded without a copy where the wire has the right width: the results are read-only views of the body.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from google.protobuf.message import DecodeError, Message

from tinsmith.errors import InvalidInputError
from tinsmith.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ImageChunk,
    LossFnOutput,
    LossFnType,
    ModelInput,
    ModelInputChunk,
    PromptAltTokens,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    StopReason,
    TensorData,
    TensorDtype,
    TopkLogprobs,
)
from tinsmith.types.inputs import ImageFormat
from tinsmith.types.tensors import Array
from tinsmith.types.training import check_loss_fn
from tinsmith.wire import tinker_pb2 as pb
from tinsmith.wire.zstd import OpenFrame, open_frame

# --- a training request, to the server --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreparedBody:
    """The body of a `forward_backward` request, complete but for the model's id and the operation's number.

    All the work is done when this exists: a protobuf message may be cut between any two fields, so the examples are
    encoded (and compressed) before it is known which number they will have. `finish` only adds a few bytes, and puts
    them first, where official clients have them: a server that refuses a body for its size knows its number by them.
    """

    _rest: bytes | OpenFrame = field(repr=False)

    @property
    def content_encoding(self) -> Literal["zstd"] | None:
        """The value of the `Content-Encoding` header, if there is to be one."""
        return "zstd" if isinstance(self._rest, OpenFrame) else None

    def finish(self, model_id: str, seq_id: int) -> bytes:
        """The bytes to send. May be called again, with another number too."""
        ids = _serialized(pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id))
        return self._rest.closed(ids) if isinstance(self._rest, OpenFrame) else ids + self._rest


PAUSE_EVERY_SECONDS = 1e-3


def let_others_run() -> None:
    """Give the interpreter lock away.

    Sleeping for no time at all would not do: the thread that waits for the lock needs some microseconds to wake up, and
    would often find it taken again.
    """
    time.sleep(50e-6)


def prepare_forward_backward(
    data: Sequence[Datum],
    loss_fn: LossFnType,
    loss_fn_config: Mapping[str, float | str] | None = None,
    *,
    forward_only: bool = False,
    compress: bool = False,
    pause: Callable[[], None] = let_others_run,
) -> PreparedBody:
    """Encode a request, all but its number. Meant for a worker thread: every millisecond or so it calls `pause`.

    `compress` needs the extra `zstd`; ask `tinsmith.wire.zstd.can_compress` first.
    """
    examples = ForwardBackwardInput(list(data), loss_fn, loss_fn_config)
    pieces = _pieces(examples, forward_only, pause)
    return PreparedBody(open_frame(pieces) if compress else b"".join(pieces))


Piece: TypeAlias = bytes | memoryview
"""A run of bytes of a message; a view where the bytes are those of a tensor, which are not copied until the end."""


def _pieces(examples: ForwardBackwardInput, forward_only: bool, pause: Callable[[], None]) -> Iterator[Piece]:
    """What makes up the message when put together; no piece is larger than one chunk or tensor."""
    yield _serialized(_settings(examples, forward_only))
    resumed = time.perf_counter()
    for index, datum in enumerate(examples.data):
        try:
            yield from _framed(pb.ForwardBackwardRequest.DATA_FIELD_NUMBER, *_parts(datum))
        except ValueError as error:
            raise _inside(f"data[{index}]", error) from None
        # Python switches threads every 5 ms only: too seldom for an event loop next door.
        if time.perf_counter() - resumed > PAUSE_EVERY_SECONDS:
            pause()
            resumed = time.perf_counter()


def _framed(field_number: int, *content: Piece) -> list[Piece]:
    """A field that holds these pieces, one after the other."""
    return [_head(field_number, sum(map(len, content))), *content]


@lru_cache(maxsize=4096)  # examples of a batch are often of the same length
def _head(field_number: int, size: int) -> bytes:
    """What comes before the bytes of a field: its number, and how many they are."""
    head = bytearray([field_number << 3 | 2])
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)


def _parts(datum: Datum) -> Iterator[Piece]:
    """Messages that parse as one datum when put together: protobuf appends repeated fields."""
    for chunk in datum.model_input.chunks:
        yield from _framed(pb.Datum.MODEL_INPUT_FIELD_NUMBER, *_chunk_pieces(chunk))
    for name, tensor in datum.loss_fn_inputs.items():
        key, value = _framed(1, name.encode()), _framed(2, *_tensor_pieces(tensor))  # as every map in protobuf
        yield from _framed(pb.Datum.LOSS_FN_INPUTS_FIELD_NUMBER, *key, *value)
    if datum.model_input_spans is not None or datum.loss_fn_input_spans is not None:
        yield _serialized(_provenance(datum))


def _chunk_pieces(chunk: ModelInputChunk) -> list[Piece]:
    if isinstance(chunk, EncodedTextChunk):
        tokens = _framed(pb.EncodedTextChunk.TOKENS_FIELD_NUMBER, chunk.packed)
        return _framed(pb.Chunk.ENCODED_TEXT_FIELD_NUMBER, *tokens)
    message = pb.Chunk()
    _write_chunk(message, chunk)
    return [_serialized(message)]


def _tensor_pieces(tensor: TensorData) -> list[Piece]:
    message = pb.Tensor()
    if tensor.csr is not None:
        _write_tensor(message, tensor)
        return [_serialized(message)]
    _write_type(message, tensor)
    values = tensor.values.astype(_STORED[message.dtype], order="C", copy=False).reshape(-1)
    return [_serialized(message), *_framed(pb.Tensor.DENSE_FIELD_NUMBER, values.view(np.uint8).data)]


def _provenance(datum: Datum) -> pb.Datum:
    message = pb.Datum()
    for span in datum.model_input_spans or ():
        _write_span(message.model_input_spans.add(), span)
    for span in datum.loss_fn_input_spans or ():
        _write_span(message.loss_fn_input_spans.add(), span)
    return message


def _settings(examples: ForwardBackwardInput, forward_only: bool) -> pb.ForwardBackwardRequest:
    request = pb.ForwardBackwardRequest(loss_fn=examples.loss_fn, forward_only=forward_only)
    for name, value in (examples.loss_fn_config or {}).items():
        if isinstance(value, str):
            request.loss_fn_config_v2[name].text = value
        else:
            # Twice, because older servers read the first map and newer ones the second.
            request.loss_fn_config[name] = request.loss_fn_config_v2[name].number = value
    return request


def _write_chunk(message: pb.Chunk, chunk: ModelInputChunk) -> None:
    if isinstance(chunk, ImageChunk):
        message.image.data = chunk.data
        message.image.format = chunk.format
        if chunk.expected_tokens is not None:
            message.image.expected_tokens = chunk.expected_tokens
    elif isinstance(chunk, DmelChunk):
        message.dmel.dmel = chunk.dmel
    else:
        raise InvalidInputError(
            f"A training example cannot hold an {type(chunk).__name__}, only sampling takes those. "
            "Read the image and pass an ImageChunk with its bytes.",
            field="model_input",
            value=chunk,
        )


def _write_tensor(message: pb.Tensor, tensor: TensorData) -> None:
    values, csr, dtype = tensor.values, tensor.csr, _DTYPES[tensor.dtype]
    _write_type(message, tensor)
    if csr is None:
        message.dense = _packed(values, dtype)
    else:
        message.sparse_csr.values = _packed(values, dtype)
        message.sparse_csr.crow_indices = _packed(csr.crow, pb.DTYPE_INT64)
        message.sparse_csr.col_indices = _packed(csr.col, pb.DTYPE_INT64)


def _write_type(message: pb.Tensor, tensor: TensorData) -> None:
    message.dtype = _DTYPES[tensor.dtype]
    if tensor.shape is not None or tensor.values.ndim > 1:
        message.shape.extend(tensor.values.shape if tensor.shape is None else tensor.shape)


def _write_span(message: pb.ProvenanceSpan, span: PromptProvenanceSpan | SampledProvenanceSpan) -> None:
    arm = message.sampled_tokens if isinstance(span, SampledProvenanceSpan) else message.prompt_tokens
    arm.sequence_id, arm.offset, arm.length = span.sequence_id, span.offset, span.length


# --- a training request, at the server --------------------------------------------------------------------------------


class TrainingRequest(NamedTuple):
    """A decoded `forward_backward` request."""

    input: ForwardBackwardInput
    model_id: str
    seq_id: int
    forward_only: bool


def decode_forward_backward_request(body: bytes) -> TrainingRequest:
    """Everything in it is checked but what only a model can know, such as the size of its vocabulary."""
    message = _parsed(pb.ForwardBackwardRequest(), body)
    if not message.model_id:
        raise _malformed("model_id", "is missing")
    if message.seq_id < 1:
        raise _malformed("seq_id", f"is {message.seq_id}, but numbers begin at 1")
    data = [_read_datum(f"data[{index}]", datum) for index, datum in enumerate(message.data)]
    examples = ForwardBackwardInput(data, check_loss_fn(message.loss_fn), _read_config(message) or None)
    return TrainingRequest(examples, message.model_id, message.seq_id, message.forward_only)


def decode_forward_backward_ids(body: bytes) -> tuple[str, int]:
    """The model's id and the operation's number, of a request that may be wrong in everything else."""
    message = _parsed(pb.ForwardBackwardRequest(), body)
    return message.model_id, message.seq_id


def _read_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise _malformed(f"loss_fn_config_v2[{name!r}]", "has neither a number nor a text")
        config[name] = getattr(value, kind)
    return config


def _read_datum(where: str, message: pb.Datum) -> Datum:
    try:
        return Datum(
            model_input=ModelInput(
                chunks=[_read_chunk(f"model_input[{index}]", chunk) for index, chunk in enumerate(message.model_input)]
            ),
            loss_fn_inputs={
                name: _read_tensor(f"loss_fn_inputs[{name!r}]", tensor)
                for name, tensor in sorted(message.loss_fn_inputs.items())
            },
            **_read_provenance(message),
        )
    except InvalidInputError as error:
        raise _inside(where, error) from None


def _read_provenance(message: pb.Datum) -> dict[str, ProvenanceSpans]:
    spans = {
        name: [_read_span(f"{name}[{index}]", span) for index, span in enumerate(getattr(message, name))]
        for name in ("model_input_spans", "loss_fn_input_spans")
    }
    return spans if any(spans.values()) else {}


def _read_chunk(where: str, message: pb.Chunk) -> ModelInputChunk:
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        tokens = _read_array(f"{where}.tokens", message.encoded_text.tokens, pb.DTYPE_INT32)
        return EncodedTextChunk(tokens=tokens.tolist())
    if kind == "image":
        image = message.image
        expected = image.expected_tokens if image.HasField("expected_tokens") else None
        return ImageChunk(data=image.data, format=cast("ImageFormat", image.format), expected_tokens=expected)
    if kind == "dmel":
        return DmelChunk(dmel=message.dmel.dmel)
    raise _malformed(where, "is no kind of chunk this version knows")


def _read_span(where: str, message: pb.ProvenanceSpan) -> PromptProvenanceSpan | SampledProvenanceSpan:
    kind = message.WhichOneof("span")
    if kind is None:
        raise _malformed(where, "is neither a prompt span nor a sampled span")
    span = getattr(message, kind)
    record = SampledProvenanceSpan if kind == "sampled_tokens" else PromptProvenanceSpan
    return record(sequence_id=span.sequence_id, offset=span.offset, length=span.length)


# --- a training result ------------------------------------------------------------------------------------------------

_MAX_DATUMS = 1_000_000
"""No request holds nearly as many; without a bound, a few bytes could claim any number of results."""

Layout: TypeAlias = tuple[tuple[str, pb.DType, tuple[int, ...]], ...]
"""What the datums of one record share: the names, types and trailing shapes of their fields."""


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """Sparse tensors become dense and scalars become `[1]`: this message knows nothing else."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    datums = [_dense(datum) for datum in output.loss_fn_outputs]
    if len({frozenset(datum) for datum in datums}) > 1:
        raise InvalidInputError("All of loss_fn_outputs must have the same names.", field="loss_fn_outputs")
    for layout, group in groupby(datums, key=_layout):
        record = message.loss_fn_outputs.add(type_tag=output.loss_fn_output_type)
        _write_record(record, layout, list(group))
    return _serialized(message)


def _dense(datum: LossFnOutput) -> dict[str, Array]:
    return {name: tensor.values if tensor.csr is None else tensor.to_numpy() for name, tensor in sorted(datum.items())}


def _layout(datum: Mapping[str, Array]) -> Layout:
    return tuple(
        (name, pb.DTYPE_FLOAT32 if values.dtype.kind == "f" else pb.DTYPE_INT64, values.shape[1:])
        for name, values in datum.items()
    )


def _write_record(record: pb.ArrayRecord, layout: Layout, datums: Sequence[Mapping[str, Array]]) -> None:
    record.num_datums = len(datums)
    for name, dtype, trailing_shape in layout:
        batch = record.fields[name]
        batch.dtype = dtype
        batch.trailing_shape.extend(trailing_shape)
        arrays = [_packed(datum[name], dtype) for datum in datums]
        batch.data = b"".join(arrays)
        batch.offsets = _packed(np.cumsum([0, *map(len, arrays)]), pb.DTYPE_INT64)


def decode_forward_backward_output(body: bytes) -> ForwardBackwardOutput:
    """Datums in their order, whatever records the server put them in."""
    message = _parsed(pb.ForwardBackwardOutput(), body)
    counts = [record.num_datums for record in message.loss_fn_outputs]
    if min(counts, default=0) < 0 or sum(counts) > _MAX_DATUMS:
        raise _malformed("loss_fn_outputs", f"claims {counts[:8]} datums: 0 or more are legal, up to {_MAX_DATUMS:,}")
    outputs: list[LossFnOutput] = []
    for index, record in enumerate(message.loss_fn_outputs):
        outputs.extend(_read_record(f"loss_fn_outputs[{index}]", record))
    # Servers name a Python class, with or without its module.
    name = message.loss_fn_output_type.rpartition(":")[2] or "ArrayRecord"
    return ForwardBackwardOutput(name, outputs, dict(message.metrics))


def _read_record(where: str, record: pb.ArrayRecord) -> Iterable[LossFnOutput]:
    columns = {name: _read_batched(f"{where}.fields[{name!r}]", batch) for name, batch in sorted(record.fields.items())}
    count = record.num_datums or next(map(len, columns.values()), 0)
    for name, column in columns.items():
        if len(column) != count:
            raise _malformed(f"{where}.fields[{name!r}]", f"has {len(column)} datums instead of {count}")
    if not columns:
        return ({} for _ in range(count))
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _read_batched(where: str, batch: pb.BatchedTensor) -> list[TensorData]:
    values = _read_array(f"{where}.data", batch.data, batch.dtype)
    trailing = _read_shape(f"{where}.trailing_shape", batch.trailing_shape)
    ends = _read_ends(f"{where}.offsets", batch, len(values), math.prod(trailing))
    row_values = math.prod(trailing) or 1
    return [
        TensorData.from_parts(values[start:end], [(end - start) // row_values, *trailing])
        for start, end in pairwise(ends)
    ]


def _read_ends(where: str, batch: pb.BatchedTensor, num_values: int, row_values: int) -> list[int]:
    """Where each datum ends among the values, after a 0 for the start. On the wire these are bytes."""
    offsets = _read_array(where, batch.offsets, pb.DTYPE_INT64)
    itemsize = _STORED[batch.dtype].itemsize
    steps = np.diff(offsets, prepend=0, append=num_values * itemsize)
    if (steps < 0).any() or steps[0] or (steps[-1] and num_values):
        raise _malformed(where, f"does not rise from 0 to {num_values * itemsize}, the length of the data")
    if num_values and (row_values == 0 or (steps % (row_values * itemsize)).any()):
        raise _malformed(where, f"does not cut the data into whole rows of {row_values * itemsize} bytes")
    return cast("list[int]", (offsets // itemsize).tolist())


# --- a sampling result ------------------------------------------------------------------------------------------------

_STOP_REASONS: Mapping[StopReason, pb.StopReason] = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
_STOP_REASON_NAMES = {number: name for name, number in _STOP_REASONS.items()}


def encode_sample_response(response: SampleResponse) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        _write_sequence(message.sequences.add(), sequence)
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = _packed(response.prompt_logprobs_np, pb.DTYPE_FLOAT32)
    if response.topk_prompt_logprobs_np is not None:
        _write_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs_np)
    if response.target_prompt_logprobs is not None:
        _write_tensor(message.target_prompt_logprobs, response.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        _write_tensor(message.prompt_alt_tokens.tokens, response.prompt_alt_tokens.tokens)
        _write_tensor(message.prompt_alt_tokens.logprobs, response.prompt_alt_tokens.logprobs)
    return _serialized(message)


def _write_sequence(message: pb.SampledSequence, sequence: SampledSequence) -> None:
    message.stop_reason = _STOP_REASONS[sequence.stop_reason]
    if sequence.tokens_np is not None:
        message.tokens = _packed(sequence.tokens_np, pb.DTYPE_INT32)
    if sequence.logprobs_np is not None:
        message.logprobs = _packed(sequence.logprobs_np, pb.DTYPE_FLOAT32)
    if sequence.topk_logprobs_np is not None:
        _write_topk(message.topk_sampled_logprobs, sequence.topk_logprobs_np)


def _write_topk(message: pb.TopkLogprobs, topk: TopkLogprobs) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = _packed(topk.token_ids, pb.DTYPE_INT32)
    message.logprobs = _packed(topk.logprobs, pb.DTYPE_FLOAT32)


def decode_sample_response(body: bytes, sequence_ids: Sequence[str] | None = None) -> SampleResponse:
    """`sequence_ids` are those announced when the request was accepted: one per sample, or `None` from old servers."""
    message = _parsed(pb.SampleResponse(), body)
    ids = [""] * len(message.sequences) if sequence_ids is None else sequence_ids
    if len(ids) != len(message.sequences):
        raise _malformed("sequences", f"holds {len(message.sequences)} samples, but {len(ids)} were announced")
    return SampleResponse(
        sequences=[
            _read_sequence(f"sequences[{index}]", sequence, sequence_id)
            for index, (sequence, sequence_id) in enumerate(zip(message.sequences, ids, strict=True))
        ],
        prompt_logprobs_np=_read_floats("prompt_logprobs", message.prompt_logprobs),
        topk_prompt_logprobs_np=_read_topk("topk_prompt_logprobs", message.topk_prompt_logprobs),
        target_prompt_logprobs=(
            _read_tensor("target_prompt_logprobs", message.target_prompt_logprobs)
            if message.HasField("target_prompt_logprobs")
            else None
        ),
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        prompt_alt_tokens=(
            _read_alt_tokens(message.prompt_alt_tokens) if message.HasField("prompt_alt_tokens") else None
        ),
    )


def _read_sequence(where: str, message: pb.SampledSequence, sequence_id: str) -> SampledSequence:
    if message.stop_reason not in _STOP_REASON_NAMES:
        raise _malformed(f"{where}.stop_reason", f"is {message.stop_reason}, which this version does not know")
    tokens = _read_stored(f"{where}.tokens", message.tokens, pb.DTYPE_INT32)
    logprobs = _read_floats(f"{where}.logprobs", message.logprobs)
    if logprobs is not None and len(logprobs) != len(tokens):
        raise _malformed(f"{where}.logprobs", f"has {len(logprobs)} values for {len(tokens)} tokens")
    topk = _read_topk(f"{where}.topk_sampled_logprobs", message.topk_sampled_logprobs)
    return SampledSequence(_STOP_REASON_NAMES[message.stop_reason], sequence_id, tokens, logprobs, topk)


def _read_floats(where: str, data: bytes) -> Array | None:
    return _read_stored(where, data, pb.DTYPE_FLOAT32) if data else None


def _read_topk(where: str, message: pb.TopkLogprobs) -> TopkLogprobs | None:
    """Nothing at all reads as an empty matrix, which means that none was asked for."""
    shape = (message.length, message.k)
    if 0 in shape:
        return None
    token_ids = _read_stored(f"{where}.token_ids", message.token_ids, pb.DTYPE_INT32)
    logprobs = _read_stored(f"{where}.logprobs", message.logprobs, pb.DTYPE_FLOAT32)
    if not len(token_ids) == len(logprobs) == math.prod(shape):
        found = f"{len(token_ids)} tokens and {len(logprobs)} logprobs"
        raise _malformed(where, f"has {found} for {message.length} positions of {message.k} each")
    return TopkLogprobs(token_ids.reshape(shape), logprobs.reshape(shape))


def _read_alt_tokens(message: pb.PromptAltTokens) -> PromptAltTokens:
    return PromptAltTokens(
        _read_tensor("prompt_alt_tokens.tokens", message.tokens),
        _read_tensor("prompt_alt_tokens.logprobs", message.logprobs),
    )


# --- arrays -----------------------------------------------------------------------------------------------------------

_STORED: Mapping[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}
"""How the values lie in the bytes. bfloat16 is the upper half of a float32, which numpy does not know."""

_DTYPES: Mapping[TensorDtype, pb.DType] = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}

_MAX_DIMENSIONS, _MAX_CELLS = 32, 2**48
"""Beyond these, numpy cannot even describe an empty array."""


def _packed(values: Array, dtype: pb.DType) -> bytes:
    return values.astype(_STORED[dtype], copy=False).tobytes()


def _read_tensor(where: str, message: pb.Tensor) -> TensorData:
    shape = _read_shape(f"{where}.shape", message.shape)
    if message.HasField("sparse_csr"):
        return _read_csr(where, message, shape)
    values = _read_array(f"{where}.dense", message.dense, message.dtype)
    if shape and math.prod(shape) != len(values):
        raise _malformed(f"{where}.dense", f"has {len(values)} values for the shape {shape}")
    return TensorData.from_parts(values, shape or None)


def _read_csr(where: str, message: pb.Tensor, shape: list[int]) -> TensorData:
    csr = message.sparse_csr
    values = _read_array(f"{where}.values", csr.values, message.dtype)
    crow = _read_array(f"{where}.crow_indices", csr.crow_indices, pb.DTYPE_INT64)
    col = _read_array(f"{where}.col_indices", csr.col_indices, pb.DTYPE_INT64)
    try:
        return TensorData(values, None, shape, crow, col)
    except InvalidInputError as error:
        raise _inside(where, error) from None


def _read_array(where: str, data: bytes, dtype: int) -> Array:
    """The values as float32 or int64."""
    stored = _read_stored(where, data, dtype)
    if dtype == pb.DTYPE_BFLOAT16:
        return (stored.astype("<u4") << 16).view("<f4")
    return stored.astype(np.int64) if dtype == pb.DTYPE_INT32 else stored


def _read_stored(where: str, data: bytes, dtype: int) -> Array:
    stored = _STORED.get(dtype)
    if stored is None:
        known = ", ".join(pb.DType.Name(number) for number in _STORED)
        raise _malformed(where, f"has the dtype number {dtype}; known are {known}")
    if len(data) % stored.itemsize:
        raise _malformed(where, f"has {len(data)} bytes, which is no multiple of {stored.itemsize}")
    return np.frombuffer(data, stored)


def _read_shape(where: str, shape: Iterable[int]) -> list[int]:
    lengths = list(shape)
    if any(length < 0 for length in lengths):
        raise _malformed(where, f"is {lengths}, but no length is negative")
    if len(lengths) > _MAX_DIMENSIONS or math.prod(filter(None, lengths)) > _MAX_CELLS:
        raise _malformed(where, f"is larger than any tensor: {len(lengths)} dimensions, beginning {lengths[:4]}")
    return lengths


# --- messages ---------------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=Message)


def _parsed(message: M, body: bytes) -> M:
    try:
        message.ParseFromString(body)
    except DecodeError:
        name = type(message).__name__
        raise InvalidInputError(f"This body of {len(body):,} bytes is not a protobuf {name}.", field=name) from None
    return message


def _serialized(message: Message) -> bytes:
    return cast("bytes", message.SerializeToString())


def _malformed(where: str, problem: str) -> InvalidInputError:
    return InvalidInputError(f"The protobuf body is malformed: {where} {problem}.", field=where)


def _inside(where: str, error: ValueError) -> InvalidInputError:
    """The same error, said of a part of something larger."""
    kind = type(error) if isinstance(error, InvalidInputError) else InvalidInputError
    return kind(f"{where}: {error}", field=where)
