"""Traced losses: the form that is sent, the rules, and running them here."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import pickle
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import torch.nn.functional as F  # noqa: N812
from tinker.lib.public_interfaces import custom_loss as official
from torch.overrides import get_overridable_functions

from tinsmith.client import loss_graph
from tinsmith.client.loss_graph import LossHandle, check_handle_data, handle_loss, trace_loss
from tinsmith.errors import InvalidInputError, MissingExtraError
from tinsmith.types import CreateCustomLossRequest, Datum, ModelInput, TensorData

# Losses that can be traced. Each parameter is a vector of five numbers unless RANKS says otherwise.


def negative_log_likelihood(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


def clipped_ratio(logprobs, old_logprobs, advantages):
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = torch.clamp(ratio, min=0.8, max=1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    outside = ((ratio < 0.8) | (ratio > 1.2)).float().mean()
    return loss, {"custom/clip-frac:mean": outside, "custom/ratio.max:mean": ratio.max()}


def functional_forms(logprobs, weights):
    loss = F.softplus(-logprobs).sum() - F.logsigmoid(logprobs).sum() + F.huber_loss(logprobs, weights)
    return loss + torch.special.expit(logprobs).mean() + F.relu(logprobs + 1).sum() + torch.linalg.norm(logprobs), {}


def indexing(logprobs):
    shifted = torch.cat([logprobs[1:], logprobs[:1]], dim=0)
    picked = logprobs[..., 0] + logprobs[-1] + shifted[None, :, None].sum((0, 1), keepdim=True).squeeze()
    return picked + logprobs[::2].sum(), {}


def shapes_and_numbers(logprobs, weights):
    length = logprobs.shape[0]
    scaled = logprobs.sum() / length / math.sqrt(2.0) + logprobs.new_zeros(length).sum()
    return scaled + weights.numel() * logprobs.mean(), {"custom/a/b_c:sum": logprobs.size(0) * scaled}


def types_and_layouts(logprobs, weights):
    wide = logprobs.to(torch.float64).to(device=torch.device("cpu"))
    kept = torch.zeros_like(wide, layout=torch.strided, memory_format=torch.preserve_format)
    return (wide * weights.double() + kept).sum().to(dtype=torch.float32), {}


def infinities(logprobs, weights):
    hidden = torch.where(weights > 0.5, logprobs, float("-inf"))
    return torch.logsumexp(torch.nan_to_num(hidden, nan=math.nan, posinf=3.5, neginf=-50), 0) + logprobs.sum(), {}


def unused_work(logprobs, weights):
    torch.exp(weights)
    return logprobs.sum(), {}


def splits(logprobs):
    first, second = torch.split(logprobs, [2, 3])[0], logprobs.unbind()[4]
    return first.sum() * second + torch.einsum("i,i->", logprobs, logprobs), {"custom/pair:mean": second.detach()}


def wide_targets(logprobs, teacher, scale):
    loss = -(F.softmax(teacher, dim=-1) * logprobs).sum(dim=-1).mean() * scale
    entropy = -(logprobs.exp() * logprobs).sum()
    return [loss, {"custom/entropy:mean": entropy, "custom/scale:sum": scale}]


def operators(logprobs, weights):
    mixed = +(logprobs**2) % 3 - 2 / (weights + 2) + weights // 1 + abs(logprobs) + (1 - weights)
    return operator.truediv((mixed @ weights), 2) + logprobs.sum(), {}


def numpy_constant(logprobs):
    return (logprobs * np.float64(0.3)).sum(), {}


def aten_calls(logprobs):
    return torch.ops.aten.sum(torch.ops.aten.mul.Tensor(logprobs, logprobs)), {}


def renamed_input(logprobs, input, sum):
    return (logprobs * input).sum() + sum.sum(), {}


LOSSES = [
    negative_log_likelihood,
    clipped_ratio,
    functional_forms,
    indexing,
    shapes_and_numbers,
    types_and_layouts,
    infinities,
    unused_work,
    splits,
    wide_targets,
    operators,
    numpy_constant,
    aten_calls,
    renamed_input,
]
RANKS = {"wide_targets": {"logprobs": 2, "teacher": 2, "scale": 0}}


def ranks_of(fn: Any) -> Any:
    return RANKS.get(fn.__name__, dict.fromkeys(inspect.signature(fn).parameters, 1))


def traced(fn: Any) -> LossHandle:
    return trace_loss(fn, ranks_of(fn)).in_session("session-1")


def inputs_for(fn: Any, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {0: (), 1: (5,), 2: (5, 3)}
    arrays = {name: rng.random(shapes[rank]).astype(np.float32) for name, rank in ranks_of(fn).items()}
    return arrays | {"logprobs": np.log(0.05 + 0.9 * arrays["logprobs"])}


def datum_for(inputs: Mapping[str, np.ndarray]) -> Datum:
    others = {name: array for name, array in inputs.items() if name != "logprobs"}
    targets = np.zeros(inputs["logprobs"].shape, np.int64)
    return Datum(ModelInput.from_ints([1] * 5), {"target_tokens": targets, **others})


# The form that is sent


@pytest.mark.parametrize("fn", LOSSES)
def test_graphs_equal_those_of_the_official_package(fn: Any) -> None:
    theirs = official.trace_loss(fn, ranks_of(fn), "session-1")
    ours = traced(fn)
    assert ours.graph.model_dump(mode="json") == official.encode_graph(theirs).model_dump(mode="json")
    assert [entry.model_dump() for entry in ours.inputs] == [entry.model_dump() for entry in theirs.inputs]
    assert (ours.name, ours.input_names, ours.loss_id) == (theirs.name, theirs.input_names, theirs.loss_id)


@pytest.mark.parametrize("fn", LOSSES)
def test_the_official_package_takes_our_request(fn: Any) -> None:
    handle = traced(fn)
    request = CreateCustomLossRequest(
        session_id="session-1",
        custom_loss_seq_id=0,
        name=handle.name,
        inputs=list(handle.inputs),
        graph=handle.graph,
    )
    parsed = tinker.types.CreateCustomLossRequest.model_validate_json(request.model_dump_json())
    assert parsed.model_dump(mode="json") == request.model_dump(mode="json")


def test_a_graph_is_the_json_that_servers_know() -> None:
    def node(op: str, name: str, target: str, *args: Any) -> dict[str, Any]:
        return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}

    assert traced(negative_log_likelihood).graph.model_dump(mode="json") == {
        "format": 1,
        "nodes": [
            node("placeholder", "logprobs", "logprobs"),
            node("placeholder", "weights", "weights"),
            node("call_function", "mul", "operator.mul", {"ref": "logprobs"}, {"ref": "weights"}),
            node("call_method", "sum_1", "sum", {"ref": "mul"}),
            node("call_function", "neg", "operator.neg", {"ref": "sum_1"}),
            node(
                "output", "output", "output", {"tuple": [{"ref": "neg"}, {"dict": {"custom/nll:sum": {"ref": "neg"}}}]}
            ),
        ],
    }


def test_every_function_torch_lets_us_trace_is_found_again_by_its_name() -> None:
    by_owner = get_overridable_functions()
    del by_owner[torch.Tensor]  # methods are sent by their bare names
    functions = [function for group in by_owner.values() for function in group]
    named = [function for function in functions if str(getattr(function, "__module__", "")).startswith("torch")]
    assert len(named) > 700
    for function in named:
        assert loss_graph._function_named(loss_graph._function_name("loss", function)) is function


# The rules


def no_logprobs(advantages):
    return advantages.sum(), {}


def no_parameters():
    return 0.0, {}


many_inputs: dict[str, Any] = {}
exec(f"def too_many(logprobs, {', '.join(f'x{i}' for i in range(16))}): return logprobs.sum(), {{}}", many_inputs)


def capitals(logprobs, Advantages):  # noqa: N803
    return logprobs.sum(), {}


def star(logprobs, *others):
    return logprobs.sum(), {}


def keyword_only(logprobs, *, weights):
    return logprobs.sum(), {}


def default(logprobs, weights=None):
    return logprobs.sum(), {}


def branches(logprobs):
    return (logprobs.sum() if logprobs.sum() > 0 else -logprobs.sum()), {}


def loops(logprobs):
    return sum(logprobs), {}


LAYER = torch.nn.Linear(5, 1)
CONSTANT = torch.ones(5)


def calls_a_module(logprobs):
    return LAYER(logprobs).sum(), {}


def captures_a_parameter(logprobs):
    return F.linear(logprobs, LAYER.weight).sum(), {}


def captures_a_tensor(logprobs):
    return (logprobs * CONSTANT).sum(), {}


def makes_a_constant(logprobs):
    return (logprobs * torch.ones(5)).sum(), {}


@torch.fx.wrap
def elsewhere(values):
    return values


def calls_elsewhere(logprobs):
    return elsewhere(logprobs).sum(), {}


def calls_item(logprobs):
    return logprobs.sum(), {"custom/a:sum": logprobs.sum().item()}


def calls_numpy(logprobs):
    return logprobs.numpy().sum(), {}


def calls_tolist(logprobs):
    logprobs.tolist()
    return logprobs.sum(), {}


def calls_backward(logprobs):
    logprobs.sum().backward()
    return logprobs.sum(), {}


def calls_an_unknown_method(logprobs):
    return logprobs.summ(), {}


def passes_a_complex_number(logprobs):
    return (logprobs.sum() * 2j).real, {}


def returns_a_loss_only(logprobs):
    return logprobs.sum()


def returns_a_number(logprobs):
    return 1.0, {}


def returns_metric_pairs(logprobs):
    return logprobs.sum(), [("custom/a:sum", logprobs.sum())]


def returns_a_bare_metric(logprobs):
    return logprobs.sum(), {"kl": logprobs.sum()}


def returns_a_shouted_metric(logprobs):
    return logprobs.sum(), {"custom/KL:sum": logprobs.sum()}


def returns_a_long_metric(logprobs):
    return logprobs.sum(), {f"custom/{'a' * 65}:sum": logprobs.sum()}


def returns_a_number_as_metric(logprobs):
    return logprobs.sum(), {"custom/a:sum": 1.0}


REFUSED = [
    (no_logprobs, "must take logprobs as its first parameter"),
    (no_parameters, "must take logprobs as its first parameter"),
    (many_inputs["too_many"], "takes 17 parameters; at most 16"),
    (capitals, "parameter 'Advantages'; a name has at most 64 lowercase"),
    (star, r"declares '\*others'; name each input as a plain positional"),
    (keyword_only, "declares 'weights'; name each input"),
    (default, "gives 'weights' a default"),
    (branches, "cannot be traced by torch.fx .*Do not branch or loop on tensor values .use torch.where"),
    (loops, "cannot be traced by torch.fx .*Do not branch or loop"),
    (calls_a_module, r"cannot be traced by torch.fx .*call modules \(use torch.nn.functional\)"),
    (captures_a_parameter, "cannot be traced by torch.fx .*parameters from outside"),
    (
        captures_a_tensor,
        "uses a tensor from outside, or makes one from constants; read it as one of the loss_fn_inputs",
    ),
    (makes_a_constant, r"makes one from constants; .* torch.zeros_like\(logprobs\)"),
    (calls_elsewhere, "calls elsewhere of .*test_loss_graph; only functions of torch, math and operator"),
    (calls_item, r"calls item\(\), which leaves torch; keep every value a tensor"),
    (calls_numpy, r"calls numpy\(\), which leaves torch"),
    (calls_tolist, r"calls tolist\(\), which leaves torch"),
    (calls_backward, r"calls backward\(\); return the loss"),
    (calls_an_unknown_method, r"calls summ\(\), which is no method of torch.Tensor"),
    (passes_a_complex_number, "passes a complex to an operation"),
    (returns_a_loss_only, r"must return \(loss, metrics\), got sum_1"),
    (returns_a_number, "must return its loss as a tensor computed from logprobs, got 1.0"),
    (returns_metric_pairs, "must return its metrics as a dict"),
    (returns_a_bare_metric, "names a metric 'kl'; use custom/<name>:sum or custom/<name>:mean"),
    (returns_a_shouted_metric, "names a metric 'custom/KL:sum'; use .* lowercase"),
    (returns_a_long_metric, "up to 64 characters"),
    (returns_a_number_as_metric, "must return the metric 'custom/a:sum' as a tensor, got 1.0"),
]


@pytest.mark.parametrize(("fn", "reason"), REFUSED)
def test_a_loss_that_cannot_be_sent_is_refused_with_the_remedy(fn: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=f"(?s)The custom loss {fn.__name__} .*{reason}"):
        traced(fn)


@pytest.mark.parametrize(("fn", "reason"), REFUSED)
def test_the_official_package_refuses_the_same_losses(fn: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="create_custom_loss"):
        official.encode_graph(official.trace_loss(fn, ranks_of(fn), "session-1"))


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ({"logprobs": 1}, "takes logprobs, weights, but input_ranks has logprobs; give the rank of each"),
        ({}, "input_ranks has nothing"),
        ([1, 1], "input_ranks must be a dict from parameter names to ranks, got list"),
        ({"logprobs": 1, "weights": 1, "extra": 1}, "input_ranks has logprobs, weights, extra"),
        ({"logprobs": 0, "weights": 1}, "declares logprobs with rank 0; use 1 or 2"),
        ({"logprobs": 1, "weights": 3}, "declares weights with rank 3; use 0 or 1 or 2"),
        ({"logprobs": 1, "weights": True}, "declares weights with rank True"),
        ({"logprobs": 1, "weights": "1"}, "declares weights with rank '1'"),
    ],
)
def test_ranks_are_given_for_exactly_the_parameters(ranks: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        trace_loss(negative_log_likelihood, ranks)


@pytest.mark.parametrize("fn", [functools.partial(negative_log_likelihood), LAYER, len, 3])
def test_only_functions_can_be_traced(fn: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be a function made with def"):
        trace_loss(fn, {"logprobs": 1})


def test_tracing_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"tinsmith\[torch\]"):
        trace_loss(negative_log_likelihood, {"logprobs": 1, "weights": 1})


def test_losses_can_be_traced_from_many_threads() -> None:
    before = (torch.nn.Module.__call__, torch.nn.Module.__getattr__, math.sqrt)
    with ThreadPoolExecutor(8) as pool:
        graphs = list(pool.map(lambda _: traced(shapes_and_numbers).graph, range(32)))
    assert all(graph == graphs[0] for graph in graphs)
    assert (torch.nn.Module.__call__, torch.nn.Module.__getattr__, math.sqrt) == before


# The handle


def test_the_key_tells_losses_apart_by_what_they_compute() -> None:
    def scaled(factor: float) -> Any:
        def long_loss(logprobs):
            total = logprobs.sum()
            for step in range(30):
                total = total + step
            return total * factor, {}

        return long_loss

    assert traced(scaled(2.0)).key == traced(scaled(2.0)).key
    assert traced(scaled(2.0)).key != traced(scaled(3.0)).key
    assert traced(scaled(2.0)).key != traced(scaled(2)).key
    vector, matrix = (trace_loss(scaled(2.0), {"logprobs": rank}).in_session("s") for rank in (1, 2))
    assert vector.key != matrix.key


def test_the_key_depends_on_neither_name_nor_session() -> None:
    handle = traced(negative_log_likelihood)
    assert dataclasses.replace(handle, name="other", session_id="session-2", loss_id="loss-1").key == handle.key


def test_handles_survive_pickling_and_hold_no_more_than_the_loss() -> None:
    handle = dataclasses.replace(traced(wide_targets), loss_id="loss-1")
    copy = pickle.loads(pickle.dumps(handle))
    assert (copy, hash(copy), copy.key) == (handle, hash(handle), handle.key)
    assert [field.name for field in dataclasses.fields(handle)] == ["name", "inputs", "session_id", "graph", "loss_id"]


def test_handles_of_different_losses_differ() -> None:
    assert traced(indexing) != dataclasses.replace(traced(splits), name="indexing")


def test_handles_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        traced(indexing).loss_id = "x"  # type: ignore[misc]


# Running on this machine


@pytest.mark.parametrize("fn", LOSSES)
def test_a_handle_computes_what_the_function_computes(fn: Any) -> None:
    rows = [inputs_for(fn, seed) for seed in range(3)]
    leaves = [torch.tensor(row["logprobs"], requires_grad=True) for row in rows]
    others = [[torch.tensor(value) for name, value in row.items() if name != "logprobs"] for row in rows]
    direct = [fn(leaf, *rest) for leaf, rest in zip(leaves, others, strict=True)]
    torch.stack([loss for loss, _ in direct]).sum().backward()

    result = handle_loss(traced(fn), [datum_for(row) for row in rows], [row["logprobs"] for row in rows])

    assert result.loss == pytest.approx(sum(float(loss.detach()) for loss, _ in direct), rel=1e-6)
    for leaf, gradient in zip(leaves, result.gradients, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-6)
    for name, value in result.metrics.items():
        total = sum(float(metrics[name].detach()) for _, metrics in direct)
        assert value == pytest.approx(total / 3 if name.endswith(":mean") else total, rel=1e-6)
    assert result.metrics.keys() == direct[0][1].keys()


# The official package runs code that torch generates from the graph, which cannot say numpy's numbers.
@pytest.mark.parametrize("fn", [fn for fn in LOSSES if fn is not numpy_constant])
def test_a_handle_computes_what_the_official_package_computes(fn: Any) -> None:
    rows = [inputs_for(fn, seed) for seed in range(3)]
    data = [datum_for(row) for row in rows]
    theirs = [
        tinker.types.Datum(
            model_input=tinker.types.ModelInput.from_ints(example.model_input.to_ints()),
            loss_fn_inputs={name: tensor.to_numpy() for name, tensor in example.loss_fn_inputs.items()},
        )
        for example in data
    ]
    leaves = [torch.tensor(row["logprobs"], requires_grad=True) for row in rows]
    loss, metrics = official.run_loss_handle(official.trace_loss(fn, ranks_of(fn), "s"), theirs, leaves)
    loss.backward()

    result = handle_loss(traced(fn), data, [row["logprobs"] for row in rows])

    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert result.metrics == pytest.approx(metrics, rel=1e-6)
    for leaf, gradient in zip(leaves, result.gradients, strict=True):
        np.testing.assert_array_equal(gradient, leaf.grad)


def test_an_unpickled_handle_still_runs() -> None:
    row = inputs_for(clipped_ratio, 0)
    handle = pickle.loads(pickle.dumps(traced(clipped_ratio)))
    assert handle_loss(handle, [datum_for(row)], [row["logprobs"]]).gradients[0].shape == (5,)


def test_a_failing_step_names_the_loss_and_the_datum() -> None:
    rows = [inputs_for(negative_log_likelihood, seed) for seed in range(2)]
    rows[1]["weights"] = np.ones(4, np.float32)
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        handle_loss(
            traced(negative_log_likelihood), [datum_for(row) for row in rows], [row["logprobs"] for row in rows]
        )
    assert caught.value.__notes__[0] == "The custom loss negative_log_likelihood was running on data[1]."


def unsummed(logprobs):
    return logprobs, {}


def counts(logprobs):
    return logprobs.shape[0], {}


def metric_of_many(logprobs):
    return logprobs.sum(), {"custom/all:sum": logprobs}


def ignores_logprobs(logprobs, weights):
    return weights.sum(), {}


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (unsummed, r"(?s)unsummed must return a scalar tensor for every datum, got tensor\(.* for data\[0\]"),
        (counts, r"counts must return a scalar tensor for every datum, got 5 for data\[0\]"),
        (metric_of_many, r"metrics\['custom/all:sum'\] returned by the custom loss metric_of_many must be one number"),
        (ignores_logprobs, "ignores_logprobs does not depend on the log-probabilities"),
    ],
)
def test_what_only_running_shows_is_refused_too(fn: Any, reason: str) -> None:
    row = inputs_for(fn, 0)
    with pytest.raises(InvalidInputError, match=reason):
        handle_loss(traced(fn), [datum_for(row)], [row["logprobs"]])


# The data


def test_data_with_every_input_at_its_rank_is_accepted() -> None:
    check_handle_data(traced(wide_targets), [datum_for(inputs_for(wide_targets, seed)) for seed in range(2)])


def test_a_list_without_a_shape_has_rank_one() -> None:
    inputs = {"target_tokens": TensorData([1, 2], "int64"), "weights": TensorData([1, 1], "float32")}
    check_handle_data(traced(negative_log_likelihood), [Datum(ModelInput.from_ints([1, 2]), inputs)])


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"weights": [1.0]}, r"data\[1\].loss_fn_inputs\['target_tokens'\] is missing"),
        (
            {"target_tokens": [1]},
            r"data\[1\].loss_fn_inputs\['weights'\] is missing; the custom loss .* computes weights",
        ),
        ({"target_tokens": [1], "weights": [[1.0]]}, r"\['weights'\] has rank 2, but .* declared weights with rank 1"),
        ({"target_tokens": [[1]], "weights": [1.0]}, r"\['target_tokens'\] has rank 2, but .* logprobs with rank 1"),
        ({"target_tokens": [1], "weights": np.float32(1)}, r"\['weights'\] has rank 0"),
    ],
)
def test_data_that_lack_an_input_or_have_another_rank_are_refused(inputs: Any, reason: str) -> None:
    good = datum_for(inputs_for(negative_log_likelihood, 0))
    with pytest.raises(InvalidInputError, match=reason):
        check_handle_data(traced(negative_log_likelihood), [good, Datum(ModelInput.from_ints([1]), inputs)])
