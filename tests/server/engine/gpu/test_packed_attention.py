"""Our attention of packed sequences, forward and back, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.server.engine.gpu.devices import DEVICE, assert_near, normal
from tinsmith.server.engine.gpu import attention
from tinsmith.server.engine.gpu.attention import Shape

CASES = {
    "several lengths": ([5, 1, 33, 16], 4, 2, 16),
    "whole tiles": ([32, 64], 6, 2, 16),
    "keys of one's own": ([70, 31], 3, 3, 32),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda":
        return
    monkeypatch.setattr(attention, "FORWARD", Shape(32, 16, 4, 2))
    monkeypatch.setattr(attention, "QUERY_GRADIENTS", Shape(32, 16, 4, 2))
    monkeypatch.setattr(attention, "KEY_GRADIENTS", Shape(16, 16, 4, 2))


@pytest.fixture(params=["kept", "again"])
def scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the gradients of scores are kept, or computed once more for the queries."""
    if request.param == "again":
        monkeypatch.setattr(attention, "MAX_KEPT_BYTES", 0)


def by_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), *(part.repeat_interleave(group, 1).transpose(0, 1) for part in (k, v))
    ahead = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(ahead, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def parts_of(heads: Tensor, num_q: int, num_kv: int) -> list[Tensor]:
    """Views into one tensor, as the model gives them."""
    return [part.detach().requires_grad_() for part in heads.split([num_q, num_kv, num_kv], dim=1)]


@pytest.mark.usefixtures("scores")
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case: str) -> None:
    lengths, num_q, num_kv, size = CASES[case]
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    size = 64 if DEVICE == "cuda" else size
    heads, dy = normal(sum(lengths), num_q + 2 * num_kv, size, dtype=dtype), normal(sum(lengths), num_q, size)
    ours, exact = (parts_of(each, num_q, num_kv) for each in (heads, heads.double()))
    found = attention.attend(*ours, attention.Tiles(lengths, torch.device(DEVICE)))
    found.backward(dy.to(dtype))
    sequences = zip(*(part.split(list(lengths)) for part in exact), strict=True)
    expected = torch.cat([by_definition(*sequence) for sequence in sequences])
    expected.backward(dy.to(dtype).double())
    assert_near(found.detach(), expected.detach())
    for mine, reference in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert reference.grad is not None
        assert_near(mine.grad, reference.grad)


@pytest.mark.usefixtures("scores")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, about numbers that are none
def test_a_sequence_that_is_no_number_does_not_reach_its_neighbours() -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    heads = normal(60, 4, 64 if DEVICE == "cuda" else 16, dtype=dtype)
    heads[21:40] = torch.nan
    ours = parts_of(heads, 2, 1)
    found = attention.attend(*ours, attention.Tiles([21, 19, 20], torch.device(DEVICE)))
    found.backward(torch.where(heads[:, :2].isnan(), torch.nan, torch.ones_like(found)))
    for each in (found.detach(), *(part.grad for part in ours)):
        assert each is not None
        assert bool(each[:21].isfinite().all())
        assert bool(each[40:].isfinite().all())
        assert bool(each[21:40].isnan().any())


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    heads = normal(90, 4, 64 if DEVICE == "cuda" else 16, dtype=dtype)
    alone, among = (parts_of(part, 2, 1) for part in (heads[40:77], heads))
    device = torch.device(DEVICE)
    first = attention.attend(*alone, attention.Tiles([37], device))
    second = attention.attend(*among, attention.Tiles([40, 37, 13], device))
    first.sum().backward()
    second.sum().backward()
    assert torch.equal(first, second[40:77])
    for mine, ours in zip(alone, among, strict=True):
        assert mine.grad is not None
        assert ours.grad is not None
        assert torch.equal(mine.grad, ours.grad[40:77])


def test_gradients_are_the_same_whether_those_of_scores_are_kept_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    heads = normal(75, 8, 64 if DEVICE == "cuda" else 16, dtype=dtype)
    found = []
    for most in (attention.MAX_KEPT_BYTES, 0):
        monkeypatch.setattr(attention, "MAX_KEPT_BYTES", most)
        parts = parts_of(heads, 4, 2)
        attention.attend(*parts, attention.Tiles([40, 35], torch.device(DEVICE))).square().sum().backward()
        found.append([part.grad for part in parts])
    for kept, again in zip(*found, strict=True):
        # On a CPU the interpreter sums in another order.
        assert torch.equal(kept, again) if DEVICE == "cuda" else torch.allclose(kept, again, atol=1e-5)


def test_blocks_that_do_not_end_where_a_tile_begins_are_refused() -> None:
    q = normal(8, 1, 16)
    tiles = attention.Tiles([8], q.device).cut(16, later_first=True)
    with pytest.raises(AssertionError):
        attention.forward(q, q, q, tiles, Shape(16, 32, 4, 2))
