"""Samplers keep the weights they were made from, in memory or not."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.engine.oracle import randomise
from tinsmith.errors import InvalidInputError
from tinsmith.server import sampling_weights
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.engine import adapter_facts, adapter_files
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.engine import Engine
from tinsmith.server.sampling_weights import SamplingWeights
from tinsmith.server.snapshots import LostError
from tinsmith.server.spilled import SpilledWeights
from tinsmith.server.store.records import Sampler

PATH = "tinker://run:train:0/sampler_weights/final"


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Engine:
    return Engine.open(tiny_folder, device="cpu", dtype="float32", kv_tokens=512)


@pytest.fixture
def weights(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SamplingWeights:
    """Room for two."""
    monkeypatch.setattr(sampling_weights, "MAX_IN_MEMORY", 2)
    return SamplingWeights(engine, CheckpointFolders(tmp_path / "checkpoints"), SpilledWeights(tmp_path / "samplers"))


def sampler(number: int, **source: Any) -> Sampler:
    made: dict[str, Any] = {"model_path": None, "saved_by": None, "model_id": None, "model_seq_id": None, **source}
    return Sampler(
        sampler_id=f"s:sample:{number}",
        session_id="s",
        owner="ann",
        base_model="tiny",
        created=datetime(2030, 1, 1, tzinfo=UTC),
        inflight=False,
        removed=None,
        session_state="active",
        **made,
    )


def adapter(engine: Engine, seed: int) -> Adapter:
    return randomise(engine.create_adapter(AdapterSpec(rank=2, seed=seed)), seed=seed)


def never(sampler: Sampler) -> Adapter:
    raise AssertionError("nothing had to be rebuilt")


def test_the_base_model_has_no_weights_of_its_own(weights: SamplingWeights) -> None:
    assert weights.get(sampler(0), never) is None


def test_those_that_do_not_fit_in_memory_come_back_from_a_file(
    weights: SamplingWeights, engine: Engine, tmp_path: Path
) -> None:
    adapters = [adapter(engine, seed) for seed in range(4)]
    for number, one in enumerate(adapters):
        weights.keep(f"s:sample:{number}", one.frozen_copy())
    assert len(list((tmp_path / "samplers").iterdir())) == 2
    for number, one in enumerate(adapters):
        found = weights.get(sampler(number, model_id="m", model_seq_id=1), never)
        assert found is not None
        assert torch.equal(found.flat, one.weights)


def test_those_that_cannot_be_written_stay_in_memory(weights: SamplingWeights, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "samplers").write_text("in the way")
    for number in range(4):
        weights.keep(f"s:sample:{number}", adapter(engine, number).frozen_copy())
    assert weights.get(sampler(0, model_id="m", model_seq_id=1), never) is not None
    with pytest.raises(OSError, match="samplers"):
        weights.save(["s:sample:3"])
    (tmp_path / "samplers").unlink()
    weights.keep("s:sample:4", adapter(engine, 4).frozen_copy())
    assert len(list((tmp_path / "samplers").iterdir())) == 3


def test_what_was_used_last_stays(weights: SamplingWeights, engine: Engine) -> None:
    for number in range(2):
        weights.keep(f"s:sample:{number}", adapter(engine, number).frozen_copy())
    used = weights.get(sampler(0, model_id="m", model_seq_id=1), never)
    weights.keep("s:sample:2", adapter(engine, 2).frozen_copy())
    assert weights.get(sampler(0, model_id="m", model_seq_id=1), never) is used


def test_a_copy_lost_with_its_process_is_made_again(weights: SamplingWeights, engine: Engine) -> None:
    asked: list[Sampler] = []

    def rebuild(sampler: Sampler) -> Adapter:
        asked.append(sampler)
        return adapter(engine, 5)

    lost = sampler(0, model_id="m", model_seq_id=3)
    found = weights.get(lost, rebuild)
    assert weights.get(lost, rebuild) is found
    assert asked == [lost]


def damaged_file(weights: SamplingWeights, engine: Engine, folder: Path) -> Path:
    """Of the first sampler, whose weights were the first to leave the memory."""
    for number in range(3):
        weights.keep(f"s:sample:{number}", adapter(engine, number).frozen_copy())
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    content[-10] ^= 2
    file.write_bytes(content)
    return file


def test_a_damaged_file_is_written_once_more_if_its_model_can_be_rebuilt(
    weights: SamplingWeights, engine: Engine, tmp_path: Path
) -> None:
    file = damaged_file(weights, engine, tmp_path / "samplers")
    first = sampler(0, model_id="m", model_seq_id=1)
    found = weights.get(first, lambda sampler: adapter(engine, 0))
    assert found is not None
    assert torch.equal(found.flat, adapter(engine, 0).weights)
    weights.save([first.sampler_id])
    assert torch.equal(adapter_files.read_frozen(file, engine.model).flat, found.flat)


def test_a_damaged_file_of_a_model_that_is_gone_says_what_to_do(
    weights: SamplingWeights, engine: Engine, tmp_path: Path
) -> None:
    def gone(sampler: Sampler) -> Adapter:
        raise LostError("what was done since its beginning is not kept any more")

    damaged_file(weights, engine, tmp_path / "samplers")
    with pytest.raises(LostError, match=r"are damaged on the server's disk .* Make a new sampling client"):
        weights.get(sampler(0, model_id="m", model_seq_id=1), gone)
    assert weights.get(sampler(2, model_id="m", model_seq_id=1), never) is not None, "others are not concerned"


def test_a_checkpoint_is_read_from_its_folder(weights: SamplingWeights, engine: Engine, tmp_path: Path) -> None:
    saved = adapter(engine, 1)
    folders = CheckpointFolders(tmp_path / "checkpoints")
    with folders.writing(PATH) as folder:
        adapter_files.write_adapter(folder, saved, "tiny")
    found = weights.get(sampler(0, model_path=PATH), never)
    assert found is not None
    assert torch.equal(found.flat, saved.weights)
    folders.delete(PATH)
    assert weights.get(sampler(0, model_path=PATH), never) is found
    with pytest.raises(InvalidInputError, match="does not exist any more"):
        weights.get(sampler(1, model_path=PATH), never)


@pytest.mark.parametrize("name", [adapter_facts.WEIGHTS, adapter_facts.FACTS])
def test_a_damaged_checkpoint_is_not_sampled_from(
    weights: SamplingWeights, engine: Engine, tmp_path: Path, name: str
) -> None:
    with CheckpointFolders(tmp_path / "checkpoints").writing(PATH) as folder:
        adapter_files.write_adapter(folder, adapter(engine, 1), "tiny")
        content = bytearray((folder / name).read_bytes())
        content[-10] ^= 2
        (folder / name).write_bytes(content)
    with pytest.raises(LostError, match=f"are damaged on the server's disk .{name}"):
        weights.get(sampler(0, model_path=PATH), never)
