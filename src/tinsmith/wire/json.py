"""JSON, both ways, for both halves.

Most calls are JSON. So are training and sampling with servers and clients that do not speak protobuf: a datum, a
forward/backward result and a sample then have the JSON forms that their types describe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.types import Datum, ForwardBackwardInput, LossFnType
from tinsmith.types._codecs import plain_or_refuse
from tinsmith.types._model import Model, Response

M = TypeVar("M", bound=Model)


def encode(value: object) -> bytes:
    """The JSON of a request, a response, or plain builtins."""
    if isinstance(value, Response):
        # Metrics and log-probabilities may be NaN or infinite. msgspec would write null, which no client takes for a
        # number; the standard library writes NaN, which Python clients read.
        plain = msgspec.to_builtins(value.to_builtins(), enc_hook=plain_or_refuse)
        return json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()
    return msgspec.json.encode(value.to_builtins() if isinstance(value, Model) else value, enc_hook=plain_or_refuse)


def decode(cls: type[M], data: bytes) -> M:
    """The object of this class in a JSON body; an `InvalidInputError` names the field that does not fit."""
    return cls.from_builtins(loads(data))


def loads(data: bytes) -> Any:
    """The builtins in a JSON body. NaN and infinity are understood, as other servers may send them."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        value = json.loads(data.decode())
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a character is none: no file or database takes it
        return value
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"This is not JSON: {error}", field="body", value=data[:200]) from None


def with_fields(body: bytes, **fields: object) -> bytes:
    """The JSON object `body` with more fields in front, without encoding it again."""
    head = msgspec.json.encode(fields)
    return head[:-1] + (b"" if body == b"{}" else b",") + body[1:]


def encode_forward_backward_parts(
    data: Sequence[Datum], loss_fn: LossFnType, loss_fn_config: Mapping[str, float | str] | None = None
) -> bytes:
    """The costly part of a training request, encoded before its model and number are known."""
    return encode(ForwardBackwardInput(list(data), loss_fn, loss_fn_config))


def encode_forward_backward(parts: bytes, *, model_id: str, seq_id: int, forward_only: bool = False) -> bytes:
    """The body for `/forward_backward`, or with `forward_only` for `/forward`."""
    name = "forward_input" if forward_only else "forward_backward_input"
    return msgspec.json.encode({name: msgspec.Raw(parts), "model_id": model_id, "seq_id": seq_id})
