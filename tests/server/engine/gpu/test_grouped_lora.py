"""Kernels for all adapters of a batch give what one adapter after the other gives."""

from __future__ import annotations

import pytest
import torch

from tests.server.engine.gpu.adapters import DTYPE, exact, gradients, grouped, looped, site
from tests.server.engine.gpu.devices import assert_near, normal
from tinsmith.server.engine.gpu import lora

CASES = {
    "one adapter": ([(0, 70)], [16], 48, [40]),
    "three parts": ([(0, 20)], [8], 64, [130, 16, 16]),
    "ranks apart, a row alone, rows of the base model": ([(0, 33), (33, 34), (40, 75)], [32, 4, 20], 136, [24, 150]),
    "ranks too large for one program": ([(0, 5), (5, 9)], [140, 70], 24, [20, 16, 16]),
    "many rows of one adapter": ([(0, 300), (300, 310)], [4, 4], 16, [16]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_adapters_add_and_the_way_back(case: str) -> None:
    assert_same_as_looped(*CASES[case])


def test_columns_summed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "_WORTH_A_SPLIT", 1)
    assert_same_as_looped([(0, 3), (3, 8)], [4, 8], 16, [400, 130])


def assert_same_as_looped(segments: list[tuple[int, int]], ranks: list[int], width: int, outs: list[int]) -> None:
    sites = [site(rank, width, outs) for rank in ranks]
    plain = [exact(each) for each in sites]
    num_rows, out = segments[-1][1] + 3, sum(outs)
    x, y, dy, dx = (normal(num_rows, size, dtype=DTYPE) for size in (width, out, out, width))
    x64, y64, dy64, dx64 = (each.double() for each in (x, y, dy, dx))
    ours, theirs = grouped(segments, sites), looped(segments, plain)
    inner = ours.add(y, x)
    ours.add_gradients(x, inner, dy, dx)
    theirs.add_gradients(x64, theirs.add(y64, x64), dy64, dx64)
    assert_near(y, y64)
    assert_near(dx, dx64)
    for found, expected in zip(gradients(sites), gradients(plain), strict=True):
        assert_near(found, expected, tolerance=1e-2)


def test_a_layer_none_adapts() -> None:
    adapter = {"layer": site(4, 16, [16])}
    book = lora.AddressBook([adapter], torch.device(adapter["layer"].a.device))
    assert book.grouped("another", [(0, 3, adapter)]) is None


def test_rows_of_another_adapter_that_is_no_number_do_not_matter() -> None:
    segments, sites = [(0, 20), (20, 40)], [site(8, 32, [32]) for _ in range(2)]
    sites[1].a.fill_(torch.nan)
    x, y, dx = (normal(40, 32, dtype=DTYPE) for _ in range(3))
    ours = grouped(segments, sites)
    ours.add_gradients(x, ours.add(y, x), normal(40, 32, dtype=DTYPE), dx)
    for sound in (y[:20], dx[:20], *gradients(sites[:1])):
        assert bool(sound.isfinite().all())
    assert bool(y[20:].isnan().all())
