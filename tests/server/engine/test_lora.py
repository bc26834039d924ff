"""Each row gets the product of its own adapter, whatever path computes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinsmith.server.engine.lora import STACKED_BELOW, LoraRows, Site, add_looped, add_stacked, linear
from tinsmith.server.engine.products import Matrix


class Weights:
    """An adapter with sites made by hand."""

    def __init__(self, rank: int, outs: tuple[int, ...], num_in: int, seed: int, trained: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(len(outs) * rank, num_in, generator=generator)
        b = tuple(torch.randn(out, rank, generator=generator) for out in outs)
        buffers = (torch.zeros_like(a), tuple(torch.zeros_like(part) for part in b)) if trained else (None, None)
        self.sites = {"layer": Site(a, b, 32 / rank, *buffers)}

    def added(self, x: Tensor) -> Tensor:
        """The definition: scale * x A^T B^T, part by part."""
        site = self.sites["layer"]
        inner = x @ site.a.t()
        parts = [inner[:, i * site.rank : (i + 1) * site.rank] @ b.t() for i, b in enumerate(site.b)]
        return site.scale * torch.cat(parts, dim=1)


X = torch.randn(12, 10, generator=torch.Generator().manual_seed(5))
WEIGHT = torch.randn(9, 10, generator=torch.Generator().manual_seed(6))
BIAS = torch.randn(9, generator=torch.Generator().manual_seed(7))
FROZEN = Matrix(WEIGHT, BIAS)


def adapters(trained: bool = False) -> list[Weights]:
    return [Weights(rank, (4, 3, 2), 10, seed=rank, trained=trained) for rank in (1, 3, 5)]


def expected(first: Weights, second: Weights, third: Weights) -> Tensor:
    y = X @ WEIGHT.t() + BIAS
    y[0:4] += first.added(X[0:4])
    y[6:7] += second.added(X[6:7])
    y[7:12] += third.added(X[7:12])
    return y


def rows(first: Weights, second: Weights, third: Weights) -> LoraRows:
    return LoraRows([(0, 4, first), (4, 6, None), (6, 7, second), (7, 12, third)])


def test_rows_of_adapters_of_different_rank_and_of_none_mix_in_one_batch() -> None:
    made = adapters()
    torch.testing.assert_close(linear(X, FROZEN, rows(*made), "layer"), expected(*made))


def test_one_adapter_for_all_of_a_few_bfloat16_rows_gives_the_same() -> None:
    adapter = Weights(3, (4, 3, 2), 10, seed=3)
    site = adapter.sites["layer"]
    halved = Weights(3, (4, 3, 2), 10, seed=3)
    halved.sites = {"layer": Site(site.a.bfloat16(), tuple(b.bfloat16() for b in site.b), site.scale)}
    y = linear(X.bfloat16(), Matrix(WEIGHT.bfloat16(), BIAS.bfloat16()), LoraRows([(0, 12, halved)]), "layer")
    reference = X @ WEIGHT.t() + BIAS + adapter.added(X)
    assert (y - reference).norm() < 0.02 * reference.norm()


def test_a_live_adapter_full_of_nan_leaves_the_rows_of_others_alone() -> None:
    broken, *others = adapters(trained=True)
    broken.sites["layer"].a.fill_(float("nan"))
    broken.sites["layer"].b[0].fill_(float("nan"))
    with torch.no_grad():
        y = linear(X, FROZEN, rows(broken, *others), "layer")
    assert y[:4].isnan().any()
    torch.testing.assert_close(y[4:], expected(broken, *others)[4:])


def test_the_stacked_product_equals_the_loop() -> None:
    lora = rows(*adapters())
    placed = lora.at("layer")
    looped, stacked = torch.zeros(12, 9), torch.zeros(12, 9)
    add_looped(looped, X, placed)
    stack = lora.stack("layer")
    add_stacked(stacked, X, stack, stack.mask(12, placed))
    torch.testing.assert_close(stacked, looped)


def test_many_rows_of_each_adapter_give_the_same_as_few() -> None:
    made = adapters()[:2]
    many = STACKED_BELOW[torch.float32]
    x = torch.randn(2 * many, 10, generator=torch.Generator().manual_seed(1))
    y = linear(x, Matrix(WEIGHT), LoraRows([(0, many, made[0]), (many, 2 * many, made[1])]), "layer")
    reference = x @ WEIGHT.t() + torch.cat([made[0].added(x[:many]), made[1].added(x[many:])])
    torch.testing.assert_close(y, reference)


def test_gradients_equal_autograds_and_add_up() -> None:
    made = adapters(trained=True)
    dy = torch.randn(12, 9, generator=torch.Generator().manual_seed(8))
    x = X.clone().requires_grad_()
    for _ in range(2):
        linear(x, FROZEN, rows(*made), "layer").backward(dy)

    plain = adapters()
    leaves = [
        tensor.requires_grad_() for adapter in plain for tensor in (adapter.sites["layer"].a, *adapter.sites["layer"].b)
    ]
    reference_x = X.clone().requires_grad_()
    y = reference_x @ WEIGHT.t()
    added = [(slice(0, 4), plain[0]), (slice(6, 7), plain[1]), (slice(7, 12), plain[2])]
    total = (y * dy).sum() + sum((adapter.added(reference_x[part]) * dy[part]).sum() for part, adapter in added)
    total.backward()

    torch.testing.assert_close(x.grad, 2 * reference_x.grad)
    ours = [tensor for adapter in made for tensor in (adapter.sites["layer"].grad_a, *adapter.sites["layer"].grad_b)]
    for accumulated, leaf in zip(ours, leaves, strict=True):
        torch.testing.assert_close(accumulated, 2 * leaf.grad)


def test_gradients_of_bfloat16_products_are_kept_in_float32() -> None:
    a, b = torch.randn(2, 10).bfloat16(), (torch.randn(9, 2).bfloat16(),)
    site = Site(a, b, 1.0, torch.full((2, 10), 1000.0), (torch.zeros(9, 2),))
    adapter = Weights(1, (9,), 10, seed=0)
    adapter.sites = {"layer": site}
    y = linear(X.bfloat16(), Matrix(WEIGHT.bfloat16()), LoraRows([(0, 12, adapter)]), "layer")
    (0.01 * y.float()).sum().backward()
    # In bfloat16 a thousand and a bit is a thousand.
    assert site.grad_a.dtype == torch.float32
    assert int((site.grad_a != 1000.0).sum()) > 10


def test_a_chunk_of_the_rows_keeps_their_adapters() -> None:
    made = adapters()
    y = torch.cat([linear(X[s:e], FROZEN, rows(*made).slice(s, e), "layer") for s, e in ((0, 3), (3, 7), (7, 12))])
    torch.testing.assert_close(y, expected(*made))


def test_regrouped_rows_use_the_prepared_stack_for_their_new_places() -> None:
    made = adapters()
    lora = LoraRows([(0, 1, made[0]), (1, 2, made[1])])
    linear(X[:2], FROZEN, lora, "layer")
    moved = lora.regrouped([(0, 2, made[0]), (2, 3, made[1])])
    assert moved.stack("layer") is lora.stack("layer")
    y = linear(X[:3], FROZEN, moved, "layer")
    reference = X[:3] @ WEIGHT.t() + BIAS + torch.cat([made[0].added(X[:2]), made[1].added(X[2:3])])
    torch.testing.assert_close(y, reference)


@pytest.mark.parametrize("segments", [[], [(0, 12, None)]])
def test_rows_without_adapters_are_those_of_the_base_model(segments: list[tuple[int, int, None]]) -> None:
    torch.testing.assert_close(linear(X, FROZEN, LoraRows(segments), "layer"), X @ WEIGHT.t() + BIAS)
