"""Cuts the data of one call into requests of bounded size, and joins their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tinsmith.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
)

HASH_MODULUS = 2**64


def split(data: Sequence[Datum], costs: Sequence[int], max_data: int, max_bytes: int) -> list[Sequence[Datum]]:
    """Consecutive runs within both limits, given the bytes of each; a datum that is too large by itself goes alone."""
    runs: list[Sequence[Datum]] = []
    start = size = 0
    for position, cost in enumerate(costs):
        if position > start and (position - start >= max_data or size + cost > max_bytes):
            runs.append(data[start:position])
            start, size = position, 0
        size += cost
    runs.append(data[start:])
    return runs


def byte_size(datum: Datum) -> int:
    """About how many bytes a datum takes on the wire."""
    return input_bytes(datum.model_input, bytes_per_token=4) + sum(
        tensor.nbytes for tensor in datum.loss_fn_inputs.values()
    )


def input_bytes(model_input: ModelInput, bytes_per_token: int) -> int:
    return sum(_chunk_bytes(chunk, bytes_per_token) for chunk in model_input.chunks)


def _chunk_bytes(chunk: ModelInputChunk, bytes_per_token: int) -> int:
    if isinstance(chunk, EncodedTextChunk):
        return len(chunk.tokens) * bytes_per_token
    if isinstance(chunk, ImageChunk):
        return len(chunk.data)
    if isinstance(chunk, DmelChunk):
        return len(chunk.dmel)
    return len(chunk.location)


def join(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """One result for the whole call. The result of a single chunk is passed on untouched."""
    if len(outputs) == 1:
        return outputs[0]
    sizes = [len(output.loss_fn_outputs) for output in outputs]
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=[each for output in outputs for each in output.loss_fn_outputs],
        metrics=join_metrics([output.metrics for output in outputs], sizes),
    )


def join_metrics(parts: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """Reduces every metric as the part of its key behind the colon says, over the chunks that have it.

    A key without a reduction we know keeps all its values, under `key`, `key_1`, `key_2`, ... like `:unique`.
    """
    joined: dict[str, float] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if key in part]
        weights = [size for part, size in zip(parts, sizes, strict=True) if key in part]
        reduce = _REDUCTIONS.get(key.rpartition(":")[2]) if ":" in key else None
        if reduce is not None:
            joined[key] = reduce(values, weights)
        else:
            joined.update({f"{key}_{i}" if i else key: value for i, value in enumerate(values)})
    return joined


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    if not total:  # no chunk has any output: nothing to weigh by
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def _hash_sum(values: Sequence[float], weights: Sequence[int]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    return sum(int(value) for value in values) % HASH_MODULUS


_REDUCTIONS = {
    "sum": lambda values, weights: sum(values),
    "min": lambda values, weights: min(values),
    "max": lambda values, weights: max(values),
    "mean": _mean,
    "slack": lambda values, weights: max(values) - _mean(values, weights),
    "hash2": _hash_sum,
}
