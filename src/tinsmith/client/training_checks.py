"""What is wrong with the arguments of a training client is said on the spot, before anything is sent."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, get_args

from tinsmith.client import loss_graph
from tinsmith.errors import InvalidInputError, InvalidTypeError, MissingExtraError
from tinsmith.types import Datum

Framework: TypeAlias = Literal["torch", "numpy"]

MAX_AGE_RECIPIENTS = 10
MIN_TTL_SECONDS, MAX_TTL_SECONDS = 3_600, 315_360_000
"""One hour and ten years."""


def checked_data(data: Sequence[Datum]) -> list[Datum]:
    if isinstance(data, Datum) or not isinstance(data, Iterable):
        raise InvalidTypeError(
            f"data must be a list of Datum, not a {type(data).__name__}; put a single Datum into a list.",
            field="data",
            value=data,
        )
    items = list(data)
    if not items:
        raise InvalidInputError("data is empty; pass at least one Datum.", field="data", value=data)
    for index, datum in enumerate(items):
        if not isinstance(datum, Datum):
            raise InvalidTypeError(
                f"data[{index}] is a {type(datum).__name__}, not a Datum.", field=f"data[{index}]", value=datum
            )
    return items


def check_loss_type_input(value: str | None) -> None:
    if value is None:
        return
    warnings.warn("loss_type_input is deprecated; leave it out.", FutureWarning, stacklevel=3)
    if value != "logprobs":
        raise InvalidInputError(
            f"loss_type_input is {value!r}; only 'logprobs' is possible.", field="loss_type_input", value=value
        )


def check_custom_loss(loss_fn: object, framework: object) -> None:
    if framework not in get_args(Framework):
        raise InvalidInputError(
            f"framework is {framework!r}; it must be one of {', '.join(get_args(Framework))}.",
            field="framework",
            value=framework,
        )
    if not isinstance(loss_fn, loss_graph.LossHandle) and not callable(loss_fn):
        raise InvalidTypeError(
            f"loss_fn must be a function or a handle from create_custom_loss(), not {loss_fn!r}; for a loss of the "
            "server, call forward_backward() with its name.",
            field="loss_fn",
            value=loss_fn,
        )


def check_torch_is_installed() -> None:
    """Without importing it: that takes a second or more, and happens in the thread that runs the loss."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch", "torch", "A custom loss")


def checked_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidInputError(
            f"name is {name!r}; a checkpoint needs a name such as 'step-100'.", field="name", value=name
        )
    return name


def check_ttl(seconds: int | None) -> None:
    if seconds is not None and not MIN_TTL_SECONDS <= seconds <= MAX_TTL_SECONDS:
        raise InvalidInputError(
            f"ttl_seconds is {seconds:,}; it must lie between {MIN_TTL_SECONDS:,} (one hour) and {MAX_TTL_SECONDS:,} "
            "(ten years), or be None to keep the checkpoint for ever.",
            field="ttl_seconds",
            value=seconds,
        )


def checked_recipients(recipients: Sequence[str] | None) -> list[str] | None:
    if recipients is None:
        return None
    if isinstance(recipients, str | bytes) or not isinstance(recipients, Iterable):
        raise InvalidTypeError(
            f"age_encryption_recipients must be a list of public keys, not a {type(recipients).__name__}; put a single "
            "key into a list.",
            field="age_encryption_recipients",
            value=recipients,
        )
    keys = list(recipients)
    if len(keys) > MAX_AGE_RECIPIENTS:
        raise InvalidInputError(
            f"{len(keys)} age recipients were given; at most {MAX_AGE_RECIPIENTS} are possible.",
            field="age_encryption_recipients",
            value=len(keys),
        )
    return keys


def warn_of_load_state(replacement: str) -> None:
    warnings.warn(
        f"Loading into an existing training client is deprecated; use ServiceClient.{replacement}().",
        FutureWarning,
        stacklevel=3,
    )
