"""Blocks are shared, kept and handed out again without a leak."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.server.tiny_models import make_model
from tinsmith.server.engine.kv_cache import Blocks, BlockTable, KvPool, prefix_keys, row_pitch
from tinsmith.server.engine.model import ModelShape

SIZE = 4


def keys_of(*tokens: int, owner: bytes = b"base") -> list[bytes]:
    return prefix_keys(owner, np.array(tokens, np.int32), SIZE)


def test_new_blocks_lie_side_by_side_at_a_multiple_of_their_pitch() -> None:
    blocks = Blocks(64, SIZE)
    blocks.allocate(3)
    assert blocks.allocate(5).tolist() == [8, 9, 10, 11, 12]
    assert blocks.allocate(1).tolist() == [3], "small ones fill the gaps"


def test_without_a_place_side_by_side_single_blocks_are_handed_out() -> None:
    blocks = Blocks(8, SIZE)
    taken = [blocks.allocate(1) for _ in range(8)]
    for block in taken[::2]:
        blocks.release(block)
    assert blocks.allocate(4).tolist() == [0, 2, 4, 6]


def test_asking_for_more_than_there_is_changes_nothing() -> None:
    blocks = Blocks(4, SIZE)
    blocks.allocate(2)
    with pytest.raises(RuntimeError, match="3 blocks were asked for, and 2 are available"):
        blocks.allocate(3)
    assert blocks.num_available == 2


def test_releasing_twice_is_noticed() -> None:
    blocks = Blocks(4, SIZE)
    taken = blocks.allocate(2)
    blocks.release(taken)
    with pytest.raises(RuntimeError, match="released more often"):
        blocks.release(taken)


def test_a_remembered_prefix_is_found_as_far_as_it_agrees() -> None:
    blocks = Blocks(8, SIZE)
    taken = blocks.allocate(2)
    blocks.remember(keys_of(1, 2, 3, 4, 5, 6, 7, 8), taken)
    blocks.release(taken)
    assert blocks.find(keys_of(1, 2, 3, 4, 5, 6, 7, 8, 9)).tolist() == taken.tolist()
    assert blocks.find(keys_of(1, 2, 3, 4, 0, 6, 7, 8)).tolist() == taken[:1].tolist()
    assert blocks.find(keys_of(0, 2, 3, 4, 5, 6, 7, 8)).tolist() == []


def test_the_prefix_of_another_adapter_is_another_prefix() -> None:
    assert not set(keys_of(1, 2, 3, 4, owner=b"one")) & set(keys_of(1, 2, 3, 4, owner=b"two"))


def test_the_longest_unused_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    blocks = Blocks(4, SIZE)
    old, new = blocks.allocate(2), blocks.allocate(2)
    old_keys, new_keys = keys_of(*[1] * 8), keys_of(*[2] * 8)
    blocks.remember(old_keys, old)
    blocks.remember(new_keys, new)
    blocks.release(old)
    blocks.release(new)
    blocks.allocate(1)
    assert len(blocks.find(old_keys)) == 1
    assert len(blocks.find(new_keys)) == 2


def test_blocks_in_use_are_never_handed_out() -> None:
    blocks = Blocks(4, SIZE)
    taken = blocks.allocate(2)
    blocks.share(taken)
    blocks.release(taken)
    assert set(blocks.allocate(2).tolist()).isdisjoint(taken.tolist())


@dataclass
class Model:
    """What must hold, kept the slow way: a list of users, each with its blocks."""

    blocks: Blocks
    users: list[tuple[list[bytes], np.ndarray]] = field(default_factory=list)

    def check(self) -> None:
        counts = np.zeros(self.blocks.num_blocks, int)
        for _, used in self.users:
            assert len(set(used.tolist())) == len(used)
            counts[used] += 1
        assert self.blocks.references.tolist() == counts.tolist()
        assert self.blocks.num_available == int((counts == 0).sum())
        assert self.blocks.num_cached <= self.blocks.num_blocks


@given(st.lists(st.tuples(st.sampled_from(["add", "share", "leave"]), st.integers(0, 9), st.integers(1, 9))))
def test_reference_counts_equal_the_users_after_any_history(steps: list[tuple[str, int, int]]) -> None:
    model = Model(Blocks(16, SIZE))
    for action, prompt, count in steps:
        keys = keys_of(*[prompt // 2] * SIZE, *[prompt] * (SIZE * (count - 1)))
        if action == "add":
            found = model.blocks.find(keys)
            unused = int((model.blocks.references[found] == 0).sum())
            if count - len(found) > model.blocks.num_available - unused:
                continue
            model.blocks.share(found)
            used = np.concatenate([found, model.blocks.allocate(count - len(found))])
            model.blocks.remember(keys, used)
            model.users.append((keys, used))
        elif model.users and action == "share":
            keys, used = model.users[prompt % len(model.users)]
            model.blocks.share(used)
            model.users.append((keys, used))
        elif model.users:
            model.blocks.release(model.users.pop(prompt % len(model.users))[1])
        model.check()
        for keys, used in model.users:
            assert len(model.blocks.find(keys)) == len(used), "what is in use can be found"
    for _, used in model.users:
        model.blocks.release(used)
    assert model.blocks.num_available == 16
    assert model.blocks.allocate(16).tolist() == list(range(16))
    assert model.blocks.num_cached == 0


@given(st.lists(st.integers(0, 63), min_size=1, max_size=12, unique=True), st.data())
def test_the_runs_of_a_table_are_its_slots(order: list[int], data: st.DataObject) -> None:
    num_shared = data.draw(st.integers(0, len(order)))
    table = BlockTable(np.array(order[:num_shared], int), np.array(order[num_shared:], int), SIZE)
    num_tokens = data.draw(st.integers(0, len(order) * SIZE))
    runs = table.runs(num_tokens)
    assert [slot for start, length, _ in runs for slot in range(start, start + length)] == table.slots[
        :num_tokens
    ].tolist()
    assert all(pitch == 0 or (start % pitch == 0 and length <= pitch) for start, length, pitch in runs)


@pytest.mark.parametrize(("count", "pitch"), [(0, 1), (1, 1), (2, 2), (3, 4), (8, 8), (9, 16)])
def test_a_pitch_is_the_next_power_of_two(count: int, pitch: int) -> None:
    assert row_pitch(count) == pitch


@pytest.fixture
def pool() -> KvPool:
    shape = ModelShape.from_config(make_model().config.to_dict())
    return KvPool(shape, 32, torch.float32, torch.device("cpu"))


def test_rows_are_views_of_what_was_written(pool: KvPool) -> None:
    k, v = torch.randn(2, 8, 2, 8).unbind()
    pool.write(1, torch.tensor([8, 9, 10, 11, 16, 17, 18, 19]), k, v)
    keys, values = pool.rows(1, 8, 8, 2, 3)
    assert torch.equal(keys, k.view(2, 4, 2, 8)[:, :3].transpose(1, 2))
    assert torch.equal(values, v.view(2, 4, 2, 8)[:, :3].transpose(1, 2))
    assert keys.untyped_storage().data_ptr() == pool.storage.untyped_storage().data_ptr()
    assert pool.storage[0].count_nonzero() == 0


def test_copied_tokens_are_the_same_in_every_layer(pool: KvPool) -> None:
    pool.storage.normal_()
    pool.copy(np.array([3, 4, 5]), np.array([20, 21, 22]))
    assert torch.equal(pool.storage[:, :, 20:23], pool.storage[:, :, 3:6])


def test_what_is_not_a_number_never_enters_the_pool(pool: KvPool) -> None:
    broken = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0]).repeat(2, 2, 2)
    pool.write(0, torch.tensor([0, 1]), broken, broken)
    assert pool.storage.isfinite().all()
    assert pool.storage.max() == 1


def test_shared_blocks_are_a_run_of_their_own_even_beside_the_others() -> None:
    table = BlockTable(np.array([0, 1]), np.array([2, 3]), SIZE)
    assert table.runs(13) == [(0, 8, 8), (8, 5, 8)]
