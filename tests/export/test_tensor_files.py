"""What the head of a safetensors file may say: numbers of any size come from strangers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tinsmith.errors import InvalidInputError
from tinsmith.export.tensor_files import read_head


def write(file: Path, dtype: str, shape: list[int], end: int) -> Path:
    head = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    return file


@pytest.mark.parametrize(
    ("dtype", "shape", "end", "complaint"),
    [
        ("F32", 150_000 * [10**80], 4, "shape"),
        ("F32", 150_000 * [2**40], 4, "length <= 8"),
        ("F32", 9 * [1], 4, "length <= 8"),
        ("F32", [0, 2**40 + 1], 0, "<= 1099511627776"),
        ("I64", [1], 2**62 + 1, "data_offsets"),
    ],
    ids=["many huge", "many", "nine", "long", "far"],
)
def test_numbers_beyond_any_model_are_refused_before_they_are_multiplied(
    tmp_path: Path, dtype: str, shape: list[int], end: int, complaint: str
) -> None:
    file = write(tmp_path / "file", dtype, shape, end)
    began = time.process_time()
    with pytest.raises(InvalidInputError, match=f"is not a safetensors file: .*{complaint}"):
        read_head(file)
    assert time.process_time() - began < 2


def test_eight_dimensions_and_empty_tensors_are_read(tmp_path: Path) -> None:
    assert read_head(write(tmp_path / "eight", "F32", 8 * [1], 4))["a"].shape == 8 * (1,)
    assert read_head(write(tmp_path / "empty", "F32", [0, 2**40], 0))["a"].num_bytes == 0
