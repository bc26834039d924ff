"""JSON values for any model of the official package, drawn from its own annotations."""

from __future__ import annotations

import types
import typing
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from typing import Any

import pydantic
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

WORDS = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)
INTEGERS = st.integers(-(2**53), 2**53)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
TIMES = st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1), timezones=st.just(UTC))
FAMILIES = WORDS.filter(lambda name: name not in ("adam", "adamw", "dimuon"))
# Without null: the official client also drops it from inside free-form data, which ours keeps.
JSON = st.recursive(
    st.booleans() | INTEGERS | FLOATS | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)

NARROWER: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    # Where our types refuse at the door what a server would refuse later.
    ("EncodedTextChunk", "tokens"): st.lists(st.integers(0, 2**31 - 1), max_size=5),
    ("LoraConfig", "rank"): st.integers(1, 512),
    ("SampleRequest", "num_samples"): st.integers(1, 100),
    ("SampleRequest", "topk_prompt_logprobs"): st.integers(0, 100),
    ("SampleRequest", "topk_sample_logprobs"): st.integers(0, 100),
    ("SampleRequest", "prompt_alt_tokens_k"): st.integers(0, 100),
    ("SampleRequest", "prompt_logprobs_last_n"): st.none() | st.integers(1, 100),
    ("SamplingParams", "max_tokens"): st.none() | st.integers(0, 2**31),
    ("SamplingParams", "temperature"): st.floats(0, 2, width=32),
    ("SamplingParams", "top_k"): st.integers(-1, 1000),
    ("SamplingParams", "top_p"): st.floats(0, 1, width=32),
    ("SaveWeightsExternalRequest", "age_encryption_recipients"): st.none() | st.lists(WORDS, max_size=10),
    # The official client always sends a dict; without one its own model could not read the body back.
    ("CreateSessionRequest", "user_metadata"): st.dictionaries(WORDS, JSON, max_size=2),
    # By the name of a family that ours know they make its class, with the fields that belong to it.
    ("OptimizerConfigBase", "type"): FAMILIES,
    ("OptimParamsBase", "type"): FAMILIES,
    # Base64, as JSON carries bytes.
    ("ImageChunk", "data"): st.just("aGVsbG8="),
    ("DmelChunk", "dmel"): st.just("AAED"),
    # Tensors whose parts fit each other.
    ("SampleRequest", "target_prompt_logprobs"): st.none()
    | st.just({"data": [1, -1], "dtype": "int64", "shape": [1, 2]})
    | st.just(
        {
            "data": [7],
            "dtype": "int64",
            "shape": [2, 2],
            "sparse_crow_indices": [0, 0, 1],
            "sparse_col_indices": [1],
        }
    ),
    # An event of the official package may be labelled as any other; ours are labelled as what they are.
    ("SessionStartEvent", "event"): st.just("SESSION_START"),
    ("SessionEndEvent", "event"): st.just("SESSION_END"),
    ("UnhandledExceptionEvent", "event"): st.just("UNHANDLED_EXCEPTION"),
    ("GenericEvent", "event"): st.just("GENERIC_EVENT"),
}


@cache
def values_of(model: type[pydantic.BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """The fields of a model as JSON values; fields with a default are sometimes left out."""
    required, optional = {}, {}
    for name, info in model.model_fields.items():
        # The official union of finished and failed futures needs its tag, which has a default all the same.
        always = info.is_required() or name == "state"
        (required if always else optional)[name] = _field(model, name, info)
    return st.fixed_dictionaries(required, optional=optional)


def _field(model: type[pydantic.BaseModel], name: str, info: FieldInfo) -> st.SearchStrategy[Any]:
    narrower = NARROWER.get((model.__name__, name))
    return _hint(info.annotation, info.metadata) if narrower is None else narrower


def _hint(hint: Any, notes: typing.Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _hint(args[0], args[1:])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_hint(arg, notes) for arg in args])
    if origin is not None and issubclass(origin, dict):
        return st.dictionaries(WORDS, _hint(args[1]), max_size=2)
    if origin is not None:
        return st.lists(_hint(args[0]), min_size=_bound(notes, "min_length", 0), max_size=3)
    return _plain(hint, notes)


def _plain(hint: Any, notes: typing.Sequence[Any]) -> st.SearchStrategy[Any]:
    if isinstance(hint, type) and issubclass(hint, pydantic.BaseModel):
        return values_of(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from([member.value for member in hint])
    if hint is int:
        lowest, highest = _bound(notes, "ge", -(2**53)), _bound(notes, "le", 2**53)
        return st.integers(lowest, highest)
    if hint is float:
        lowest, below = _bound(notes, "ge", None), _bound(notes, "lt", None)
        return st.floats(lowest, below, exclude_max=below is not None, allow_nan=False, allow_infinity=False, width=32)
    if hint is str:
        return WORDS.filter(lambda text: len(text) >= _bound(notes, "min_length", 0))
    return {bool: st.booleans(), type(None): st.none(), Any: JSON, object: JSON}.get(hint, TIMES.map(_text))


def _text(time: datetime) -> str:
    return time.isoformat()


def _bound(notes: typing.Sequence[Any], name: str, default: Any) -> Any:
    return next((getattr(note, name) for note in notes if hasattr(note, name)), default)
