"""Tensors, data and results behave as the official ones do, wherever those accept what they are given."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import tinker.types as official
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tinker.types._pydantic_types.forward_backward_input import ForwardBackwardInput as OfficialInput
from tinker.types.topk_logprobs import TopkLogprobs as OfficialTopk

from tinsmith import types as ours
from tinsmith.types.tensors import PrecisionWarning
from tinsmith.wire import json as wire

some = settings(max_examples=50, deadline=None)

NUMPY = arrays.arrays(
    dtype=st.sampled_from([np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64]),
    shape=arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    elements={"min_value": -100, "max_value": 100},
)
MATRICES = arrays.arrays(
    dtype=st.sampled_from([np.int64, np.float32]),
    shape=arrays.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6),
    elements=st.sampled_from([0, 0, 0, 0, 1, 2, -1]),
)


def _parts(tensor: Any) -> tuple[Any, ...]:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.data,
        tensor.sparse_crow_indices,
        tensor.sparse_col_indices,
        tensor.tolist(),
    )


def _quietly(build: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        return build(*args)


@some
@given(array=NUMPY)
def test_a_numpy_array_becomes_the_same_tensor(array: np.ndarray) -> None:
    mine = _quietly(ours.TensorData.from_numpy, array)
    assert _parts(mine) == _parts(official.TensorData.from_numpy(array))
    assert np.array_equal(mine.to_numpy(), official.TensorData.from_numpy(array).to_numpy())


@some
@given(array=NUMPY)
def test_a_torch_tensor_becomes_the_same_tensor(array: np.ndarray) -> None:
    tensor = torch.from_numpy(array.copy())
    mine = _quietly(ours.TensorData.from_torch, tensor)
    theirs = official.TensorData.from_torch(tensor)
    assert _parts(mine) == _parts(theirs)
    assert torch.equal(mine.to_torch(), theirs.to_torch())


def test_a_bfloat16_tensor_becomes_the_same_tensor() -> None:
    tensor = torch.tensor([0.5, -1.25, 3.0], dtype=torch.bfloat16)
    assert _parts(ours.TensorData.from_torch(tensor)) == _parts(official.TensorData.from_torch(tensor))


@some
@given(matrix=MATRICES, pad=st.sampled_from([0, 0, 1, -1]))
def test_a_matrix_becomes_the_same_sparse_tensor_with_and_without_torch(matrix: np.ndarray, pad: int) -> None:
    theirs = official.TensorData.from_torch_sparse(torch.from_numpy(matrix.copy()), pad)
    assert _parts(ours.TensorData.from_torch_sparse(torch.from_numpy(matrix.copy()), pad)) == _parts(theirs)
    mine = ours.TensorData.from_numpy_sparse(matrix, pad)
    assert _parts(mine) == _parts(theirs)
    assert np.array_equal(mine.to_numpy(pad), theirs.to_numpy(pad))
    assert np.array_equal(mine.to_numpy(pad), matrix)


@pytest.mark.parametrize(
    ("data", "dtype", "shape"),
    [
        ([1, 2], "int64", None),
        ([1, 2, 3, 4], "float32", [2, 2]),
        ([[1, 2], [3, 4]], "int64", None),
        ([], "float32", [0]),
    ],
)
def test_a_list_becomes_the_same_tensor(data: list[Any], dtype: Any, shape: list[int] | None) -> None:
    assert _parts(ours.TensorData(data, dtype, shape)) == _parts(official.TensorData(data, dtype, shape))


LISTS = {
    "target_tokens": st.lists(st.integers(0, 1000), min_size=1, max_size=5),
    "weights": st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5),
    "advantages": st.lists(st.integers(-3, 3), min_size=1, max_size=5),
    "logprobs": st.lists(st.booleans(), min_size=1, max_size=5),
    "sequence_ratio_mask": st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=2), min_size=1, max_size=3),
}


@some
@given(lists=st.fixed_dictionaries({}, optional=LISTS), tokens=st.lists(st.integers(0, 99), max_size=5))
def test_the_lists_of_a_datum_become_the_same_tensors(lists: dict[str, Any], tokens: list[int]) -> None:
    mine = ours.Datum(ours.ModelInput.from_ints(tokens), lists)
    theirs = official.Datum(official.ModelInput.from_ints(tokens), lists)
    assert {key: _parts(tensor) for key, tensor in mine.loss_fn_inputs.items()} == {
        key: _parts(tensor) for key, tensor in theirs.loss_fn_inputs.items()
    }
    assert mine.model_input.length == theirs.model_input.length


@pytest.mark.parametrize("key", ["target_tokens", "weights", "advantages"])
def test_a_torch_matrix_in_a_datum_is_made_sparse_under_the_same_names(key: str) -> None:
    matrix = torch.zeros(4, 8, dtype=torch.int64)
    matrix[1, 2] = 5
    mine = ours.Datum(ours.ModelInput.from_ints([1]), {key: matrix}).loss_fn_inputs[key]
    theirs = official.Datum(official.ModelInput.from_ints([1]), {key: matrix}).loss_fn_inputs[key]
    assert _parts(mine) == _parts(theirs)


@some
@given(lists=st.fixed_dictionaries({}, optional=LISTS), tokens=st.lists(st.integers(0, 99), max_size=5))
def test_training_data_in_json_is_read_by_the_official_model(lists: dict[str, Any], tokens: list[int]) -> None:
    datum = ours.Datum(ours.ModelInput.from_ints(tokens), lists)
    body = wire.encode_forward_backward_parts([datum], "ppo", {"clip_low_threshold": 0.5})

    theirs = OfficialInput.model_validate_json(body)
    assert wire.decode(ours.ForwardBackwardInput, theirs.model_dump_json(exclude_none=True).encode()) == (
        ours.ForwardBackwardInput([datum], "ppo", {"clip_low_threshold": 0.5})
    )


ROWS = st.lists(
    st.none() | st.lists(st.tuples(st.integers(1, 99), st.floats(-9, 0, width=32)), min_size=1, max_size=3), max_size=4
)


@some
@given(rows=ROWS)
def test_top_k_matrices_become_the_same_lists(rows: Any) -> None:
    topk = ours.TopkLogprobs.from_lists(rows)
    sequence = official.SampledSequence("stop", "id", topk_logprobs_np=OfficialTopk(topk.token_ids, topk.logprobs))
    assert topk.to_lists() == sequence.topk_logprobs
    if any(rows):
        assert topk.to_lists() == rows


@some
@given(values=st.lists(st.floats(-9, 0, width=32) | st.just(float("nan")), max_size=6))
def test_the_lists_of_a_sample_are_the_same(values: list[float]) -> None:
    logprobs = np.array(values, dtype=np.float32)
    tokens = np.arange(len(values), dtype=np.int32)
    mine = ours.SampleResponse([ours.SampledSequence("length", "id", tokens, logprobs)], prompt_logprobs_np=logprobs)
    theirs = official.SampleResponse(
        [official.SampledSequence("length", "id", tokens, logprobs)], prompt_logprobs_np=logprobs
    )
    assert mine.prompt_logprobs == theirs.prompt_logprobs
    assert mine.sequences[0].tokens == theirs.sequences[0].tokens
    assert np.array_equal(mine.sequences[0].logprobs, theirs.sequences[0].logprobs, equal_nan=True)


@some
@given(header=st.binary(max_size=12))
def test_the_length_of_audio_is_read_from_the_same_header(header: bytes) -> None:
    mine, theirs = ours.DmelChunk(dmel=header), official.DmelChunk(dmel=header)
    try:
        expected = theirs.length
    except ValueError:
        with pytest.raises(ValueError, match="DmelChunk"):
            _ = mine.length
    else:
        assert mine.length == expected


@pytest.mark.parametrize("name", ["weights", "sampler_weights", "external_weights"])
def test_a_checkpoint_path_has_the_same_parts_and_pages(name: str) -> None:
    path = f"tinker://run:train:0/{name}/step 10"
    mine = ours.ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert mine.model_dump() == official.ParsedCheckpointTinkerPath.from_tinker_path(path).model_dump()
    assert ours.SaveWeightsResponse(path=path).get_console_url() == (
        official.SaveWeightsResponse(path=path).get_console_url()
    )
    assert ours.SaveWeightsForSamplerResponse(path=path).get_playground_url() == (
        official.SaveWeightsForSamplerResponse(path=path).get_playground_url()
    )


@pytest.mark.parametrize(
    "path", ["run/weights/a", "tinker://run/weights", "tinker://run/other/a", "tinker://a/weights/b/c"]
)
def test_what_is_no_checkpoint_path_is_refused_alike(path: str) -> None:
    for types in (ours, official):
        with pytest.raises(ValueError, match="path"):
            types.ParsedCheckpointTinkerPath.from_tinker_path(path)
