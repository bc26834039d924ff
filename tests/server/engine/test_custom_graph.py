"""Custom graphs compute what the traced function computes, and can do nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tinsmith.client.loss_graph import trace_loss
from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.custom_graph import MAX_NODES, CustomLoss
from tinsmith.types import CustomLossGraph, CustomLossNode


def reinforce(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * advantages).sum(), {"custom/entropy:mean": -logprobs.mean()}


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = torch.exp(logprobs - old)
    best = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -best.sum() / logprobs.shape[0], {"custom/clipped:sum": (ratio > 1.2).float().sum()}


def masked(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    kept = logprobs[mask > 0]
    return functional.softplus(-kept[1:] + 2 ** kept[:-1]).mean() - functional.logsigmoid(kept).sum(), {}


def ranked(logprobs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    total = logprobs.sum(dim=-1, keepdim=True)
    picked = torch.where(targets[..., None] > 2, logprobs / total, torch.zeros_like(logprobs))
    positions = torch.arange(logprobs.size(0), dtype=torch.float32)
    best, _ = torch.max(picked, dim=1)
    return (best * positions).sum() + torch.logsumexp(picked.flatten(), 0), {"custom/best:sum": best.max()}


INPUTS = {
    "logprobs": -torch.rand(6, generator=torch.Generator().manual_seed(0)),
    "old": -torch.rand(6, generator=torch.Generator().manual_seed(1)),
    "advantages": torch.randn(6, generator=torch.Generator().manual_seed(2)),
    "mask": torch.tensor([1.0, 0, 1, 1, 0, 1]),
    "targets": torch.arange(6),
}


@pytest.mark.parametrize(
    ("function", "names"),
    [(reinforce, ["advantages"]), (clipped, ["old", "advantages"]), (masked, ["mask"]), (ranked, ["targets"])],
)
def test_a_traced_loss_gives_the_functions_loss_metrics_and_gradient(
    function: Callable[..., Any], names: list[str]
) -> None:
    logprobs = INPUTS["logprobs"] if function is not ranked else torch.stack([INPUTS["logprobs"], INPUTS["old"]], 1)
    traced = trace_loss(function, {"logprobs": logprobs.ndim, **dict.fromkeys(names, 1)})
    loss = CustomLoss.from_graph(traced.graph)
    assert loss.input_names == tuple(names)
    inputs = {name: INPUTS[name] for name in names}
    value, metrics, gradient = loss.run(logprobs, inputs)

    leaf = logprobs.clone().requires_grad_()
    expected, expected_metrics = function(leaf, *inputs.values())
    expected.backward()
    assert value == float(expected.detach())
    assert metrics == {name: float(metric.detach()) for name, metric in expected_metrics.items()}
    assert torch.equal(gradient, leaf.grad)


# --- graphs by hand --------------------------------------------------------------------------------------------------


def call(target: str, *args: Any, op: str = "call_function", name: str = "step", **kwargs: Any) -> CustomLossNode:
    return CustomLossNode(op=op, name=name, target=target, args=list(args), kwargs=kwargs)


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


P = ref("logprobs")


def graph(*nodes: CustomLossNode, result: Any = None) -> CustomLossGraph:
    """The nodes between `logprobs` and an output of the sum of the last one."""
    last = nodes[-1].name if nodes else "logprobs"
    return CustomLossGraph(
        nodes=[
            call("logprobs", op="placeholder", name="logprobs"),
            *nodes,
            call("sum", ref(last), op="call_method", name="total"),
            call("output", {"tuple": [result or ref("total"), {"dict": {}}]}, op="output", name="output"),
        ]
    )


def run(made: CustomLossGraph, length: int = 4) -> float:
    return CustomLoss.from_graph(made).run(-torch.ones(length), {})[0]


@pytest.mark.parametrize(
    "node",
    [
        call("os.system", "true"),
        call("builtins.eval", "1"),
        call("torch.load", "/etc/passwd"),
        call("torch.rand", 3),
        call("torch.Tensor.exp", P),
        call("torch.exp.__globals__", P),
        call("operator.attrgetter", "x"),
        call("exp_", P, op="call_method"),
        call("__class__", P, op="call_method"),
        call("numpy", P, op="call_method"),
        call("register_hook", P, op="call_method"),
        call("weight", op="get_attr"),
        call("layer", P, op="call_module"),
        call("torch.exp", P, out=P),
        call("torch.nn.functional.relu", P, inplace=True),
    ],
)
def test_what_is_not_listed_is_refused_before_anything_runs(node: CustomLossNode) -> None:
    with pytest.raises(InvalidInputError, match="custom loss"):
        CustomLoss.from_graph(graph(node))


@pytest.mark.parametrize(
    "nodes",
    [
        [call("getattr", P, "__class__")],
        [call("getattr", P, "grad_fn")],
        [call("operator.mul", {"tuple": [0.0]}, 10**9)],
        [call("operator.mul", "a", 10**9)],
        [call("torch.exp", ref("later"))],
        [call("torch.exp", {"module": "os"})],
        [call("torch.exp", {"dtype": "load"})],
        [call("torch.exp")],
        [call("torch.reshape", P, [7, 7])],
        [call("operator.getitem", P, 99)],
        [call("operator.truediv", 1, 0)],
        [call("math.exp", 1e9)],
        [call("exp", 3, op="call_method")],
        [call("to", P, "no-such-device", op="call_method")],
        [call("to", P, "cuda:99", op="call_method")],
        [call("torch.exp", P, name="e"), call("torch.nn.functional.relu", ref("e"), True)],
        [call("torch.nn.functional.leaky_relu", P, 0.1, 1)],
    ],
)
def test_what_cannot_be_computed_is_an_input_error_that_names_the_step(nodes: list[CustomLossNode]) -> None:
    with pytest.raises(InvalidInputError, match="custom loss"):
        run(graph(*nodes))


def squares(count: int) -> list[CustomLossNode]:
    return [
        call("operator.mul", ref(f"n{i}") if i else 10, ref(f"n{i}") if i else 10, name=f"n{i + 1}")
        for i in range(count)
    ]


LARGE = [
    call("detach", P, op="call_method", name="constant"),
    call("sum", ref("constant"), op="call_method", name="total_1"),
    call("long", ref("total_1"), op="call_method", name="whole"),
    call("add", ref("whole"), 10**10, op="call_method", name="large"),
]
"""A tensor of one large number."""
ZERO = call("torch.zeros", {"tuple": []}, dtype={"dtype": "int64"}, name="zero")


@pytest.mark.parametrize(
    "nodes",
    [
        [call("torch.zeros", 10**6, 10**6)],
        [call("torch.full", {"tuple": [10**9]}, 1.0)],
        [call("new_ones", P, [10**10], op="call_method")],
        [call("torch.arange", 10**12)],
        [call("torch.arange", 0, 1, 1e-12)],
        [call("torch.arange", step=1e-12, start=0, end=1)],
        [call("torch.arange", 10**400)],
        [*LARGE, call("torch.arange", ref("large"))],
        [*(call("torch.unbind", P, name=f"n{i}") for i in range(10)), call("torch.exp", P)],
        [
            ZERO,
            *(call("unbind", P, dim=ref("zero"), op="call_method", name=f"n{i}") for i in range(10)),
            call("torch.exp", P),
        ],
        [*LARGE, call("torch.zeros", ref("large"))],
        [*LARGE, call("torch.full", {"tuple": [ref("large")]}, 1.0)],
        [*LARGE, call("new_full", P, {"tuple": [ref("large")]}, 1.0, op="call_method")],
        [call("unsqueeze", P, 1, op="call_method", name="column"), call("operator.add", ref("column"), P)],
        [call("expand", P, 10**6, -1, op="call_method", name="wide"), call("torch.exp", ref("wide"))],
        [call("torch.cat", [P] * 9000)],
        squares(30),
        [call("operator.pow", 9, 9, name="n1"), call("operator.pow", 9, ref("n1"))],
    ],
)
def test_a_graph_cannot_use_more_than_its_share(nodes: list[CustomLossNode]) -> None:
    with pytest.raises(InvalidInputError, match="custom loss"):
        run(graph(*nodes), length=20_000)


def test_the_number_of_nodes_is_bounded() -> None:
    nodes = [call("torch.exp", P, name=f"n{i}") for i in range(MAX_NODES)]
    with pytest.raises(InvalidInputError, match=f"2 to {MAX_NODES}"):
        CustomLoss.from_graph(graph(*nodes))


def test_a_long_graph_on_a_long_datum_is_within_its_share() -> None:
    nodes = [call("torch.sigmoid", ref(f"n{i}") if i else P, name=f"n{i + 1}") for i in range(400)]
    assert run(graph(*nodes), length=32_768) > 0


def test_a_long_datum_may_often_be_taken_apart_into_few_tensors() -> None:
    rows = call("reshape", P, 4, -1, op="call_method", name="rows")
    nodes = [call("torch.unbind", ref("rows"), name=f"n{i}") for i in range(100)]
    assert run(graph(rows, *nodes, call("torch.exp", P)), length=32_768) > 0


def test_deep_nesting_is_refused() -> None:
    argument: Any = P
    for _ in range(50):
        argument = [argument]
    with pytest.raises(InvalidInputError, match="deep"):
        run(graph(call("torch.cat", argument)))


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ({"tuple": [P, {"dict": {}}]}, "scalar"),
        ({"tuple": [1.0, {"dict": {}}]}, "scalar"),
        (P, "must return"),
        ({"tuple": [ref("total"), {"dict": {"loss:sum": ref("total")}}]}, "custom/<name>:sum"),
        ({"tuple": [ref("total"), {"dict": {"custom/a:sum": P}}]}, "reduce it to one"),
    ],
)
def test_an_output_of_another_form_is_refused(output: Any, text: str) -> None:
    made = graph()
    nodes = [*made.nodes[:-1], call("output", output, op="output", name="output")]
    with pytest.raises(InvalidInputError, match=text):
        run(CustomLossGraph(nodes=nodes))


def test_a_loss_that_does_not_depend_on_the_model_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="nothing to train"):
        run(graph(call("torch.zeros", 3)))


def test_a_graph_begins_with_logprobs_and_ends_with_its_output() -> None:
    with pytest.raises(InvalidInputError, match="begin with the input logprobs"):
        CustomLoss.from_graph(CustomLossGraph(nodes=graph().nodes[1:]))
    with pytest.raises(InvalidInputError, match="end with its output"):
        CustomLoss.from_graph(CustomLossGraph(nodes=graph().nodes[:-1]))
