"""The number formats of published weights, to float32 and back. numpy knows no bfloat16, which is half a float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SIZES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes for one number, by the name that safetensors has for the format."""


def to_floats(data: bytes, dtype: str) -> Floats:
    """Exact: every number of these formats is a float32. The result may be written to."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype(np.float32)


def from_floats(values: Floats, dtype: str) -> bytes:
    """Rounded to the nearest number of the format, and to the even one of two; too large becomes infinite."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        return rounded.astype("<u2").tobytes()
    with np.errstate(over="ignore"):
        return values.astype("<f4" if dtype == "F32" else "<f2").tobytes()
