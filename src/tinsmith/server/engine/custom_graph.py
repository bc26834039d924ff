"""Custom losses: traced graphs of operations, run by an interpreter over an allow-list.

    CustomLoss.from_graph    checks every node of a graph once: operation, references, output
    CustomLoss.run           one datum's log-probabilities and inputs -> loss, metrics, gradient

A graph comes from a stranger. It can name only what `graph_operations` lists, and names are looked up, never resolved.
The number of nodes is bounded, and so is the number of elements that a run may touch, counted before each step from the
shapes of its arguments: a graph can neither exhaust memory nor keep the worker busy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.graph_operations import DTYPES, FUNCTIONS, KEYWORDS, METHODS, PLACE_OF_INPLACE
from tinsmith.types import CustomLossGraph, CustomLossNode

MAX_NODES = 1000
MAX_ELEMENTS = 2**25
"""Elements that the steps of one run may read and compute: over a thousand for each token of a long context."""

_TENSOR_SIZE = 256
"""So many elements count for a tensor of its own, as it takes much more memory and time than the number in it."""

_MAX_NESTING = 8
_MAX_NUMBER = 2**63
_CREATION = frozenset({"torch.zeros", "torch.ones", "torch.full", "new_zeros", "new_ones", "new_full"})
_INDEXING = frozenset({"operator.getitem", "_operator.getitem", "torch.index_select", "index_select"})
_SPLITTING = frozenset({"torch.unbind", "unbind"})
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

# --- checking a graph ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CustomLoss:
    """A graph that passed the checks."""

    nodes: tuple[CustomLossNode, ...]
    input_names: tuple[str, ...]
    """What it reads beside `logprobs`, in its order."""

    @classmethod
    def from_graph(cls, graph: CustomLossGraph | None) -> CustomLoss:
        if graph is None:
            raise InvalidInputError(
                "The loss 'custom' needs the id of an uploaded loss; pass loss_id in loss_fn_config.",
                field="loss_fn_config['loss_id']",
            )
        nodes = tuple(graph.nodes)
        if not 1 < len(nodes) <= MAX_NODES:
            raise _refused(f"has {len(nodes)} nodes; 2 to {MAX_NODES} are possible", len(nodes))
        for node in nodes:
            _check_node(node)
        names = tuple(node.target for node in nodes if node.op == "placeholder")
        if names[:1] != ("logprobs",) or nodes[-1].op != "output":
            raise _refused("must begin with the input logprobs and end with its output", names)
        return cls(nodes, names[1:])

    def run(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> tuple[float, dict[str, float], Tensor]:
        """Loss, metrics and the gradient with respect to the log-probabilities of one datum, on the host in float32."""
        with torch.enable_grad():
            leaf = logprobs.detach().to("cpu", torch.float32).requires_grad_()
            loss, metrics = _checked_output(self._result(leaf, inputs))
            if not loss.requires_grad:
                raise _refused("does not depend on logprobs, so there is nothing to train; compute it from them", loss)
            try:
                (gradient,) = torch.autograd.grad(loss, leaf)
            except RuntimeError as error:
                raise _refused(f"has no gradient with respect to logprobs: {error}", loss) from error
        return float(loss.detach()), metrics, gradient

    def _result(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Any:
        values: dict[str, Any] = {}
        room = MAX_ELEMENTS
        for node in self.nodes:
            if node.op == "placeholder":
                values[node.name] = logprobs if node.target == "logprobs" else inputs[node.target]
                continue
            args = [_decoded(argument, values) for argument in node.args]
            kwargs = {name: _decoded(argument, values) for name, argument in node.kwargs.items()}
            if node.op == "output":
                return args[0] if args else None
            room -= _size_before(node.target, args, kwargs)
            if room < 0:
                raise _refused(f"computes more than {MAX_ELEMENTS} numbers for one datum, at {node.name}", node.target)
            values[node.name] = _called(node, args, kwargs)
        raise AssertionError("a checked graph ends with its output")


def _check_node(node: CustomLossNode) -> None:
    if node.op == "call_function" and node.target not in FUNCTIONS:
        raise _refused(f"calls {node.target}, which is not among the functions this server runs", node.target)
    if node.op == "call_method" and node.target not in METHODS:
        raise _refused(f"calls the method {node.target}, which is not among those this server runs", node.target)
    if node.op in ("get_attr", "call_module"):
        raise _refused(f"uses {node.op} {node.target}; pass tensors as loss_fn_inputs instead", node.target)
    if unknown := sorted(node.kwargs.keys() - KEYWORDS):
        raise _refused(f"passes {unknown[0]} to {node.target}, which is not possible here", unknown[0])
    # An inplace=True would write to the inputs.
    if node.kwargs.get("inplace"):
        raise _refused(f"passes inplace=True to {node.target}; leave it out", node.target)


def _refused(reason: str, value: object = None) -> InvalidInputError:
    return InvalidInputError(f"The custom loss {reason}.", field="custom_loss", value=value)


# --- running it ------------------------------------------------------------------------------------------------------


def _called(node: CustomLossNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    table = METHODS if node.op == "call_method" else FUNCTIONS
    try:
        if node.op == "call_method" and not (args and isinstance(args[0], Tensor)):
            raise ValueError("its first argument is not a tensor")
        if "operator." in node.target and not node.target.endswith("getitem"):
            _check_operands(args)
        if len(args) > PLACE_OF_INPLACE.get(node.target, len(args)):
            raise ValueError("it takes no argument that lets it write to its input")
        value = table[node.target](*args, **kwargs)
    except Exception as error:  # torch raises whatever it likes for arguments that make no sense
        raise _refused(f"failed in {node.name} = {node.target}: {error}", node.target) from error
    if isinstance(value, int) and abs(value) > _MAX_NUMBER:
        raise _refused(f"computes the number {value:.3e} in {node.name}; use floating point", node.target)
    return value


def _check_operands(args: Sequence[Any]) -> None:
    """Sequences times a number are as large as the number."""
    for argument in args:
        if not isinstance(argument, Tensor | bool | int | float):
            raise ValueError(f"a {type(argument).__name__} is neither a tensor nor a number")


def _size_before(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """At most how many elements an operation will read and compute."""
    arguments = [*args, *kwargs.values()]
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    sequences = [argument for argument in arguments if isinstance(argument, list | tuple)]
    listed = [item for sequence in sequences for item in sequence if isinstance(item, Tensor)]
    size: int = sum(tensor.numel() for tensor in (*tensors, *listed))
    if target in _CREATION:
        # The shape is a sequence, or all the numbers there are.
        numbers = map(_number, [item for sequence in sequences for item in sequence] or arguments)
        return size + math.prod(abs(number) for number in numbers if isinstance(number, int))
    if target == "torch.arange":
        return math.ceil(_length_of_range(args, kwargs))
    if target in _INDEXING:
        return size + _indexed_size(tensors, listed)
    if target in _SPLITTING:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return size + _TENSOR_SIZE * max((_length(tensor, dim) for tensor in tensors), default=0)
    return size + math.prod(_broadcast_shape(tensors))


def _length(tensor: Tensor, dim: Any) -> int:
    """Along a dimension, or along the longest if it cannot be told which is meant."""
    is_known = isinstance(dim, int) and -tensor.ndim <= dim < tensor.ndim
    length: int = tensor.shape[dim] if is_known else max(tensor.shape, default=0)
    return length


def _number(argument: Any) -> Any:
    """A tensor of one number is as good as the number, also for a shape."""
    return argument.item() if isinstance(argument, Tensor) and argument.numel() == 1 else argument


def _length_of_range(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """What torch would refuse has no length."""
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    given = {"start": 0, "step": 1, **dict(zip(names, args, strict=False)), **kwargs}
    numbers = [_number(given.get(name)) for name in ("start", "end", "step")]
    if not all(isinstance(number, int | float) for number in numbers) or not numbers[2]:
        return 0
    try:
        length = abs((numbers[1] - numbers[0]) / numbers[2])
    except OverflowError:
        length = math.inf
    return min(length, MAX_ELEMENTS + 1) if not math.isnan(length) else MAX_ELEMENTS + 1


def _broadcast_shape(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape of an elementwise result; where sizes do not fit, the larger counts and the operation will fail."""
    rank = max((tensor.ndim for tensor in tensors), default=0)
    padded = [(1,) * (rank - tensor.ndim) + tuple(tensor.shape) for tensor in tensors]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _indexed_size(tensors: Sequence[Tensor], listed: Sequence[Tensor]) -> int:
    """Each entry of an index picks a slice; several indices, one inside the other, are taken as independent."""
    if not tensors:
        return 0
    source, *indices = *tensors, *listed
    slice_size: int = source.numel() // max(1, min(source.shape, default=1))
    return slice_size * math.prod(index.numel() for index in indices) if indices else 0


def _decoded(argument: Any, values: Mapping[str, Any], depth: int = 0) -> Any:
    """JSON values stand for themselves, others are objects with one key."""
    if depth > _MAX_NESTING:
        raise _refused(f"nests arguments more than {_MAX_NESTING} deep")

    def decoded(item: Any) -> Any:
        return _decoded(item, values, depth + 1)

    match argument:
        case list():
            return [decoded(item) for item in argument]
        case {"ref": str(name)}:
            if name not in values:
                raise _refused(f"refers to {name}, which no earlier node computes", name)
            return values[name]
        case {"tuple": list(items)}:
            return tuple(decoded(item) for item in items)
        case {"dict": dict(items)}:
            return {key: decoded(item) for key, item in items.items()}
        case {"slice": [start, stop, step]}:
            return slice(decoded(start), decoded(stop), decoded(step))
        case {"ellipsis": True}:
            return ...
        case {"float": "inf" | "-inf" | "nan" as text}:
            return float(text)
        case {"dtype": str(name)} if name in DTYPES:
            return DTYPES[name]
        case {"device": str()}:
            # A loss runs where the server decides.
            return torch.device("cpu")
        case None | bool() | int() | float() | str():
            return argument
    raise _refused(f"has an argument of unknown form: {argument!r}", argument)


def _checked_output(output: Any) -> tuple[Tensor, dict[str, float]]:
    if not isinstance(output, tuple | list) or len(output) != 2 or not isinstance(output[1], dict):
        raise _refused("must return (loss, metrics), metrics being a dict", output)
    loss, metrics = output
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
        raise _refused("must return a scalar tensor; return its sum() or mean()", loss)
    numbers = {}
    for name, value in metrics.items():
        if not _METRIC_NAME.fullmatch(name):
            raise _refused(f"names a metric {name!r}; use custom/<name>:sum or custom/<name>:mean", name)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise _refused(f"must return the metric {name!r} as a tensor of one number; reduce it to one", name)
        numbers[name] = float(value.detach())
    return loss, numbers
