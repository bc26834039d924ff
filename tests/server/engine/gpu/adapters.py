"""Adapters for the tests of kernels, and what they add by the plain way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.server.engine.gpu.devices import DEVICE, normal
from tinsmith.server.engine.gpu.lora import AddressBook, GroupedSite
from tinsmith.server.engine.lora import Looped, Site

# bfloat16 products are not what they should be in the interpreter.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def site(rank: int, width: int, outs: Sequence[int]) -> Site:
    num_rows = len(outs) * rank
    return Site(
        a=(normal(num_rows, width) * width**-0.5).to(DTYPE),
        b=tuple((normal(out, rank) * rank**-0.5).to(DTYPE) for out in outs),
        scale=32 / rank,
        grad_a=normal(num_rows, width),
        grad_b=tuple(normal(out, rank) for out in outs),
    )


def exact(ours: Site) -> Site:
    """The same numbers in float64, with buffers of its own."""
    assert ours.grad_a is not None
    assert ours.grad_b is not None
    a, grad_a = ours.a.double(), ours.grad_a.double()
    return Site(a, tuple(b.double() for b in ours.b), ours.scale, grad_a, tuple(b.double() for b in ours.grad_b))


def grouped(segments: Sequence[tuple[int, int]], sites: Sequence[Site]) -> GroupedSite:
    adapters = [{"layer": each} for each in sites]
    book = AddressBook(adapters, torch.device(DEVICE))
    found = book.grouped("layer", [(*rows, each) for rows, each in zip(segments, adapters, strict=True)])
    assert found is not None
    return found


def looped(segments: Sequence[tuple[int, int]], sites: Sequence[Site]) -> Looped:
    return Looped([(*rows, each) for rows, each in zip(segments, sites, strict=True)])


def gradients(sites: Sequence[Site]) -> list[torch.Tensor]:
    return [gradient for each in sites for gradient in (each.grad_a, *(each.grad_b or ())) if gradient is not None]
