"""Every loss equals its formula, written out once more in float64, and so does its gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.losses import LOSSES, find_loss, terms_and_gradient

Case = dict[str, Tensor]


def case(width: int | None) -> Case:
    generator = torch.Generator().manual_seed(3)
    shape = (40,) if width is None else (40, width)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    p = -2 + normal()
    return {
        "p": p,
        "weights": normal(),
        "logprobs": p + 0.5 * normal(),
        "advantages": normal(),
        "sequence_ratio_mask": (normal() > 0).double(),
    }


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, low), high)


def ppo_term(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Value and derivative with respect to p, for a ratio whose own derivative is itself."""
    free, clipped = ratio * advantage, clip(ratio, low, high) * advantage
    return (-free, -free) if free <= clipped else (-clipped, 0.0)


def reference(name: str, case: Case, **settings: float) -> tuple[float, Tensor]:
    """Target by target, with derivatives worked out by hand."""
    flat = {key: values.flatten().tolist() for key, values in case.items()}
    mask = flat["sequence_ratio_mask"]
    differences = [p - q for p, q in zip(flat["p"], flat["logprobs"], strict=True)]
    sequence_ratio = math.exp(sum(d * m for d, m in zip(differences, mask, strict=True)) / max(sum(mask), 1))
    total, gradient = 0.0, []
    for i, p in enumerate(flat["p"]):
        w, a, d = flat["weights"][i], flat["advantages"][i], differences[i]
        r = math.exp(d)
        low = flat["low"][i] if "low" in flat else settings.get("clip_low_threshold", 0.0 if name == "cispo" else 0.8)
        high = (
            flat["high"][i] if "high" in flat else settings.get("clip_high_threshold", 4.0 if name == "cispo" else 1.2)
        )
        beta = settings.get("beta", 0.05)
        value, slope = {
            "cross_entropy": (-w * p, -w),
            "importance_sampling": (-r * a, -r * a),
            "ppo": ppo_term(r, a, low, high),
            "cispo": (-clip(r, low, high) * p * a, -clip(r, low, high) * a),
            "dro": (-(p * a - 0.5 * beta * d * d), -a + beta * d),
            "gspo": ppo_term(sequence_ratio, a, low, high),
        }[name]
        total += value
        gradient.append(slope)
    return total, torch.tensor(gradient, dtype=torch.float64).view(case["p"].shape)


def check(name: str, case: Case, **settings: float) -> None:
    loss = LOSSES[name]
    names = {"clip_low_threshold": "low", "clip_high_threshold": "high"}
    inputs = {
        key: case[names.get(key, key)] for key in (*loss.inputs, *loss.optional_inputs) if names.get(key, key) in case
    }
    terms, gradient = terms_and_gradient(loss, case["p"], inputs, {**loss.config, **settings})
    expected, slope = reference(name, case, **settings)
    assert float(terms.sum()) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_the_formula_with_the_default_settings(name: str, width: int | None) -> None:
    check(name, case(width))


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_clip_thresholds_can_be_set(name: str) -> None:
    check(name, case(None), clip_low_threshold=0.95, clip_high_threshold=1.05)


@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_clip_thresholds_of_each_target_take_the_place_of_the_settings(name: str, width: int | None) -> None:
    data = case(width)
    generator = torch.Generator().manual_seed(4)
    low = 0.5 + 0.5 * torch.rand(data["p"].shape, generator=generator, dtype=torch.float64)
    check(name, data | {"low": low})
    check(name, data | {"low": low, "high": low + 0.3}, clip_low_threshold=0.1, clip_high_threshold=9.0)


def test_the_strength_of_dro_can_be_set() -> None:
    check("dro", case(None), beta=0.7)


def test_an_empty_sequence_mask_counts_as_a_ratio_of_one() -> None:
    data = case(None)
    check("gspo", data | {"sequence_ratio_mask": torch.zeros(40, dtype=torch.float64)})


@pytest.mark.parametrize("name", ["stable_reinforce", "no_such_loss"])
def test_other_losses_are_refused_with_the_list_of_those_there_are(name: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        find_loss(name)
    assert name in caught.value.message
    assert all(known in caught.value.message for known in [*LOSSES, "custom"])
