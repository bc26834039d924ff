"""Custom losses that run on this machine, checked against a model small enough to differentiate directly."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.client.custom_loss import (
    LossResult,
    backward_data,
    forward_data,
    logprobs_from,
    numpy_loss,
    torch_loss,
    with_custom_metrics,
)
from tinsmith.errors import InvalidInputError, InvalidTypeError, MissingExtraError, UnsupportedByServerError
from tinsmith.types import (
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)

VOCABULARY = 13


class TinyServer:
    """An embedding and a linear layer in float64 behind the two passes of the API."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        self.unembedding = torch.randn(6, VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True)

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embedding, self.unembedding

    def logprobs(self, datum: Datum) -> torch.Tensor:
        logits = self.embedding[datum.model_input.to_ints()] @ self.unembedding
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        rows = targets if targets.ndim == 2 else targets[:, None]
        return logits.log_softmax(-1).gather(1, rows).reshape(targets.shape)

    def forward(self, data: Sequence[Datum]) -> ForwardBackwardOutput:
        outputs = [{"logprobs": TensorData(self.logprobs(datum).detach().float(), "float32")} for datum in data]
        return ForwardBackwardOutput("TorchLossReturn", outputs, {"loss:sum": 0.0})

    def gradients_of(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, self.parameters))

    def surrogate(self, data: Sequence[Datum]) -> torch.Tensor:
        terms = [-(datum.loss_fn_inputs["weights"].to_torch() * self.logprobs(datum)).sum() for datum in data]
        return torch.stack(terms).sum()


def datum(seed: int, length: int = 5, width: int | None = None) -> Datum:
    rng = np.random.default_rng(seed)
    shape = (length,) if width is None else (length, width)
    return Datum(
        ModelInput.from_ints(rng.integers(0, VOCABULARY, length).tolist()),
        {
            "target_tokens": rng.integers(0, VOCABULARY, shape),
            "reference": rng.normal(-2, 0.3, shape).astype(np.float32),
            "mask": (rng.random(shape) < 0.7).astype(np.float32),
        },
    )


def read(example: Datum, key: str) -> torch.Tensor:
    return example.loss_fn_inputs[key].to_torch()


def dpo(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    ratios = [
        ((values - read(example, "reference")) * read(example, "mask")).sum()
        for example, values in zip(data, logprobs, strict=True)
    ]
    margins = torch.stack(ratios[0::2]) - torch.stack(ratios[1::2])
    return -torch.nn.functional.logsigmoid(0.1 * margins).mean(), {"accuracy": (margins > 0).float().mean()}


def negative_entropy(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.stack([(values.exp() * values).mean() for values in logprobs]).sum(), {}


def kl_to_reference(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    total = torch.zeros((), dtype=logprobs[0].dtype)
    for example, values in zip(data, logprobs, strict=True):
        log_ratio = read(example, "reference") - values
        total = total + ((log_ratio.exp() - log_ratio - 1) * read(example, "mask")).sum()
    return total, {"kl": float(total.detach())}


def distillation(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    teachers = [read(example, "reference").softmax(-1) for example in data]
    losses = [-(teacher * values).sum(-1).pow(2).mean() for teacher, values in zip(teachers, logprobs, strict=True)]
    return torch.stack(losses).sum(), {"positions": sum(len(values) for values in logprobs)}


def coupled_lengths(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Every datum's gradient depends on every other datum."""
    return torch.cat([values.reshape(-1) for values in logprobs]).logsumexp(0).reshape(1), {}


FLAT = [datum(seed, length) for seed, length in enumerate([5, 3, 7, 1])]
WIDE = [datum(seed, length, width=4) for seed, length in enumerate([5, 3])]


def two_passes(server: TinyServer, data: list[Datum], run: Callable[..., LossResult], loss: Any) -> torch.Tensor:
    """The surrogate whose gradient the server would apply."""
    logprobs = logprobs_from(server.forward(forward_data(data)), data)
    return server.surrogate(backward_data(data, run(loss, data, logprobs).gradients))


@pytest.mark.parametrize(
    ("loss", "data"),
    [
        (dpo, FLAT),
        (negative_entropy, FLAT),
        (kl_to_reference, FLAT),
        (coupled_lengths, FLAT),
        (distillation, WIDE),
        (kl_to_reference, WIDE),
        (coupled_lengths, WIDE),
    ],
)
def test_the_surrogate_has_the_gradient_of_the_custom_loss(loss: Any, data: list[Datum]) -> None:
    server = TinyServer()
    direct, _ = loss(data, [server.logprobs(example) for example in data])

    surrogate = two_passes(server, data, torch_loss, loss)

    for expected, actual in zip(server.gradients_of(direct.sum()), server.gradients_of(surrogate), strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_numpy_loss_with_its_own_gradient_trains_like_the_torch_loss() -> None:
    def numpy_kl(data: list[Datum], logprobs: list[np.ndarray]) -> Any:
        loss, gradients = 0.0, []
        for example, values in zip(data, logprobs, strict=True):
            mask = example.loss_fn_inputs["mask"].to_numpy()
            log_ratio = example.loss_fn_inputs["reference"].to_numpy() - values
            loss += ((np.exp(log_ratio) - log_ratio - 1) * mask).sum()
            gradients.append((1 - np.exp(log_ratio)) * mask)
        return loss, gradients, {"kl": loss}

    server = TinyServer()
    logprobs = logprobs_from(server.forward(FLAT), FLAT)
    ours, torchs = numpy_loss(numpy_kl, FLAT, logprobs), torch_loss(kl_to_reference, FLAT, logprobs)

    assert ours.loss == pytest.approx(torchs.loss, rel=1e-6)
    assert ours.metrics == pytest.approx(dict(torchs.metrics))
    for mine, theirs in zip(ours.gradients, torchs.gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_numpy_losses_run_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = numpy_loss(lambda data, logprobs: (1, [2 * logprobs[0]], {}), FLAT[:1], [np.ones(5, np.float32)])
    assert result.gradients[0].tolist() == [2.0] * 5


def test_torch_losses_without_torch_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"tinsmith\[torch\]"):
        torch_loss(dpo, FLAT, [])


# What is sent


def test_the_first_pass_sends_targets_and_weights_only() -> None:
    spans = ([PromptProvenanceSpan(sequence_id="a", length=2)], [SampledProvenanceSpan(sequence_id="b", length=2)])
    inputs = {"target_tokens": [2, 3], "weights": [0.5, 1.0], "advantages": [1.0, 1.0]}
    example = Datum(ModelInput.from_ints([1, 2]), inputs).with_provenance(*spans)

    (sent,) = forward_data([example])

    assert list(sent.loss_fn_inputs) == ["target_tokens", "weights"]
    assert sent.loss_fn_inputs["weights"] == example.loss_fn_inputs["weights"]
    assert (sent.model_input, sent.model_input_spans, sent.loss_fn_input_spans) == (example.model_input, *spans)


@pytest.mark.parametrize(
    "targets",
    [
        [2, 3],
        np.ones((3, 4), np.int64),
        TensorData([2, 3], "int64"),
        TensorData.from_numpy_sparse(np.eye(9, dtype=np.int64)),
    ],
)
def test_absent_weights_become_zeros_in_the_form_of_the_targets(targets: Any) -> None:
    example = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": targets})
    (sent,) = forward_data([example])
    weights, tokens = sent.loss_fn_inputs["weights"], example.loss_fn_inputs["target_tokens"]
    assert weights.dtype == "float32"
    assert (weights.shape, weights.csr) == (tokens.shape, tokens.csr)
    assert weights.to_numpy().shape == tokens.to_numpy().shape
    assert not weights.to_numpy().any()


def test_the_second_pass_sends_the_negated_gradient_and_the_same_targets() -> None:
    (sent,) = backward_data(FLAT[1:2], [np.array([1, -2, 0], np.float32)])
    assert sent.loss_fn_inputs["weights"].tolist() == [-1, 2, 0]
    assert list(sent.loss_fn_inputs) == ["target_tokens", "weights"]
    assert sent.loss_fn_inputs["target_tokens"] is FLAT[1].loss_fn_inputs["target_tokens"]


def test_a_mostly_zero_gradient_of_wide_targets_is_sent_sparse() -> None:
    gradient = np.zeros((5, 4), np.float32)
    gradient[2, 1] = 3
    (sent,) = backward_data(WIDE[:1], [gradient])
    weights = sent.loss_fn_inputs["weights"]
    assert weights.csr is not None
    assert weights.to_numpy()[2, 1] == -3


def test_a_datum_without_targets_is_refused_by_its_number() -> None:
    bare = Datum(ModelInput.from_ints([1]), {"weights": [1.0]})
    with pytest.raises(InvalidInputError, match=r"data\[1\] has no loss_fn_inputs\['target_tokens'\]"):
        forward_data([FLAT[0], bare])


def test_no_data_at_all_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="data is empty"):
        forward_data([])


# What comes back


def test_flat_logprobs_are_given_the_shape_of_the_targets() -> None:
    flat = ForwardBackwardOutput("ArrayRecord", [{"logprobs": TensorData([-1.0] * 20, "float32")}])
    (values,) = logprobs_from(flat, WIDE[:1])
    assert values.shape == (5, 4)
    assert values.dtype == np.float32


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([], "sent 1 data and answered for 0"),
        ([{"elementwise_loss": TensorData([0.0], "float32")}], r"no 'logprobs' for data\[0\]"),
        (
            [{"logprobs": TensorData([0.0], "float32")}],
            r"shape \(1,\) for data\[0\], whose target_tokens have shape \(5",
        ),
    ],
)
def test_an_answer_without_usable_logprobs_is_an_error_of_the_server(outputs: Any, reason: str) -> None:
    with pytest.raises(UnsupportedByServerError, match=reason):
        logprobs_from(ForwardBackwardOutput("ArrayRecord", outputs), FLAT[:1])


def test_the_custom_loss_replaces_the_loss_and_reading_twice_gives_the_same() -> None:
    output = ForwardBackwardOutput("x", [], {"loss:sum": 14.0, "tokens:sum": 3.0, "kl": 9.0})
    result = LossResult(1.5, {"kl": 0.25, "loss:sum": 7.0}, ())
    expected = {"loss:sum": 1.5, "surrogate_loss:sum": 14.0, "tokens:sum": 3.0, "kl": 0.25}

    assert with_custom_metrics(output, result).metrics == expected
    assert with_custom_metrics(output, result).metrics == expected
    assert output.metrics == {"loss:sum": 14.0, "tokens:sum": 3.0, "kl": 9.0}


def test_a_server_without_a_loss_metric_still_gives_a_result() -> None:
    merged = with_custom_metrics(ForwardBackwardOutput("x", [], {}), LossResult(1.5, {}, ()))
    assert merged.metrics == {"loss:sum": 1.5}


# What the user's function does


ONES = [np.ones(5, np.float32), np.ones(3, np.float32)]


def run_torch(loss_fn: Any) -> LossResult:
    return torch_loss(loss_fn, FLAT[:2], ONES)


def run_numpy(loss_fn: Any) -> LossResult:
    return numpy_loss(loss_fn, FLAT[:2], ONES)


def total(logprobs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([values.sum() for values in logprobs]).sum()


@pytest.mark.parametrize("run", [run_torch, run_numpy])
def test_errors_of_the_users_function_come_through_unchanged_with_a_note(run: Any) -> None:
    mistake = KeyError("my own mistake")

    def broken(data: Any, logprobs: Any) -> Any:
        raise mistake

    with pytest.raises(KeyError) as caught:
        run(broken)
    assert caught.value is mistake
    assert caught.value.__notes__ == ["Raised by the custom loss broken, which runs on this machine."]


def test_an_error_of_the_backward_pass_carries_the_note_too() -> None:
    def backward_twice(data: Any, logprobs: list[torch.Tensor]) -> Any:
        loss = total([values.pow(2) for values in logprobs])
        loss.backward()
        return loss, {}

    with pytest.raises(RuntimeError, match="second time") as caught:
        run_torch(backward_twice)
    assert "backward_twice" in caught.value.__notes__[0]


def test_the_loss_sees_the_original_data_and_may_write_into_its_arrays() -> None:
    seen: list[Any] = []
    given = np.ones(5, np.float32)
    given.setflags(write=False)

    def in_place(data: list[Datum], logprobs: list[np.ndarray]) -> Any:
        seen.extend(data)
        logprobs[0] *= 3
        return 0.0, logprobs, {}

    assert numpy_loss(in_place, FLAT[:1], [given]).gradients[0].tolist() == [3.0] * 5
    assert seen == [FLAT[0]]
    assert given.tolist() == [1.0] * 5


def test_parameters_of_the_users_own_receive_gradients() -> None:
    temperature = torch.tensor(2.0, requires_grad=True)
    run_torch(lambda data, logprobs: (temperature * total(logprobs), {}))
    assert temperature.grad == 8.0


def test_a_caller_that_disabled_gradients_still_gets_them() -> None:
    with torch.no_grad():
        result = run_torch(lambda data, logprobs: (total(logprobs), {}))
    assert result.gradients[0].tolist() == [1.0] * 5


def test_metrics_may_be_numbers_of_any_library() -> None:
    def loss_fn(data: Any, logprobs: list[torch.Tensor]) -> Any:
        loss = total(logprobs)
        return loss, {"int": 1, "numpy": np.float32(0.5), "tensor": loss, "one": torch.ones(1), "nan": math.nan}

    metrics = run_torch(loss_fn).metrics
    assert {key: type(value) for key, value in metrics.items()} == dict.fromkeys(metrics, float)
    assert metrics["tensor"] == 8.0
    assert math.isnan(metrics["nan"])


def test_results_cannot_be_changed() -> None:
    result = run_torch(lambda data, logprobs: (total(logprobs), {"a": 1.0}))
    with pytest.raises(ValueError, match="read-only"):
        result.gradients[0][0] = 9
    with pytest.raises(TypeError):
        result.metrics["a"] = 2.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda p: total(p), r"must return \(loss, metrics\), got a Tensor"),
        (lambda p: (total(p), {}, 1), r"must return \(loss, metrics\), got a tuple of length 3"),
        (lambda p: (1.0, {}), "must return its loss as a torch tensor, got a float"),
        (lambda p: (p[1], {}), r"must return one number, got a tensor of shape \(3,\)"),
        (lambda p: (total(p).detach(), {}), "does not depend on the log-probabilities; compute it from"),
        (lambda p: (p[0].sum(), {}), r"log-probabilities of data\[1\]; use them, add 0 \* logprobs\[1\].sum\(\)"),
        (lambda p: (total(p) / 0, {}), "returned inf, so nothing was trained"),
        (lambda p: ((total(p) - 8).log() * 0, {}), "returned nan"),
        (
            lambda p: (p[0].sum() + (p[1] - 1).sqrt().sum(), {}),
            r"not finite at 3 of the 3 .* data\[1\] \(inf at \[0\]\)",
        ),
        (lambda p: (total(p), None), "metrics as a dict of numbers by name, got a NoneType"),
        (lambda p: (total(p), {1: 2.0}), "metrics as a dict"),
        (lambda p: (total(p), {"a": "1.5"}), r"metrics\['a'\] returned by .* must be one number, got str"),
        (lambda p: (total(p), {"a": p[0]}), r"metrics\['a'\] returned by .* must be one number, got Tensor"),
    ],
)
def test_a_torch_loss_that_breaks_the_contract_is_told_how(returned: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        run_torch(lambda data, logprobs: returned(logprobs))


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda p: (1.0, {}), r"must return \(loss, gradients, metrics\), got a tuple of length 2"),
        (lambda p: ("1.0", p, {}), "loss returned by .* must be one number, got str"),
        (lambda p: (math.nan, p, {}), "returned nan"),
        (lambda p: (1.0, p[:1], {}), "returned 1 gradients for 2 data"),
        (lambda p: (1.0, None, {}), "must return its gradients as a list"),
        (lambda p: (1.0, [p[0], p[0]], {}), r"gradient of shape \(5,\) for data\[1\], whose .* have shape \(3,\)"),
        (lambda p: (1.0, [p[0], [[1.0], [2.0, 3.0]]], {}), r"data\[1\] that is no array of numbers"),
        (lambda p: (1.0, [p[0], [1, 1e60, 1]], {}), r"not finite at 1 of the 3 .* data\[1\] \(inf at \[1\]\)"),
        (lambda p: (1.0, p, {"a": None}), r"metrics\['a'\] .* must be one number, got NoneType"),
    ],
)
def test_a_numpy_loss_that_breaks_the_contract_is_told_how(returned: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        run_numpy(lambda data, logprobs: returned(logprobs))


def test_wrong_types_are_type_errors_and_value_errors() -> None:
    with pytest.raises(InvalidTypeError) as caught:
        run_torch(lambda data, logprobs: None)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)
