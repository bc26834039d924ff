"""Random values of the types that travel as protobuf."""

import math

import numpy as np
from hypothesis import strategies as st

from tinsmith import types

NAMES = st.text(min_size=1, max_size=8)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
INT64S = st.integers(-(2**63), 2**63 - 1)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=12)


def _dense(shape: tuple[int, ...], floating: bool) -> st.SearchStrategy[types.TensorData]:
    size = math.prod(shape)
    values = st.lists(FLOATS if floating else INT64S, min_size=size, max_size=size)
    dtype = np.float32 if floating else np.int64
    return values.map(lambda numbers: types.TensorData.from_numpy(np.array(numbers, dtype=dtype).reshape(shape)))


def dense_tensors(max_dimensions: int = 3) -> st.SearchStrategy[types.TensorData]:
    shapes = st.lists(st.integers(0, 4), min_size=1, max_size=max_dimensions).map(tuple)
    return st.tuples(shapes, st.booleans()).flatmap(lambda layout: _dense(*layout))


@st.composite
def sparse_tensors(draw: st.DrawFn) -> types.TensorData:
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    cells = [draw(st.lists(st.integers(0, columns - 1), unique=True).map(sorted)) for _ in range(rows)]
    col = [column for row in cells for column in row]
    crow = np.cumsum([0, *map(len, cells)])
    values = draw(st.lists(INT64S, min_size=len(col), max_size=len(col)))
    return types.TensorData(np.array(values, dtype=np.int64), "int64", [rows, columns], crow, np.array(col, dtype=int))


CHUNKS = st.one_of(
    st.builds(types.EncodedTextChunk, tokens=TOKENS),
    st.builds(
        types.ImageChunk,
        data=st.binary(max_size=9),
        format=st.sampled_from(["png", "jpeg"]),
        expected_tokens=st.none() | st.integers(0, 2**31 - 1),
    ),
    st.builds(types.DmelChunk, dmel=st.binary(max_size=9)),
)

SPANS = st.lists(
    st.builds(
        lambda kind, **fields: kind(**fields),
        st.sampled_from([types.PromptProvenanceSpan, types.SampledProvenanceSpan]),
        sequence_id=NAMES,
        offset=st.integers(0, 2**40),
        length=st.integers(0, 2**40),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def datums(draw: st.DrawFn) -> types.Datum:
    tensors = st.dictionaries(NAMES, dense_tensors() | sparse_tensors(), max_size=3)
    spans = draw(st.none() | st.tuples(SPANS, SPANS)) or (None, None)
    model_input = types.ModelInput(chunks=draw(st.lists(CHUNKS, max_size=3)))
    return types.Datum(model_input, draw(tensors), *spans)


LOSSES = st.sampled_from(["cross_entropy", "ppo", "custom"])
LOSS_CONFIGS = st.none() | st.dictionaries(
    NAMES, st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5), min_size=1, max_size=3
)
MODEL_IDS = st.text(min_size=1, max_size=20)
SEQ_IDS = st.integers(1, 2**31 - 1)


@st.composite
def outputs(draw: st.DrawFn) -> types.ForwardBackwardOutput:
    names = draw(st.lists(NAMES, unique=True, max_size=3))
    datum = st.fixed_dictionaries({name: dense_tensors().filter(_has_rows_to_count) for name in names})
    return types.ForwardBackwardOutput(
        draw(st.from_regex(r"[A-Za-z]{1,9}", fullmatch=True)),
        draw(st.lists(datum, max_size=4)),
        draw(st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=3)),
    )


def _has_rows_to_count(tensor: types.TensorData) -> bool:
    """How many rows of nothing there are cannot be said in this message."""
    return 0 not in tensor.values.shape[1:]


def arrays(dtype: type, length: int, values: st.SearchStrategy) -> st.SearchStrategy[np.ndarray]:
    return st.lists(values, min_size=length, max_size=length).map(lambda numbers: np.array(numbers, dtype=dtype))


LOGPROBS = st.floats(-100, 0, width=32) | st.just(math.nan)
INT32S = st.integers(-(2**31), 2**31 - 1)


@st.composite
def topks(draw: st.DrawFn, length: int) -> types.TopkLogprobs | None:
    k = draw(st.integers(0, 3))
    if 0 in (k, length):
        return None
    cells = draw(
        st.lists(
            st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)) | st.just((0, -99999.0)),
            min_size=length * k,
            max_size=length * k,
        )
    )
    token_ids, logprobs = zip(*cells, strict=True)
    shape = (length, k)
    return types.TopkLogprobs(
        np.array(token_ids, dtype=np.int32).reshape(shape), np.array(logprobs, dtype=np.float32).reshape(shape)
    )


@st.composite
def sequences(draw: st.DrawFn) -> types.SampledSequence:
    length = draw(st.integers(0, 5))
    logprobs = draw(st.none() | arrays(np.float32, length, LOGPROBS)) if length else None
    return types.SampledSequence(
        draw(st.sampled_from(["stop", "length"])),
        "",
        draw(arrays(np.int32, length, INT32S)),
        logprobs,
        draw(topks(length)),
    )


@st.composite
def samples(draw: st.DrawFn) -> types.SampleResponse:
    length = draw(st.integers(1, 5))
    matrix = st.tuples(st.integers(0, 3), st.integers(1, 3)).flatmap(
        lambda shape: st.builds(types.PromptAltTokens, _dense(shape, False), _dense(shape, True))
    )
    return types.SampleResponse(
        draw(st.lists(sequences(), max_size=3)),
        draw(st.none() | arrays(np.float32, length, LOGPROBS)),
        draw(topks(length)),
        draw(st.none() | dense_tensors() | sparse_tensors()),
        draw(st.integers(0, 2**31 - 1)),
        draw(st.none() | matrix),
    )
