"""Custom losses at random: a few operations, one after the other, on whatever is there and on awkward numbers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

FUNCTIONS = (
    "torch.arange", "torch.zeros", "torch.full", "torch.cat", "torch.stack", "torch.where", "torch.exp", "torch.cumsum",
    "torch.gather", "torch.logsumexp", "torch.pow", "torch.quantile", "torch.unknown", "torch.special.xlogy", "getattr",
    "torch.nn.functional.softmax", "torch.nn.functional.relu", "operator.getitem", "operator.mul", "operator.pow",
    "operator.sub", "math.exp", "eval",
)  # fmt: skip
METHODS = (
    "sum", "mean", "expand", "reshape", "view", "unsqueeze", "long", "new_full", "new_zeros", "detach", "clone", "size",
    "index_select", "masked_fill", "to", "transpose", "unbind", "sort", "clamp", "backward", "__class__",
)  # fmt: skip
_NUMBERS = (0, 1, -1, 2, 5, 6, 7, 64, 10**4, 10**7, 10**10, 2**62, 2**64, -(2**63), 10**400, 0.5, -2.5, 1e-12, 1e30)
_WORDS = ("shape", "dtype", "__class__", "mean", "sum", "", "cpu")
_KEYWORDS = ("dim", "dtype", "size", "start", "end", "step", "fill_value", "keepdim", "exponent", "index", "unknown")


def random_loss(
    random: Random, functions: Sequence[str] = FUNCTIONS, methods: Sequence[str] = METHODS
) -> dict[str, Any]:
    """The fields of `create_custom_loss` that say what is computed; mostly it cannot be."""
    nodes: list[dict[str, Any]] = [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]
    for number in range(random.randrange(1, 6)):
        nodes.append(_node(random, f"n{number}", [node["name"] for node in nodes], functions, methods))
    total = {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": random.choice(nodes)["name"]}]}
    metrics = {"custom/own:sum": {"ref": nodes[-1]["name"]}} if random.random() < 0.2 else {}
    results = {"tuple": [{"ref": "total"}, {"dict": metrics}]}
    output = {"op": "output", "name": "output", "target": "output", "args": [results]}
    inputs = [{"name": "logprobs", "rank": 1}]
    return {"name": "random", "inputs": inputs, "graph": {"format": 1, "nodes": [*nodes, total, output]}}


def _node(
    random: Random, name: str, known: Sequence[str], functions: Sequence[str], methods: Sequence[str]
) -> dict[str, Any]:
    is_method = random.random() < 0.5
    args = [_argument(random, known) for _ in range(random.choice([0, 0, 0, 1, 1, 2, 3]))]
    kwargs = {random.choice(_KEYWORDS): _argument(random, known) for _ in range(random.choice([0] * 8 + [1, 3]))}
    target = {"op": "call_method", "target": random.choice(methods)}
    if not is_method:
        target = {"op": "call_function", "target": random.choice(functions)}
    return {"name": name, **target, "args": [{"ref": random.choice(known)}, *args], "kwargs": kwargs}


def _argument(random: Random, known: Sequence[str], depth: int = 0) -> Any:
    match random.randrange(12):
        case 0 | 1 | 2 | 3:
            return random.choice(_NUMBERS)
        case 4 | 5 | 6:
            return {"ref": random.choice(known)}
        case 7:
            return random.choice(_WORDS)
        case 8:
            return random.choice([None, True, {"ellipsis": True}, {"dtype": "int64"}, {"float": "nan"}, {"ref": "no"}])
        case 9:
            return {"slice": [None, random.choice(_NUMBERS), random.choice([None, 1, -1])]}
    parts = [_argument(random, known, depth + 1) for _ in range(random.randrange(4))] if depth < 3 else []
    return random.choice([parts, {"tuple": parts}])
