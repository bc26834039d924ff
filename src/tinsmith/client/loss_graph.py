"""A per-datum loss traced into plain data, which a server can run, or this machine in its place.

    trace_loss           fn(logprobs, *inputs) -> TracedLoss, refusing what the graph form cannot say
    LossHandle           a traced loss in a session, with the server's id if it was uploaded
    check_handle_data    does every datum carry what the loss reads?
    handle_loss          the loss of all data, computed here from the graph

The graph is the only form of a traced loss: what is uploaded is also what runs here, so both give the same numbers, and
a handle can be pickled, compared and digested without torch.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import operator
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Concatenate

from tinsmith.client.custom_loss import FloatArray, LossResult, as_number, import_torch, name_of, shape_of, torch_loss
from tinsmith.errors import InvalidInputError, InvalidTypeError
from tinsmith.types import CustomLossGraph, CustomLossInput, CustomLossInputRank, CustomLossNode, Datum, TensorData

if TYPE_CHECKING:
    import torch

PerDatumLossFn = Callable[Concatenate["torch.Tensor", ...], "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"]
"""From the log-probabilities of one datum and the inputs it names to a scalar loss and scalar metrics."""

MAX_INPUTS = 16
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
# The prefix keeps a loss's metrics apart from the server's own, such as loss:sum.
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
# `operator` is implemented in `_operator`, and its functions say so.
_CALLABLE_MODULES = frozenset({"torch", "math", "operator", "_operator"})
_HOST_METHODS = frozenset({"item", "numpy", "tolist"})
# While it traces, torch.fx replaces functions of torch.nn.Module and math for the whole process.
_tracing = threading.Lock()


@dataclass(frozen=True)
class TracedLoss:
    """What tracing found: the function's name, its inputs in order (`logprobs` first) and its operations."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    graph: CustomLossGraph = field(repr=False, hash=False)

    def in_session(self, session_id: str) -> LossHandle:
        return LossHandle(self.name, self.inputs, session_id, self.graph)


@dataclass(frozen=True)
class LossHandle:
    """A loss made by `ServiceClient.create_custom_loss`; `forward_backward_custom` takes it in place of a function."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    """`logprobs`, then the `loss_fn_inputs` the loss reads, in the order it takes them."""
    session_id: str
    """Only clients of this session can use the handle."""
    graph: CustomLossGraph = field(repr=False, hash=False)
    """The traced operations; they, and not the original function, are what runs."""
    loss_id: str | None = None
    """The server's name for the uploaded loss; None means that the loss runs on this machine."""

    @property
    def key(self) -> str:
        """The same for losses that compute the same from the same inputs, whatever they are called."""
        parts = [*self.inputs, self.graph]
        return hashlib.sha256("\n".join(part.model_dump_json() for part in parts).encode()).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(loss_input.name for loss_input in self.inputs[1:])


def trace_loss(fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]) -> TracedLoss:
    """Trace a per-datum loss; every rule it breaks is refused here, with the remedy."""
    import_torch()
    inputs = _declared_inputs(fn, input_ranks)
    nodes = [_encoded_node(name_of(fn), node) for node in _traced(fn).nodes]
    return TracedLoss(name_of(fn), inputs, CustomLossGraph(nodes=nodes))


def check_handle_data(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Raise unless every datum carries each input of the loss at its declared rank.

    The log-probabilities have the shape of `target_tokens`, so these stand in for them.
    """
    logprobs, *others = handle.inputs
    keys = [("target_tokens", logprobs), *((loss_input.name, loss_input) for loss_input in others)]
    for index, datum in enumerate(data):
        for key, loss_input in keys:
            _check_input(
                handle.name, f"data[{index}].loss_fn_inputs[{key!r}]", datum.loss_fn_inputs.get(key), loss_input
            )


def handle_loss(handle: LossHandle, data: Sequence[Datum], logprobs: Sequence[FloatArray]) -> LossResult:
    """Run a handle on this machine: once per datum, losses added, metrics combined as their names say."""

    def summed(data: list[Datum], leaves: list[Any]) -> tuple[Any, dict[str, float]]:
        losses, metrics = [], []
        for index, (datum, leaf) in enumerate(zip(data, leaves, strict=True)):
            inputs = [leaf, *(datum.loss_fn_inputs[name].to_torch() for name in handle.input_names)]
            loss, datum_metrics = _run_on_datum(handle, inputs, index)
            losses.append(loss)
            metrics.append(datum_metrics)
        return sum(losses), _combined(metrics)

    summed.__name__ = handle.name
    return torch_loss(summed, data, logprobs)


# Tracing: from a function to nodes


def _declared_inputs(fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]) -> tuple[CustomLossInput, ...]:
    if not inspect.isfunction(fn):
        raise InvalidTypeError(
            f"A custom loss must be a function made with def, got {type(fn).__name__}; wrap it: "
            "def loss(logprobs, advantages): ...",
            field="fn",
            value=fn,
        )
    parameters = list(inspect.signature(fn).parameters.values())
    names = [parameter.name for parameter in parameters]
    if names[:1] != ["logprobs"]:
        raise _refused(
            fn.__name__,
            "must take logprobs as its first parameter, followed by the loss_fn_inputs it reads, such as "
            f"def {fn.__name__}(logprobs, advantages)",
            names,
        )
    if len(names) > MAX_INPUTS:
        raise _refused(fn.__name__, f"takes {len(names)} parameters; at most {MAX_INPUTS} can be sent", names)
    for parameter in parameters:
        _check_parameter(fn.__name__, parameter)
    _check_ranks(fn.__name__, names, input_ranks)
    return tuple(CustomLossInput(name=name, rank=input_ranks[name]) for name in names)


def _check_parameter(loss: str, parameter: inspect.Parameter) -> None:
    if not _INPUT_NAME.fullmatch(parameter.name):
        raise _refused(
            loss,
            f"has a parameter {parameter.name!r}; a name has at most 64 lowercase letters, digits and underscores, and "
            "does not begin with a digit. Rename the parameter and the loss_fn_inputs entry",
            parameter.name,
        )
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        raise _refused(
            loss,
            f"declares {str(parameter)!r}; name each input as a plain positional parameter, without *, ** or "
            "keyword-only ones",
            parameter.name,
        )
    if parameter.default is not parameter.empty:
        raise _refused(
            loss,
            f"gives {parameter.name!r} a default; every input is read from the data, so remove the default, and write "
            "constants into the function",
            parameter.name,
        )


def _check_ranks(loss: str, names: list[str], input_ranks: Mapping[str, CustomLossInputRank]) -> None:
    if not isinstance(input_ranks, Mapping):
        raise InvalidTypeError(
            f"input_ranks must be a dict from parameter names to ranks, got {type(input_ranks).__name__}.",
            field="input_ranks",
            value=input_ranks,
        )
    if set(input_ranks) != set(names):
        raise _refused(
            loss,
            f"takes {', '.join(names)}, but input_ranks has {', '.join(map(str, input_ranks)) or 'nothing'}; give the "
            "rank of each parameter, logprobs included",
            dict(input_ranks),
        )
    for name, rank in input_ranks.items():
        allowed = (1, 2) if name == "logprobs" else (0, 1, 2)
        if type(rank) is not int or rank not in allowed:
            raise _refused(
                loss,
                f"declares {name} with rank {rank!r}; use {' or '.join(map(str, allowed))} "
                "(0: one number, 1: [T], 2: [T, K])",
                rank,
            )


def _traced(fn: PerDatumLossFn) -> Any:
    from torch.fx import Tracer

    try:
        with _tracing:
            return Tracer().trace(fn)
    except Exception as error:
        raise _refused(
            name_of(fn),
            f"cannot be traced by torch.fx ({type(error).__name__}: {error}). Do not branch or loop on tensor values "
            "(use torch.where), call modules (use torch.nn.functional) or use parameters from outside, and call only "
            "torch, math and operator",
        ) from error


def _encoded_node(loss: str, node: Any) -> CustomLossNode:
    if node.op == "call_function":
        target = _function_name(loss, node.target)
    elif node.op == "call_method":
        target = _method_name(loss, node.target)
    elif node.op == "get_attr":
        raise _refused(
            loss,
            "uses a tensor from outside, or makes one from constants; read it as one of the loss_fn_inputs, or make it "
            "from an input, as torch.zeros_like(logprobs) does",
            node.target,
        )
    else:
        target = str(node.target)
    if node.op == "output":
        _check_output(loss, node.args[0])
    return CustomLossNode(
        op=node.op,
        name=node.name,
        target=target,
        args=[_encoded(loss, argument) for argument in node.args],
        kwargs={name: _encoded(loss, argument) for name, argument in node.kwargs.items()},
    )


def _function_name(loss: str, function: Callable[..., Any]) -> str:
    # Private, but the only source of the names that servers know; torch's own graph compilers rely on it too.
    from torch.fx.node import _get_qualified_name

    module = getattr(function, "__module__", None) or "an unknown module"
    if function is not getattr and module.partition(".")[0] not in _CALLABLE_MODULES:
        raise _refused(
            loss,
            f"calls {name_of(function)} of {module}; only functions of torch, math and operator can be sent",
            name_of(function),
        )
    name: str = _get_qualified_name(function)
    return name.removeprefix("_") if name.startswith("_operator.") else name


def _method_name(loss: str, method: str) -> str:
    if method == "backward":
        raise _refused(loss, "calls backward(); return the loss, and the backward pass follows by itself", method)
    if method in _HOST_METHODS:
        raise _refused(loss, f"calls {method}(), which leaves torch; keep every value a tensor, metrics too", method)
    if not hasattr(import_torch().Tensor, method):
        raise _refused(loss, f"calls {method}(), which is no method of torch.Tensor", method)
    return method


def _check_output(loss: str, output: Any) -> None:
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise _refused(loss, f"must return (loss, metrics), got {output!r}", output)
    value, metrics = output
    if not _is_traced(value):
        raise _refused(loss, f"must return its loss as a tensor computed from logprobs, got {value!r}", value)
    if not isinstance(metrics, dict):
        raise _refused(loss, f"must return its metrics as a dict, got {metrics!r}; return {{}} for none", metrics)
    for name, metric in metrics.items():
        if not isinstance(name, str) or not _METRIC_NAME.fullmatch(name):
            raise _refused(
                loss,
                f"names a metric {name!r}; use custom/<name>:sum or custom/<name>:mean with a lowercase name of up to "
                "64 characters. The ending says how the values of several data are combined",
                name,
            )
        if not _is_traced(metric):
            raise _refused(loss, f"must return the metric {name!r} as a tensor, got {metric!r}", metric)


def _is_traced(value: object) -> bool:
    from torch.fx import Node

    return isinstance(value, Node)


def _refused(loss: str, reason: str, value: object = None) -> InvalidInputError:
    return InvalidInputError(f"The custom loss {loss} {reason}.", field="fn", value=value)


# Arguments: JSON values stand for themselves, all others are objects with one key


def _encoded(loss: str, argument: Any) -> Any:
    torch = import_torch()
    encode = partial(_encoded, loss)
    match argument:
        case None | bool() | int() | str():
            return argument
        case float():
            # float() also turns numpy's float64, which is a float, into a plain one
            return float(argument) if math.isfinite(argument) else {"float": str(float(argument))}
        case list():
            return [encode(item) for item in argument]
        case tuple():
            return {"tuple": [encode(item) for item in argument]}
        case dict() if all(isinstance(key, str) for key in argument):
            return {"dict": {key: encode(item) for key, item in argument.items()}}
        case slice():
            return {"slice": [encode(argument.start), encode(argument.stop), encode(argument.step)]}
        case EllipsisType():
            return {"ellipsis": True}
        case torch.fx.Node():
            return {"ref": argument.name}
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return {type(argument).__name__: str(argument).removeprefix("torch.")}
    raise _refused(
        loss, f"passes a {type(argument).__name__} to an operation; pass numbers, texts or tensors", argument
    )


def _decoded(argument: Any, values: Mapping[str, Any]) -> Any:
    decode = partial(_decoded, values=values)
    match argument:
        case list():
            return [decode(item) for item in argument]
        case {"ref": name}:
            return values[name]
        case {"tuple": items}:
            return tuple(decode(item) for item in items)
        case {"dict": items}:
            return {key: decode(item) for key, item in items.items()}
        case {"slice": bounds}:
            return slice(*(decode(bound) for bound in bounds))
        case {"ellipsis": True}:
            return ...
        case {"float": text}:
            return float(text)
        case {"device": name}:
            return import_torch().device(name)
        case {"dtype": name} | {"layout": name} | {"memory_format": name}:
            return getattr(import_torch(), name)
    return argument


# Running: from nodes to numbers


def _check_input(loss: str, where: str, tensor: TensorData | None, loss_input: CustomLossInput) -> None:
    if tensor is None:
        raise InvalidInputError(
            f"{where} is missing; the custom loss {loss} computes {loss_input.name} from it. Add it to the datum.",
            field=where,
        )
    rank = len(shape_of(tensor))
    if rank != loss_input.rank:
        raise InvalidInputError(
            f"{where} has rank {rank}, but the custom loss {loss} declared {loss_input.name} with rank "
            f"{loss_input.rank}; reshape the tensor, or create the loss with the rank the data have.",
            field=where,
            value=shape_of(tensor),
        )


def _run_on_datum(handle: LossHandle, inputs: list[Any], index: int) -> tuple[Any, dict[str, float]]:
    try:
        loss, metrics = _run(handle.graph, inputs)
    except Exception as error:
        error.add_note(f"The custom loss {handle.name} was running on data[{index}].")
        raise
    if tuple(getattr(loss, "shape", "?")) != ():
        raise InvalidInputError(
            f"The custom loss {handle.name} must return a scalar tensor for every datum, got {loss!r} for "
            f"data[{index}]; return its sum() or mean().",
            field="loss",
            value=loss,
        )
    return loss, {name: as_number(handle.name, f"metrics[{name!r}]", value) for name, value in metrics.items()}


def _run(graph: CustomLossGraph, inputs: list[Any]) -> Any:
    remaining = iter(inputs)
    values: dict[str, Any] = {}
    for node in graph.nodes:
        arguments = [_decoded(argument, values) for argument in node.args]
        keywords = {name: _decoded(argument, values) for name, argument in node.kwargs.items()}
        match node.op:
            case "placeholder":
                values[node.name] = next(remaining)
            case "call_function":
                values[node.name] = _function_named(node.target)(*arguments, **keywords)
            case "call_method":
                values[node.name] = getattr(arguments[0], node.target)(*arguments[1:], **keywords)
            case "output":
                return arguments[0]
    raise AssertionError("a traced graph ends with its output")


def _function_named(name: str) -> Callable[..., Any]:
    if name == "getattr":
        return getattr
    root, _, path = name.partition(".")
    modules = {"torch": import_torch(), "math": math, "operator": operator}
    function: Callable[..., Any] = operator.attrgetter(path)(modules[root])
    return function


def _combined(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The names are those of the graph, so every datum has the same ones."""
    totals = {name: math.fsum(datum[name] for datum in metrics) for name in metrics[0]}
    return {name: total / len(metrics) if name.endswith(":mean") else total for name, total in totals.items()}
