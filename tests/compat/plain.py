"""Results of either package as plain JSON values, so that they can be compared."""

from __future__ import annotations

import dataclasses
import enum
from datetime import date, datetime
from typing import Any

import numpy as np

_OURS_ALONE = {"extra"}


def plain(value: Any) -> Any:
    """The public content of a result: an object becomes its class's name and its fields."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    fields = {name: plain(getattr(value, name)) for name in _fields(value)}
    return {"class": type(value).__name__, **fields}


def _fields(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif hasattr(type(value), "model_fields"):
        names = list(type(value).model_fields)
    elif hasattr(value, "__struct_fields__"):
        names = list(value.__struct_fields__)
    else:
        raise TypeError(f"no idea how to show {value!r}")
    return [name for name in names if not name.startswith("_") and name not in _OURS_ALONE]


def tensor(value: Any) -> Any:
    return None if value is None else {"dtype": value.dtype, "shape": value.shape, "data": value.tolist()}


def loss_output(output: Any) -> Any:
    return {
        "type": output.loss_fn_output_type,
        "outputs": [{name: tensor(field) for name, field in one.items()} for one in output.loss_fn_outputs],
        "metrics": dict(output.metrics),
    }


def sampled(response: Any) -> Any:
    return {
        "sequences": [_sequence(sequence) for sequence in response.sequences],
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": plain(response.topk_prompt_logprobs),
        "target_prompt_logprobs": tensor(response.target_prompt_logprobs),
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
        "prompt_alt_tokens": response.prompt_alt_tokens
        and [tensor(response.prompt_alt_tokens.tokens), tensor(response.prompt_alt_tokens.logprobs)],
    }


def _sequence(sequence: Any) -> Any:
    return {
        "sequence_id": sequence.sequence_id,
        "stop_reason": sequence.stop_reason,
        "tokens": sequence.tokens,
        "tokens_np": [str(sequence.tokens_np.dtype), sequence.tokens_np.tolist()],
        "logprobs": sequence.logprobs,
        "logprobs_np": [str(sequence.logprobs_np.dtype), sequence.logprobs_np.tolist()],
        "topk_logprobs": plain(sequence.topk_logprobs),
    }


def failure(tinker: Any, error: BaseException) -> Any:
    """What `except` clauses and handlers can see of an error."""
    homes = ("builtins", tinker.__name__)
    return {
        "failure": type(error).__name__,
        "caught_by": [kind.__name__ for kind in type(error).__mro__ if kind.__module__.split(".")[0] in homes],
        "status_code": getattr(error, "status_code", None),
        "body": plain(getattr(error, "body", None)),
        "category": plain(getattr(error, "category", None)),
        "request_id": getattr(error, "request_id", None),
    }
