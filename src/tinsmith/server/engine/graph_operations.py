"""What the graph of a custom loss may call: pure operations, looked up by name in these tables.

Elementwise operations, reductions and changes of shape; nothing that draws random numbers, writes to its arguments,
reaches beyond them, or makes more of them than their shapes tell.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# As a function of torch and as a method alike.
_SHARED = _words("""
abs absolute acos acosh add addcdiv addcmul all amax amin aminmax any argmax argmin asin asinh atan atan2 atanh bool
bitwise_and bitwise_not bitwise_or bitwise_xor
ceil clamp clamp_max clamp_min clip clone copysign cos cosh cummax cummin cumprod cumsum deg2rad detach div divide
dot eq erf erfc erfinv exp exp2 expand_as expm1 fix flatten flip float_power floor floor_divide fmax fmin fmod frac
gather ge greater greater_equal gt heaviside hypot index_select isclose isfinite isinf isnan ldexp le lerp less
less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or
logical_xor logit logsumexp lt masked_fill max maximum mean median min minimum moveaxis movedim mul multiply nan_to_num
nanmean nansum narrow ne neg negative norm not_equal numel permute positive pow prod quantile rad2deg ravel reciprocal
relu remainder reshape roll round rsqrt rsub select sgn sigmoid sign sin sinc sinh softmax sort sqrt square squeeze std
sub subtract sum take_along_dim tan tanh transpose tril triu true_divide trunc unbind unflatten unsqueeze var where
xlogy
""")
_FUNCTIONS_ONLY = _words("""
cat concat full_like ones_like stack std_mean var_mean zeros_like broadcast_tensors arange zeros ones full
scalar_tensor is_floating_point
""")
_METHODS_ONLY = _words("""
double expand float int long new_full new_ones new_zeros size dim to type_as view view_as t contiguous
""")
_NN_FUNCTIONS = _words("""
relu elu celu selu gelu silu mish sigmoid tanh softmax log_softmax softmin logsigmoid softplus softsign hardtanh
hardsigmoid hardswish leaky_relu relu6 mse_loss l1_loss smooth_l1_loss huber_loss kl_div normalize tanhshrink threshold
binary_cross_entropy binary_cross_entropy_with_logits
""")
_SPECIAL = _words("entr erf erfc erfcx erfinv exp2 expit expm1 gammaln i0 log1p log_ndtr ndtr sinc xlog1py xlogy logit")
_OPERATORS = _words("abs add and_ eq floordiv ge gt inv invert le lt mod mul ne neg not_ or_ pos pow sub truediv xor")
_MATH = _words("ceil cos exp expm1 fabs floor isfinite isinf isnan log log10 log1p log2 pow sin sqrt tan tanh")
_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "T", "mT"})
KEYWORDS = frozenset(
    _words("""
    input other dim dim0 dim1 dims keepdim keepdims dtype device min max alpha beta value values exponent weight p ord
    correction unbiased descending stable tensors indices index condition q interpolation start end step length size
    shape fill_value nan posinf neginf equal_nan rtol atol eps reduction delta threshold negative_slope lower upper
    log_target pos_weight num sizes source destination shifts diagonal rounding_mode tensor1 tensor2
    axis approximate min_val max_val inplace sparse_grad
    """)
)


def _power(base: Any, exponent: Any) -> Any:
    """Of two integers, in floating point: 9 ** 9 ** 9 would never end."""
    if isinstance(base, int) and isinstance(exponent, int):
        return float(base) ** exponent
    return base**exponent


def _attribute(value: Any, name: Any) -> Any:
    if not isinstance(value, Tensor) or name not in _ATTRIBUTES:
        raise ValueError(f"the attribute {name!r} cannot be read; readable are {', '.join(sorted(_ATTRIBUTES))}")
    return getattr(value, name)


def _functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in (*_SHARED, *_FUNCTIONS_ONLY):
        if hasattr(torch, name):
            yield f"torch.{name}", getattr(torch, name)
    yield "torch.functional.norm", torch.norm
    yield "torch.functional.broadcast_tensors", torch.broadcast_tensors
    for name in _NN_FUNCTIONS:
        yield f"torch.nn.functional.{name}", getattr(functional, name)
        # Some of them are bound from C, and tracing calls them by that name.
        yield f"torch._C._nn.{name}", getattr(functional, name)
    yield "torch._C._nn.log_sigmoid", functional.logsigmoid
    for name in _SPECIAL:
        yield f"torch.special.{name}", getattr(torch.special, name)
        yield f"torch._C._special.special_{name}", getattr(torch.special, name)
    yield "torch._C._linalg.linalg_vector_norm", torch.linalg.vector_norm
    yield "torch.linalg.vector_norm", torch.linalg.vector_norm
    for name in _OPERATORS:
        yield f"operator.{name}", getattr(operator, name)
        yield f"_operator.{name}", getattr(operator, name)
    for name in _MATH:
        yield f"math.{name}", getattr(math, name)
    for module in ("operator", "_operator"):
        yield f"{module}.getitem", operator.getitem
        yield f"{module}.pow", _power
    for name in ("getattr", "builtins.getattr"):
        yield name, _attribute


FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(dict(_functions()))
METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: getattr(torch.Tensor, name) for name in (*_SHARED, *_METHODS_ONLY) if hasattr(torch.Tensor, name)}
)


def _places_of_inplace() -> Iterator[tuple[str, int]]:
    for name, function in FUNCTIONS.items():
        with contextlib.suppress(ValueError, TypeError):  # those from C have no signature, and no such parameter
            yield name, list(inspect.signature(function).parameters).index("inplace")


PLACE_OF_INPLACE: Mapping[str, int] = MappingProxyType(dict(_places_of_inplace()))
"""Where the argument stands that would let a function write to its input."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")}
    | {"float": torch.float32, "double": torch.float64, "long": torch.int64, "int": torch.int32}
)
