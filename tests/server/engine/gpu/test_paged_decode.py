"""Attention over tables of blocks equals attention over the tokens in a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.server.engine.gpu.devices import DEVICE, SILENT_AS_A_GPU, assert_near, normal
from tinsmith.server.engine.gpu import paged_decode

pytestmark = SILENT_AS_A_GPU

BLOCK = 16


def plainly(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [H, D], keys and values [L, K, D] -> [H, D], in float64."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, dim=1) for part in (keys, values))
    shares = (torch.einsum("hd,lhd->hl", q.double(), keys) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("hl,lhd->hd", shares, values)


@pytest.mark.parametrize("tile", [shape for _, shape in paged_decode.TILES], ids=str)
@pytest.mark.parametrize("positions", [[0], [15], [16], [130], [5, 0, 70, 31, 32]], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["no-groups", "groups"])
def test_a_new_token_sees_its_past_and_itself(
    positions: list[int], heads: tuple[int, int], tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode, "TILES", ((0, tile),))
    (num_heads, num_kv_heads), size, num_rows = heads, 16, len(positions)
    num_blocks = max(positions) // BLOCK + 1
    tables = torch.randperm(num_rows * num_blocks + 3)[: num_rows * num_blocks].view(num_rows, -1)
    keys, values = normal((num_rows * num_blocks + 3) * BLOCK, num_kv_heads, size), None
    values = normal(*keys.shape)
    before = keys.clone(), values.clone()
    qkv = normal(num_rows, num_heads + 2 * num_kv_heads, size)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    attended = paged_decode.attend(
        q, k, v, keys, values, tables.to(DEVICE, torch.int32), torch.tensor(positions, device=DEVICE), BLOCK
    )
    for row, position in enumerate(positions):
        slots = [int(tables[row, token // BLOCK]) * BLOCK + token % BLOCK for token in range(position + 1)]
        seen = [torch.cat([part[slots[:-1]], new[row : row + 1]]) for part, new in zip(before, (k, v), strict=True)]
        assert_near(attended[row], plainly(q[row], *seen))
        assert torch.equal(keys[slots], seen[0])
        assert torch.equal(values[slots], seen[1])


def test_what_is_not_a_number_stays_out_of_the_cache_and_shows_in_its_own_row() -> None:
    keys, values = normal(3 * BLOCK, 2, 16), normal(3 * BLOCK, 2, 16)
    q, k, v = normal(2, 4, 16), normal(2, 2, 16), normal(2, 2, 16)
    k[0, 0, 3] = torch.nan
    v[0, 1, 5] = torch.inf
    tables = torch.tensor([[0], [2]], dtype=torch.int32, device=DEVICE)
    attended = paged_decode.attend(q, k, v, keys, values, tables, torch.tensor([4, 4], device=DEVICE), BLOCK)
    assert not attended[0].isfinite().all()
    assert attended[1].isfinite().all()
    assert keys.isfinite().all()
    assert values.isfinite().all()
