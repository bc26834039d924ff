"""Tensors from and to lists, numpy and torch, dense and sparse."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tinsmith.errors import InvalidInputError, InvalidTypeError, MissingExtraError
from tinsmith.types import PrecisionWarning, TensorData

SPARSE = TensorData([5, 7], "int64", [3, 4], [0, 1, 1, 2], [2, 0])


# --- in ---


@pytest.mark.parametrize(
    ("array", "dtype", "values"),
    [
        (np.array([True, False]), "int64", [1, 0]),
        (np.array([1, 255], dtype=np.uint8), "int64", [1, 255]),
        (np.array([2**32 - 1], dtype=np.uint32), "int64", [2**32 - 1]),
        (np.array([2**63 - 1], dtype=np.uint64), "int64", [2**63 - 1]),
        (np.array([-5], dtype=np.int8), "int64", [-5]),
        (np.array([0.5], dtype=np.float16), "float32", [0.5]),
        (np.array([0.5], dtype=np.float64), "float32", [0.5]),
        (np.array([1, 2], dtype=">i4"), "int64", [1, 2]),
        (np.arange(6)[::2], "int64", [0, 2, 4]),
        (np.arange(6).reshape(2, 3).T, "int64", [0, 3, 1, 4, 2, 5]),
        (np.float32(0.25), "float32", [0.25]),
    ],
)
def test_every_kind_of_numpy_array_is_taken(array: np.ndarray, dtype: str, values: list) -> None:
    tensor = TensorData.from_numpy(array)
    assert (tensor.dtype, tensor.data, tensor.shape) == (dtype, values, list(np.shape(array)))


@pytest.mark.parametrize(
    ("tensor", "dtype", "values"),
    [
        (torch.tensor([True, False]), "int64", [1, 0]),
        (torch.tensor([0.5, 2], dtype=torch.bfloat16), "float32", [0.5, 2.0]),
        (torch.tensor([0.5, 2], dtype=torch.float16), "float32", [0.5, 2.0]),
        (torch.tensor([0.5, 2], dtype=torch.float8_e4m3fn), "float32", [0.5, 2.0]),
        (torch.tensor([1, 2], dtype=torch.uint8), "int64", [1, 2]),
        (torch.tensor([0.5, 2.0], requires_grad=True), "float32", [0.5, 2.0]),
        (torch.tensor([0.5, 2.0], requires_grad=True) * 2, "float32", [1.0, 4.0]),
        (torch.arange(6).reshape(2, 3).T, "int64", [0, 3, 1, 4, 2, 5]),
        (torch.tensor(3), "int64", [3]),
    ],
)
def test_every_kind_of_torch_tensor_is_taken(tensor: torch.Tensor, dtype: str, values: list) -> None:
    taken = TensorData.from_torch(tensor)
    assert (taken.dtype, taken.data, taken.shape) == (dtype, values, list(tensor.shape))
    assert TensorData(tensor) == taken


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_torch_tensors_stay_sparse() -> None:
    dense = SPARSE.to_torch()
    for tensor in (dense.to_sparse_csr(), dense.to_sparse_coo()):
        assert TensorData.from_torch(tensor) == SPARSE
    assert TensorData.from_torch(torch.tensor([0, 3]).to_sparse_coo()).tolist() == [0, 3]


def test_lists_say_themselves_what_they_hold() -> None:
    assert TensorData([1, 2]).dtype == "int64"
    assert TensorData([True]).dtype == "int64"
    assert TensorData([1, 2.5]).dtype == "float32"
    assert TensorData([[1, 2], [3, 4]], shape=[4]).data == [1, 2, 3, 4]
    assert TensorData((1, 2)).data == [1, 2]
    assert TensorData(None, "int64").data == []


def test_what_the_caller_does_to_an_array_later_has_no_effect() -> None:
    array = np.zeros(3, dtype=np.float32)
    tensor = torch.zeros(3)
    taken = [TensorData.from_numpy(array), TensorData.from_torch(tensor), TensorData(array, "float32")]
    array += 1
    tensor += 1
    assert [each.data for each in taken] == [[0, 0, 0]] * 3


def test_a_read_only_array_is_not_copied() -> None:
    array = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), dtype=np.float32)
    assert np.shares_memory(TensorData.from_numpy(array).values, array)


def test_a_read_only_view_of_an_array_that_can_still_change_is_copied() -> None:
    array = np.zeros(3, dtype=np.float32)
    view = array[:]
    view.flags.writeable = False
    taken = [TensorData(view), TensorData.from_numpy(view), TensorData.from_numpy(view.reshape(3, 1))]
    array[0] = np.nan
    assert [each.data for each in taken] == [[0, 0, 0]] * 3


def test_a_view_of_a_read_only_array_is_not_copied() -> None:
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    assert np.shares_memory(TensorData.from_numpy(array[3:]).values, array)


@pytest.mark.parametrize(("shape", "resolved"), [([-1], [4]), ([-1, 2], [2, 2]), (np.array([2, 2]), [2, 2])])
def test_the_shape_is_stored_with_all_its_lengths_known(shape, resolved: list[int]) -> None:
    tensor = TensorData([1, 2, 3, 4], "int64", shape)
    assert tensor.shape == resolved == tensor.to_builtins()["shape"]


@pytest.mark.parametrize("shape", [[2.7], "2", 2, ["x"], [None], [[2]]])
def test_a_shape_of_anything_but_integers_is_refused(shape) -> None:
    with pytest.raises(InvalidTypeError, match="shape must be a list of integers"):
        TensorData([1, 2], "int64", shape)


@pytest.mark.parametrize("wrong", [np.zeros(3), [1, 2], None])
def test_what_is_no_torch_tensor_is_sent_to_the_right_door(wrong) -> None:
    for make in (TensorData.from_torch, TensorData.from_torch_sparse):
        with pytest.raises(InvalidTypeError, match=r"torch tensor is needed.*from_numpy"):
            make(wrong)


def test_a_masked_array_must_be_filled_first() -> None:
    masked = np.ma.array([1.0, 2.0], mask=[False, True], dtype=np.float32)
    for make in (TensorData, TensorData.from_numpy, TensorData.from_numpy_sparse):
        with pytest.raises(InvalidInputError, match=r"filled\(0\)"):
            make(masked)
    assert TensorData(masked.filled(0)).data == [1.0, 0.0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: TensorData([[1], [2, 3]]), "rectangular"),
        (lambda: TensorData([1, 2], ["x"]), "dtype must be one of int64, float32"),
        (lambda: TensorData([1, 2], np.dtype("int64")), "dtype must be one of int64, float32"),
        (lambda: TensorData([1, 2], "int64", [2**70]), "2 values cannot have the shape"),
        (lambda: TensorData([1, None]), "not object"),
        (lambda: TensorData(["a"], "int64"), "integers, floats or booleans"),
        (lambda: TensorData([1j]), "complex"),
        (lambda: TensorData([1, 2], "float16"), "dtype must be one of int64, float32"),
        (lambda: TensorData([1, 2, 3], "int64", [2, 2]), "3 values cannot have the shape"),
        (lambda: TensorData([1.5], "int64"), "1.5 has no int64 value"),
        (lambda: TensorData([float("nan")], "int64"), "nan has no int64 value"),
        (lambda: TensorData(np.array([2**64 - 1], dtype=np.uint64)), "18446744073709551615 has no int64 value"),
        (lambda: TensorData([2**63]), "has no int64 value"),
        (lambda: TensorData([2**70]), "not object"),
        (lambda: TensorData([1e39]), "does not fit float32"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(call, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        call()


def test_rounding_a_float64_array_is_said_once_and_only_if_it_happens() -> None:
    with pytest.warns(PrecisionWarning, match="rounded to float32"):
        TensorData.from_numpy(np.array([0.1]))
    with pytest.warns(PrecisionWarning):
        TensorData.from_torch(torch.tensor([0.1], dtype=torch.float64))
    with pytest.warns(PrecisionWarning):
        TensorData(np.array([2**24 + 1]), "float32")
    TensorData.from_numpy(np.array([0.5, np.nan]))
    TensorData([0.1])


# --- out ---


def test_arrays_that_are_handed_out_belong_to_the_caller() -> None:
    tensor = TensorData([1.0, 2.0])
    tensor.to_numpy()[0] = 9
    tensor.to_torch()[0] = 9
    tensor.data[0] = 9
    assert tensor.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        tensor.values[0] = 9


def test_a_tensor_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SPARSE.shape = [1]
    with pytest.raises(AttributeError):
        del SPARSE.dtype


def test_the_indices_of_a_sparse_tensor_cannot_be_changed_even_after_pickling() -> None:
    made = TensorData.from_numpy_sparse(np.eye(30, dtype=np.float32))
    for tensor in (SPARSE, made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert tensor.csr is not None
        assert [part.flags.writeable for part in (tensor.values, *tensor.csr)] == [False] * 3


def test_a_sparse_tensor_is_made_dense_without_torch() -> None:
    code = """if True:
        import sys
        from tinsmith.types import TensorData
        tensor = TensorData([5, 7], "int64", [3, 4], [0, 1, 1, 2], [2, 0])
        assert tensor.to_numpy().tolist() == [[0, 0, 5, 0], [0, 0, 0, 0], [7, 0, 0, 0]]
        assert tensor.tolist(-1)[1] == [-1] * 4
        assert TensorData.from_numpy_sparse(tensor.to_numpy()) == tensor
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_torch_is_asked_for_by_name_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"tinsmith\[torch\]"):
        TensorData([1]).to_torch()


@settings(max_examples=50, deadline=None)
@given(
    matrix=arrays.arrays(
        np.int64, arrays.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.sampled_from([0, 0, 0, 1, 2])
    ),
    pad=st.sampled_from([0, 1, 3]),
)
def test_a_sparse_tensor_is_the_matrix_it_was_made_from(matrix: np.ndarray, pad: int) -> None:
    tensor = TensorData.from_numpy_sparse(matrix, pad)
    assert np.array_equal(tensor.to_numpy(pad), matrix)
    assert tensor.nbytes <= matrix.nbytes
    assert TensorData.from_builtins(tensor.to_builtins()) == tensor


@pytest.mark.parametrize(
    ("crow", "col", "shape", "text"),
    [
        ([0, 1], None, [1, 4], "pair"),
        ([0, 2], [0, 1], None, "dense shape"),
        ([0, 2], [0, 1], [1, 4, 1], "dense shape"),
        ([], [0, 1], [-1, 4], "dense shape"),
        ([0, 2], [0, 1], [1, -4], "dense shape"),
        ([0, 1], [0, 1], [2, 4], "must be 3 numbers"),
        ([0, 3, 2], [0, 1], [2, 4], "never fall"),
        ([0, 1, 1], [0, 1], [2, 4], "2 values need"),
        ([0, 1, 2], [0, 4], [2, 4], "between 0 and 3"),
        ([0, 2, 2], [1, 1], [2, 4], "rise within each row"),
    ],
)
def test_indices_that_do_not_fit_are_refused(crow, col, shape, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        TensorData([1, 2], "int64", shape, crow, col)


@pytest.mark.parametrize("pad", [True, 0.5, "0", None])
def test_a_pad_value_is_an_integer(pad: object) -> None:
    with pytest.raises(InvalidTypeError, match="pad_value"):
        SPARSE.to_numpy(pad)
    assert SPARSE.to_numpy(np.int32(3))[0, 0] == 3


# --- as a value ---


def test_tensors_are_equal_by_content() -> None:
    assert TensorData([1, 2]) == TensorData.from_numpy(np.array([1, 2]))
    assert hash(TensorData([1, 2])) == hash(TensorData.from_numpy(np.array([1, 2])))
    assert TensorData([float("nan")]) == TensorData([float("nan")])
    assert TensorData([1, 2]) != TensorData([1.0, 2.0])
    assert TensorData([1, 2]) != TensorData([[1, 2]])
    assert TensorData.from_numpy(SPARSE.to_numpy()) != SPARSE
    assert TensorData([1]) != [1]


@pytest.mark.parametrize("tensor", [TensorData([1, 2]), TensorData([[0.5]], shape=[1, 1]), SPARSE])
def test_copies_and_pickles_are_equal(tensor: TensorData) -> None:
    for twin in (copy.copy(tensor), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert twin == tensor
        assert twin.shape == tensor.shape


def test_json_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="a list of numbers in 'data'"):
        TensorData.from_builtins({"dtype": "int64"})
    with pytest.raises(InvalidInputError, match="has no field 'colour'"):
        TensorData.from_builtins({"data": [1], "dtype": "int64", "colour": 1})
