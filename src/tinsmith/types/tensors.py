"""`TensorData`: numbers on their way to or from the service, as int64 or float32, dense or sparse."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from tinsmith.errors import InvalidInputError, InvalidTypeError, MissingExtraError
from tinsmith.types._brief import brief, joined
from tinsmith.types._codecs import Define
from tinsmith.types._packing import packed

if TYPE_CHECKING:
    import torch

TensorDtype: TypeAlias = Literal["int64", "float32"]
"""The two kinds of numbers that travel; everything else is converted to one of them."""

Array: TypeAlias = npt.NDArray[Any]

_DTYPES: Mapping[TensorDtype, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}
_FORMATS: Mapping[TensorDtype, str] = {"int64": "q", "float32": "f"}


class PrecisionWarning(UserWarning):
    """Numbers were rounded to fit the wire, which knows float32 and int64 only."""


class Csr(NamedTuple):
    """Where the values of a sparse matrix stand: row `i` owns values `crow[i]` to `crow[i + 1]`, in columns `col`."""

    crow: Array
    col: Array


class TensorData:
    """An immutable tensor.

    `data` may be a list (nested or flat), a numpy array or a torch tensor. Floats of any width become float32; integers
    of any width and booleans become int64. Rounding a float64 array raises a `PrecisionWarning`; Python floats are
    rounded silently. What does not fit (uint64 above the int64 range, floats above the float32 range) is refused.

    With `sparse_crow_indices` and `sparse_col_indices` the tensor is a CSR matrix: `data` lists the stored values,
    `shape` is the dense shape, and every other cell is the pad value chosen when it is made dense again.
    """

    __slots__ = ("_csr", "_values", "dtype", "shape")

    _csr: Csr | None
    _values: Array
    dtype: TensorDtype
    shape: list[int] | None
    """As given, with a length of -1 worked out; `None` means that `data` was taken in the shape it came in."""

    def __init__(
        self,
        data: npt.ArrayLike | torch.Tensor | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: npt.ArrayLike | None = None,
        sparse_col_indices: npt.ArrayLike | None = None,
    ) -> None:
        values = to_wire_array([] if data is None else data, dtype)
        csr = _csr(sparse_crow_indices, sparse_col_indices)
        size = None if shape is None else _lengths(shape)
        if csr:
            values = values.reshape(-1)
            _check_csr(csr, values, size)
        elif size is not None and list(values.shape) != size:
            values = _reshaped(values, size)
        self._set(values, size, csr)

    def _set(self, values: Array, shape: list[int] | None, csr: Csr | None) -> None:
        for part in (values, *(csr or ())):
            part.flags.writeable = False
        for name, value in (
            ("_values", values),
            ("_csr", csr),
            ("shape", shape if shape is None or csr else list(values.shape)),
            ("dtype", "float32" if values.dtype.kind == "f" else "int64"),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def from_parts(cls, values: Array, shape: Sequence[int] | None = None, csr: Csr | None = None) -> TensorData:
        """From arrays that are int64 or float32 already and that nobody else will change; nothing is copied."""
        tensor = cls.__new__(cls)
        size = None if shape is None else list(shape)
        tensor._set(values if size is None or csr else values.reshape(size), size, csr)
        return tensor

    # --- in ---

    @classmethod
    def from_numpy(cls, array: npt.ArrayLike) -> TensorData:
        values = to_wire_array(array)
        return cls.from_parts(values, values.shape)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """Any torch tensor: on any device, with or without gradient, dense, CSR or COO."""
        _check_torch_tensor(tensor)
        layout = str(tensor.layout)
        if layout == "torch.sparse_csr" and tensor.ndim == 2:
            csr = Csr(_numpy_of_torch(tensor.crow_indices()), _numpy_of_torch(tensor.col_indices()))
            return cls(_numpy_of_torch(tensor.values()), None, tensor.shape, *csr)
        if layout == "torch.sparse_coo" and tensor.ndim == 2:
            ordered = tensor.coalesce()
            rows, columns = _numpy_of_torch(ordered.indices())
            return cls(_numpy_of_torch(ordered.values()), None, tensor.shape, _crow(rows, tensor.shape[0]), columns)
        return cls.from_numpy(_numpy_of_torch(tensor if layout == "torch.strided" else tensor.to_dense()))

    @classmethod
    def from_numpy_sparse(cls, array: npt.ArrayLike, pad_value: int = 0) -> TensorData:
        """CSR without the cells equal to `pad_value`, if `array` has two dimensions and that is smaller; else dense."""
        pad = _pad(pad_value)
        dense = to_wire_array(array)
        if dense.ndim != 2:
            return cls.from_parts(dense, dense.shape)
        rows, columns = np.nonzero(dense != pad)
        if len(dense) + 1 + 2 * len(rows) >= dense.size:
            return cls.from_parts(dense, dense.shape)
        return cls.from_parts(dense[rows, columns], dense.shape, Csr(_crow(rows, len(dense)), columns))

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> TensorData:
        """`from_numpy_sparse` for a torch tensor."""
        _check_torch_tensor(tensor)
        dense = tensor if str(tensor.layout) == "torch.strided" else tensor.to_dense()
        return cls.from_numpy_sparse(_numpy_of_torch(dense), pad_value)

    # --- out ---

    @property
    def data(self) -> list[int] | list[float]:
        """The stored values as one flat list."""
        return cast("list[int] | list[float]", self._values.reshape(-1).tolist())

    @property
    def values(self) -> Array:
        """The stored values without a copy, read-only: the dense tensor, or what a CSR matrix lists."""
        return self._values

    @property
    def csr(self) -> Csr | None:
        """The index arrays of a sparse tensor."""
        return self._csr

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        return self._csr.crow.tolist() if self._csr else None

    @property
    def sparse_col_indices(self) -> list[int] | None:
        return self._csr.col.tolist() if self._csr else None

    @property
    def nbytes(self) -> int:
        """The size of values and indices."""
        return self._values.nbytes + sum(part.nbytes for part in self._csr or ())

    def to_numpy(self, pad_value: int = 0) -> Array:
        """A new dense array, yours to change. The empty cells of a sparse tensor become `pad_value`."""
        if self._csr is None:
            return self._values.copy()
        rows, columns = cast("list[int]", self.shape)
        dense = np.full((rows, columns), _pad(pad_value), dtype=self._values.dtype)
        dense[_row_of_each(self._csr), self._csr.col] = self._values
        return dense

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        """A new dense torch tensor on the CPU."""
        try:
            import torch
        except ImportError:
            raise MissingExtraError("torch", "torch", "TensorData.to_torch") from None
        return torch.from_numpy(self.to_numpy(pad_value))

    def tolist(self, pad_value: int = 0) -> Any:
        """Nested lists in the tensor's shape."""
        return (self._values if self._csr is None else self.to_numpy(pad_value)).tolist()

    def is_finite(self) -> bool:
        return self.dtype == "int64" or bool(np.isfinite(self._values).all())

    # --- JSON ---

    @classmethod
    def from_builtins(cls, value: object) -> TensorData:
        if not isinstance(value, Mapping) or not isinstance(value.get("data"), list):
            raise InvalidTypeError(
                f"A TensorData is an object with a list of numbers in 'data', not {brief(value)}",
                field="TensorData.data",
                value=value,
            )
        unknown = value.keys() - _JSON_SCHEMA["properties"].keys()
        if unknown:
            legal = ", ".join(_JSON_SCHEMA["properties"])
            raise InvalidTypeError(f"TensorData has no field {min(unknown)!r}. Its fields are: {legal}")
        return cls(**value)

    def to_builtins(self, *, nulls: bool = False) -> dict[str, Any]:
        fields = {
            "data": self.data,
            "dtype": self.dtype,
            "shape": self.shape,
            "sparse_crow_indices": self.sparse_crow_indices,
            "sparse_col_indices": self.sparse_col_indices,
        }
        return fields if nulls else {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def json_schema(cls, define: Define) -> dict[str, Any]:
        return _JSON_SCHEMA

    # --- a value among values ---

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"TensorData is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"TensorData is immutable: cannot delete {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        mine, theirs = self._csr or (), other._csr or ()
        same_cells = len(mine) == len(theirs) and all(map(np.array_equal, mine, theirs))
        return (
            self.dtype == other.dtype
            and same_cells
            and _dense_shape(self) == _dense_shape(other)
            and bool(np.array_equal(self._values, other._values, equal_nan=self.dtype == "float32"))
        )

    def __hash__(self) -> int:
        return hash((self.dtype, _dense_shape(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorData.from_parts, (self._values, self.shape, self._csr)

    def __repr__(self) -> str:
        start = self._values.reshape(-1)[:8].tolist()
        data = joined([brief(number) for number in start], self._values.size)
        shape = list(_dense_shape(self))
        return f"TensorData(dtype={self.dtype!r}, shape={shape}, data=[{data}]{', sparse' if self._csr else ''})"


_INDEX_LIST = {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}], "default": None}
_JSON_SCHEMA: dict[str, Any] = {
    "title": "TensorData",
    "type": "object",
    "properties": {
        "data": {
            "anyOf": [
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "number"}},
            ]
        },
        "dtype": {"enum": list(get_args(TensorDtype))},
        "shape": _INDEX_LIST,
        "sparse_crow_indices": _INDEX_LIST,
        "sparse_col_indices": _INDEX_LIST,
    },
    "required": ["data", "dtype"],
    "additionalProperties": False,
}


def to_wire_array(data: Any, dtype: TensorDtype | None = None) -> Array:
    """An array of one of the two wire types that nobody else can change."""
    if dtype is not None and (not isinstance(dtype, str) or dtype not in _DTYPES):
        raise InvalidInputError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}", field="dtype", value=dtype)
    if dtype is not None and isinstance(data, list | tuple) and (quick := packed(data, _FORMATS[dtype])) is not None:
        return np.frombuffer(quick, _DTYPES[dtype])
    source = _numpy_of(data)
    natural = _wire_dtype(source)
    target = _DTYPES[dtype or natural]
    # What nobody can change is kept: an array just made of a list, a view of received bytes.
    keep = isinstance(data, list | tuple) or _is_frozen(source)
    with np.errstate(over="ignore", invalid="ignore"):
        values = source.astype(target, order="C", copy=not keep)
    _check_conversion(source, values, from_python=not hasattr(data, "dtype"))
    return values


def _is_frozen(array: Array) -> bool:
    """Whether neither the array nor the one whose memory it shows can be written to."""
    memory: object = array
    while isinstance(memory, np.ndarray):
        if memory.flags.writeable:
            return False
        if memory.flags.owndata:
            return True
        memory = memory.base
    return isinstance(memory, bytes)


def is_torch_tensor(value: object) -> bool:
    """Whether this is a torch tensor, without importing torch: if nobody did, nobody has a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _check_torch_tensor(value: object) -> None:
    if not is_torch_tensor(value):
        raise InvalidTypeError(
            f"A torch tensor is needed here, not {brief(value)}. Use TensorData.from_numpy(...) for an array and "
            "TensorData(...) for a list",
            field="tensor",
            value=value,
        )


def _check_not_masked(data: object) -> None:
    masked = sys.modules.get("numpy.ma")  # numpy loads it on first use
    if masked is not None and isinstance(data, masked.MaskedArray):
        raise InvalidInputError(
            f"A masked array has no number where it is masked. Fill it first, e.g. with .filled(0): {brief(data)}",
            field="data",
            value=data,
        )


def _numpy_of(data: Any) -> Array:
    if is_torch_tensor(data):
        return _numpy_of_torch(data)
    _check_not_masked(data)
    try:
        return np.asarray(data)
    except (ValueError, TypeError, OverflowError):
        raise InvalidInputError(
            f"This is not a rectangular array of numbers; give all rows the same length: {brief(data)}",
            field="data",
            value=data,
        ) from None


def _numpy_of_torch(tensor: Any) -> Array:
    plain = tensor.detach().cpu()
    if plain.is_floating_point() and plain.element_size() < 4:
        plain = plain.float()  # bfloat16 and the 8-bit floats have no numpy counterpart
    return cast("Array", plain.resolve_neg().numpy())


def _wire_dtype(array: Array) -> TensorDtype:
    if array.dtype.kind == "f":
        return "float32"
    if array.dtype.kind in "iub":
        return "int64"
    raise InvalidTypeError(
        f"A tensor holds integers, floats or booleans, not {array.dtype}: {brief(array.tolist())}",
        field="data",
        value=array.dtype,
    )


def _check_conversion(source: Array, values: Array, *, from_python: bool) -> None:
    if source.dtype == values.dtype:
        return
    if values.dtype.kind == "i":
        if source.dtype.kind in "fu":
            _check_integers(source, values)
    elif source.dtype.kind != "b":
        _check_rounding(source, values, from_python)


def _check_integers(source: Array, values: Array) -> None:
    wrong = source != values
    if wrong.any():
        culprit = source[wrong].flat[0]
        raise InvalidInputError(
            f"{culprit} has no int64 value. Round it, keep it below 2**63, or make this tensor float32",
            field="data",
            value=culprit,
        )


def _check_rounding(source: Array, values: Array, from_python: bool) -> None:
    lost = np.isinf(values) & np.isfinite(source)
    if lost.any():
        culprit = source[lost].flat[0]
        raise InvalidInputError(
            f"{culprit} does not fit float32, the only float type on the wire", field="data", value=culprit
        )
    if not from_python and not np.array_equal(source, values, equal_nan=source.dtype.kind == "f"):
        warnings.warn(
            f"A {source.dtype} tensor was rounded to float32, the only float type on the wire. "
            "Convert it yourself, e.g. with .astype(np.float32), to say that you know.",
            PrecisionWarning,
            stacklevel=2,
        )


def _lengths(shape: Any) -> list[int]:
    try:
        return [_length(each) for each in shape]
    except TypeError:
        raise InvalidTypeError(
            f"shape must be a list of integers such as [2, 3], not {brief(shape)}", field="shape", value=shape
        ) from None


def _length(value: Any) -> int:
    whole = isinstance(value, float) and value.is_integer()  # JSON may write 2 as 2.0
    return int(value) if whole else operator.index(value)


def _reshaped(values: Array, shape: list[int]) -> Array:
    try:
        return values.reshape(shape)
    except (ValueError, OverflowError):
        raise InvalidInputError(
            f"{values.size:,} values cannot have the shape {shape}", field="shape", value=shape
        ) from None


def _pad(pad_value: object) -> int:
    if isinstance(pad_value, bool) or not isinstance(pad_value, int | np.integer):
        raise InvalidTypeError(f"pad_value must be an int, not {pad_value!r}", field="pad_value", value=pad_value)
    return int(pad_value)


def _crow(rows: Array, count: int) -> Array:
    """Row pointers for the sorted row numbers of the stored values."""
    return np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=count)))).astype(np.int64)


def _row_of_each(csr: Csr) -> Array:
    """The row number of every stored value."""
    return np.repeat(np.arange(len(csr.crow) - 1), np.diff(csr.crow))


def _csr(crow: npt.ArrayLike | None, col: npt.ArrayLike | None) -> Csr | None:
    if crow is None and col is None:
        return None
    if crow is None or col is None:
        raise InvalidInputError("sparse_crow_indices and sparse_col_indices come as a pair; give both or neither")
    return Csr(to_wire_array(crow, "int64"), to_wire_array(col, "int64"))


def _check_csr(csr: Csr, values: Array, shape: list[int] | None) -> None:
    if shape is None or len(shape) != 2 or min(shape) < 0:
        raise InvalidInputError(f"A sparse tensor needs its dense shape [rows, columns], not {shape}", field="shape")
    rows, columns = shape
    problem = None
    if len(csr.crow) != rows + 1 or csr.crow[0] != 0 or (np.diff(csr.crow) < 0).any():
        problem = f"sparse_crow_indices must be {rows + 1} numbers that start at 0 and never fall"
    elif not len(csr.col) == values.size == csr.crow[-1]:
        problem = f"{values.size} values need as many sparse_col_indices and a last row pointer of the same number"
    elif values.size and not (csr.col.min() >= 0 and csr.col.max() < columns):
        problem = f"sparse_col_indices must lie between 0 and {columns - 1}"
    elif (np.diff(_row_of_each(csr) * columns + csr.col) <= 0).any():
        problem = "sparse_col_indices must rise within each row"
    if problem:
        raise InvalidInputError(problem, field="sparse_crow_indices", value=csr.crow.tolist())


def _dense_shape(tensor: TensorData) -> tuple[int, ...]:
    return tuple(tensor.shape or ()) if tensor.csr else tensor.values.shape
