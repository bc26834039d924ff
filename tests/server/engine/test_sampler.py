"""Tokens are drawn from the distribution that was asked for, and from nothing else than seed, sample and position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tinsmith.server.engine.sampler import Settings, best, draw, draw_many, exponentials, keys_of, race
from tinsmith.types import SamplingParams

CPU = torch.device("cpu")


def kept_slowly(logits: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.float64]:
    """The distribution after temperature, top-k and top-p, by sorting and adding up."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        order = order[:1]
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = np.exp((logits[order] - logits[order[0]]) / (params.temperature or 1.0))
    chances = weights / weights.sum()
    before = np.cumsum(chances) - chances
    kept = [index for index in range(len(order)) if index == 0 or before[index] < params.top_p]
    full = np.zeros(len(logits))
    full[[order[index] for index in kept]] = chances[kept] / chances[kept].sum()
    return full


def drawn(logits: torch.Tensor, params: SamplingParams, count: int, seed: int = 7) -> npt.NDArray[np.int64]:
    rows = logits.expand(count, -1).contiguous()
    own = keys_of(seed, np.arange(count), 0)
    return draw(rows, Settings.of([params] * count, logits.shape[-1], CPU), own).tokens.numpy()


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.8),
    SamplingParams(top_p=0.0),
    SamplingParams(top_k=1),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("size", [30, 700])
def test_frequencies_follow_the_exact_distribution(params: SamplingParams, size: int) -> None:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(size)) * 2
    expected = kept_slowly(logits[0].double().numpy(), params)
    count = 20_000
    seen = np.bincount(drawn(logits, params, count), minlength=size)
    assert seen[expected == 0].sum() == 0, "a token outside the filters was drawn"
    common = expected * count >= 5
    observed = np.append(seen[common], seen[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * count
    chi_square = float(((observed - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum())
    freedom = int((wanted > 0).sum()) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * max(freedom, 1)) + 4


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0, 2.5]), min_size=2, max_size=40),
    st.integers(-1, 45),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.3, 1.0, 4.0]),
)
def test_filters_keep_what_a_slow_reference_keeps_ties_included(
    values: list[float], top_k: int, top_p: float, temperature: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, temperature=temperature)
    assume(not _on_edge(values, params))
    expected = kept_slowly(np.array(values), params)
    seen = set(drawn(torch.tensor([values]), params, 300).tolist())
    assert all(expected[token] > 0 for token in seen)
    assert all(token in seen for token in np.flatnonzero(expected > 0.1))


def _on_edge(values: list[float], params: SamplingParams) -> bool:
    """Whether a cumulative sum meets top_p to the last bits: then rounding decides."""
    near = [kept_slowly(np.array(values), SamplingParams(top_k=params.top_k, temperature=params.temperature,
                                                         top_p=min(max(params.top_p + delta, 0), 1)))
            for delta in (-1e-9, 1e-9)]  # fmt: skip
    return bool(((near[0] > 0) != (near[1] > 0)).any())


def test_a_flat_distribution_needs_more_candidates_than_are_looked_at_first() -> None:
    logits = torch.zeros(1, 5000)
    tokens = drawn(logits, SamplingParams(top_p=0.5), 400)
    assert tokens.max() < 2500, "of equal tokens those of lower id are kept"
    assert tokens.max() > 2400


def test_log_probabilities_are_the_models_whatever_the_settings() -> None:
    logits = torch.randn(len(PARAMS), 300)
    tokens, logprobs = draw(logits, Settings.of(PARAMS, 300, CPU), keys_of(1, np.arange(len(PARAMS)), 0))
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def test_a_row_draws_the_same_token_alone_and_among_others() -> None:
    logits = torch.randn(len(PARAMS), 300)
    own = keys_of(1, np.arange(len(PARAMS)), 0)
    together = draw(logits, Settings.of(PARAMS, 300, CPU), own).tokens
    for row, params in enumerate(PARAMS):
        alone = draw(logits[row : row + 1], Settings.of([params], 300, CPU), own[row : row + 1])
        assert alone.tokens[0] == together[row]


def test_temperature_zero_takes_the_first_of_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert drawn(logits, SamplingParams(temperature=0), 5).tolist() == [1] * 5


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e46, 1e300])
def test_temperatures_that_a_float32_cannot_hold_are_still_temperatures(temperature: float) -> None:
    logits = torch.tensor([[-float("inf"), 3.0, -float("inf"), 1.0]])
    tokens = drawn(logits, SamplingParams(temperature=temperature), 100)
    alternatives = draw_many(logits, temperature, keys_of(3, np.arange(100), 1)[None])[0]
    expected = {1} if temperature < 1 else {1, 3}
    assert {*tokens.tolist()} == {*alternatives.tolist()} == expected


def test_alternatives_are_drawn_with_replacement_at_the_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    own = keys_of(3, np.arange(20_000), 1)[None]
    tokens = draw_many(logits, 0.5, own)
    expected = (logits[0] / 0.5).softmax(-1)
    torch.testing.assert_close(tokens[0].bincount(minlength=3) / 20_000, expected, atol=0.01, rtol=0)
    assert draw_many(logits, 0.0, own[:, :3]).tolist() == [[2, 2, 2]]


@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=1000).filter(any),
    st.integers(0, 2**64 - 1),
)
def test_a_token_without_weight_is_never_drawn(weights: list[float], key: int) -> None:
    token = int(race(torch.tensor([weights]), keys_of(key, [[0]], 0)))
    assert weights[token] > 0


@pytest.mark.parametrize("error", [1e-3, 1e-2])
def test_logits_that_were_rounded_otherwise_seldom_change_a_token(error: float) -> None:
    """No way to draw changes less than the two distributions differ by; this one by little more."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4000, 2000, generator=generator)
    rounded = logits + error * torch.randn(logits.shape, generator=generator)
    differ = (logits.softmax(-1) - rounded.softmax(-1)).abs().sum(-1).mean().item() / 2
    how, own = Settings.of([SamplingParams()] * 4000, 2000, CPU), keys_of(2, np.arange(4000), 0)
    changed = (draw(logits, how, own).tokens != draw(rounded, how, own).tokens).float().mean().item()
    assert changed < 3 * differ


def test_random_numbers_are_exponential_and_unrelated() -> None:
    numbers = exponentials(keys_of(5, np.arange(100), 0), 1000).numpy()
    assert numbers.min() > 0
    counts = np.histogram(np.exp(-numbers), bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 4 * np.sqrt(2 * 49)
    others = [np.roll(numbers, 1, 0), np.roll(numbers, 1, 1)]
    others += [exponentials(keys_of(seed, np.arange(100), place), 1000).numpy() for seed, place in ((6, 0), (5, 1))]
    for other in others:
        assert abs(np.corrcoef(numbers.ravel(), other.ravel())[0, 1]) < 0.015


def test_random_numbers_stay_what_they_are_from_release_to_release() -> None:
    expected = [
        [2.042950563945377, 1.8001810476467672],
        [0.12240515762149183, 1.3920256260195596],
        [1.8926101138033984, 3.2105749921394713],
    ]
    np.testing.assert_allclose(exponentials(keys_of([0, 1, 2**64 - 1], 0, [0, 0, 7]), 2), expected, rtol=1e-14)


def test_the_best_tokens_come_in_order_of_logit_and_then_of_id() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, -5.0, 0.0]])
    values, ids = best(logits, 4)
    assert ids.tolist() == [[1, 3, 0, 2]]
    assert values.tolist() == [[2.0, 2.0, 0.0, 0.0]]
