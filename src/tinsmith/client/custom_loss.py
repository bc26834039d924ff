"""A loss that runs on the user's machine, turned into weights for the server's cross-entropy.

    forward_data           what the first request carries: targets and weights
    logprobs_from          the log-probabilities it brought back, shaped like the targets
    torch_loss             the user's loss C and its gradients dC/dlogprobs, by autograd
    numpy_loss             the same for a function that returns its own gradients
    backward_data          what the second request carries: weights = -dC/dlogprobs
    with_custom_metrics    the second answer, with C as its loss

The server's cross-entropy is `sum(-weight * logprob)`. It is linear in the log-probabilities, so with these weights its
gradient with respect to the model is that of C, whatever C is. Nothing here talks to a server, and nothing here may run
on the I/O loop: the user's function can take as long as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinsmith.errors import InvalidInputError, InvalidTypeError, MissingExtraError, UnsupportedByServerError
from tinsmith.types import Datum, ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    import torch

FloatArray = npt.NDArray[np.float32]

TorchLossFn = Callable[[list[Datum], "list[torch.Tensor]"], "tuple[torch.Tensor, Mapping[str, float]]"]
NumpyLossFn = Callable[[list[Datum], list[FloatArray]], tuple[float, Sequence[npt.ArrayLike], Mapping[str, float]]]


@dataclass(frozen=True)
class LossResult:
    """What a custom loss computed: C, the user's metrics, and dC/dlogprobs of every datum."""

    loss: float
    metrics: Mapping[str, float]
    gradients: tuple[FloatArray, ...]


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """The data of the forward pass that asks for log-probabilities; it trains nothing, so its weights do not matter."""
    if not data:
        raise InvalidInputError("data is empty; a custom loss needs at least one datum.", field="data", value=data)
    return [_cross_entropy_datum(datum, _weights_or_zeros(datum, index)) for index, datum in enumerate(data)]


def backward_data(data: Sequence[Datum], gradients: Sequence[FloatArray]) -> list[Datum]:
    """The data of the pass that trains: cross-entropy whose gradient is that of the custom loss."""
    return [
        _cross_entropy_datum(datum, TensorData.from_numpy_sparse(-gradient))
        for datum, gradient in zip(data, gradients, strict=True)
    ]


def logprobs_from(output: ForwardBackwardOutput, data: Sequence[Datum]) -> list[FloatArray]:
    """The log-probabilities a forward pass brought back, one array per datum in the shape of its targets."""
    if len(output.loss_fn_outputs) != len(data):
        raise UnsupportedByServerError(
            f"The forward pass was sent {len(data)} data and answered for {len(output.loss_fn_outputs)}; "
            "a custom loss needs the log-probabilities of every one."
        )
    return [
        _shaped_logprobs(outputs.get("logprobs"), datum, index)
        for index, (outputs, datum) in enumerate(zip(output.loss_fn_outputs, data, strict=True))
    ]


def torch_loss(loss_fn: TorchLossFn, data: Sequence[Datum], logprobs: Sequence[FloatArray]) -> LossResult:
    """Run a torch loss on the original data, and differentiate it with respect to every log-probability."""
    torch, name = import_torch(), name_of(loss_fn)
    leaves = [torch.tensor(np.asarray(values, dtype=np.float32), requires_grad=True) for values in logprobs]
    with _noting_the_origin(name), torch.enable_grad():
        returned = loss_fn(list(data), leaves)
    loss, metrics = _unpacked(name, returned, ("loss", "metrics"))
    value = _differentiable_loss(name, loss)
    with _noting_the_origin(name):
        # Not autograd.grad(): parameters of the user's own, such as a learned temperature, get their gradients too.
        loss.backward()
    gradients = tuple(_leaf_gradient(name, leaf, index) for index, leaf in enumerate(leaves))
    return LossResult(value, _checked_metrics(name, metrics), gradients)


def numpy_loss(loss_fn: NumpyLossFn, data: Sequence[Datum], logprobs: Sequence[FloatArray]) -> LossResult:
    """Run a loss that returns `(loss, gradients, metrics)`, one gradient per datum; torch is not needed."""
    name = name_of(loss_fn)
    with _noting_the_origin(name):
        returned = loss_fn(list(data), [np.array(values, dtype=np.float32) for values in logprobs])
    loss, gradients, metrics = _unpacked(name, returned, ("loss", "gradients", "metrics"))
    value = _finite_loss(name, as_number(name, "loss", loss))
    return LossResult(value, _checked_metrics(name, metrics), _given_gradients(name, gradients, logprobs))


def with_custom_metrics(output: ForwardBackwardOutput, result: LossResult) -> ForwardBackwardOutput:
    """The server's answer with the custom loss as `loss:sum`; what the server called so is the surrogate's."""
    metrics = dict(output.metrics)
    # A server without this metric has trained all the same; failing now would lose the step.
    surrogate = {"surrogate_loss:sum": metrics.pop("loss:sum")} if "loss:sum" in metrics else {}
    merged = {**metrics, **result.metrics, "loss:sum": result.loss, **surrogate}
    return output.model_copy(update={"metrics": merged})


def import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("torch", "torch", "A custom loss") from error
    return torch


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def as_number(name: str, field: str, value: Any) -> float:
    """A Python, numpy or torch number as a float. Texts are refused although float() reads them."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is not a number")
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTypeError(
            f"{field} returned by the custom loss {name} must be one number, got {type(value).__name__} ({error}).",
            field=field,
            value=value,
        ) from error


def _cross_entropy_datum(datum: Datum, weights: TensorData) -> Datum:
    inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": weights}
    return datum.model_copy(update={"loss_fn_inputs": inputs})


def _weights_or_zeros(datum: Datum, index: int) -> TensorData:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise InvalidInputError(
            f"data[{index}] has no loss_fn_inputs['target_tokens']; a custom loss is computed from the "
            "log-probabilities of these tokens. Add them to the datum.",
            field=f"data[{index}].loss_fn_inputs",
            value=sorted(datum.loss_fn_inputs),
        )
    given = datum.loss_fn_inputs.get("weights")
    return given if given is not None else _zeros_like(targets)


def _zeros_like(tensor: TensorData) -> TensorData:
    return TensorData.from_parts(np.zeros(tensor.values.shape, dtype=np.float32), tensor.shape, tensor.csr)


def shape_of(tensor: TensorData) -> tuple[int, ...]:
    """The dense shape, also of a tensor made without one."""
    return tuple(tensor.values.shape if tensor.shape is None else tensor.shape)


def _shaped_logprobs(logprobs: TensorData | None, datum: Datum, index: int) -> FloatArray:
    if logprobs is None:
        raise UnsupportedByServerError(
            f"The forward pass returned no 'logprobs' for data[{index}]. A custom loss that runs on this machine needs "
            "a server whose cross_entropy returns them."
        )
    values = np.asarray(logprobs.to_numpy(), dtype=np.float32)
    shape = shape_of(datum.loss_fn_inputs["target_tokens"])
    if values.size != math.prod(shape):
        raise UnsupportedByServerError(
            f"The forward pass returned logprobs of shape {values.shape} for data[{index}], whose target_tokens have "
            f"shape {shape}; a custom loss needs one log-probability per target."
        )
    return values.reshape(shape)


@contextmanager
def _noting_the_origin(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"Raised by the custom loss {name}, which runs on this machine.")
        raise


def _unpacked(name: str, returned: object, parts: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(returned, tuple | list) or len(returned) != len(parts):
        raise InvalidTypeError(
            f"The custom loss {name} must return ({', '.join(parts)}), got {_described(returned)}.",
            field="loss_fn",
            value=returned,
        )
    return tuple(returned)


def _described(value: object) -> str:
    kind = type(value).__name__
    return f"a {kind} of length {len(value)}" if isinstance(value, tuple | list) else f"a {kind}"


def _differentiable_loss(name: str, loss: Any) -> float:
    if not isinstance(loss, import_torch().Tensor):
        raise InvalidTypeError(
            f"The custom loss {name} must return its loss as a torch tensor, got {_described(loss)}.",
            field="loss",
            value=loss,
        )
    if loss.numel() != 1:
        raise InvalidInputError(
            f"The custom loss {name} must return one number, got a tensor of shape {tuple(loss.shape)}; return its "
            "sum() or mean().",
            field="loss",
            value=tuple(loss.shape),
        )
    if not loss.requires_grad:
        raise InvalidInputError(
            f"The loss returned by {name} does not depend on the log-probabilities; compute it from the tensors passed "
            "in, without detach(), item() or torch.no_grad().",
            field="loss",
            value=loss.item(),
        )
    return _finite_loss(name, float(loss.detach()))


def _finite_loss(name: str, loss: float) -> float:
    if not math.isfinite(loss):
        raise InvalidInputError(
            f"The custom loss {name} returned {loss}, so nothing was trained. Look for log(0), an overflowing exp() or "
            "a division by zero, and for infinities in the log-probabilities.",
            field="loss",
            value=loss,
        )
    return loss


def _leaf_gradient(name: str, leaf: Any, index: int) -> FloatArray:
    if leaf.grad is None:
        raise InvalidInputError(
            f"The loss returned by {name} does not depend on the log-probabilities of data[{index}]; use them, add "
            f"0 * logprobs[{index}].sum() to the loss, or leave the datum out.",
            field=f"data[{index}]",
        )
    return _finite_gradient(name, leaf.grad.numpy().copy(), index)


def _given_gradients(name: str, gradients: object, logprobs: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
    if not isinstance(gradients, list | tuple | np.ndarray):
        raise InvalidTypeError(
            f"The custom loss {name} must return its gradients as a list of arrays, got {_described(gradients)}.",
            field="gradients",
            value=gradients,
        )
    if len(gradients) != len(logprobs):
        raise InvalidInputError(
            f"The custom loss {name} returned {len(gradients)} gradients for {len(logprobs)} data; return one array "
            "per datum, in the order of the data.",
            field="gradients",
            value=len(gradients),
        )
    shapes = [np.shape(values) for values in logprobs]
    return tuple(map(partial(_given_gradient, name), gradients, shapes, range(len(shapes))))


def _given_gradient(name: str, gradient: npt.ArrayLike, shape: tuple[int, ...], index: int) -> FloatArray:
    try:
        with np.errstate(over="ignore"):  # what overflows becomes an infinity, and is reported as one
            array = np.array(gradient, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"The custom loss {name} returned a gradient for data[{index}] that is no array of numbers: {error}.",
            field=f"gradients[{index}]",
            value=gradient,
        ) from error
    if array.shape != shape:
        raise InvalidInputError(
            f"The custom loss {name} returned a gradient of shape {array.shape} for data[{index}], whose "
            f"log-probabilities have shape {shape}; the two must be the same.",
            field=f"gradients[{index}]",
            value=array.shape,
        )
    return _finite_gradient(name, array, index)


def _finite_gradient(name: str, gradient: FloatArray, index: int) -> FloatArray:
    bad = np.argwhere(~np.isfinite(gradient))
    if len(bad):
        where = tuple(bad[0].tolist())
        raise InvalidInputError(
            f"The gradient of the custom loss {name} is not finite at {len(bad)} of the {gradient.size} "
            f"log-probabilities of data[{index}] ({gradient[where]} at {list(where)}), so nothing was trained. Look "
            "for log(0), sqrt(0), an overflowing exp() or a division by zero.",
            field=f"gradients[{index}]",
            value=float(gradient[where]),
        )
    gradient.setflags(write=False)
    return gradient


def _checked_metrics(name: str, metrics: object) -> Mapping[str, float]:
    if not isinstance(metrics, Mapping) or not all(isinstance(key, str) for key in metrics):
        raise InvalidTypeError(
            f"The custom loss {name} must return its metrics as a dict of numbers by name, got {_described(metrics)}; "
            "return {} if there are none.",
            field="metrics",
            value=metrics,
        )
    return MappingProxyType({key: as_number(name, f"metrics[{key!r}]", value) for key, value in metrics.items()})
