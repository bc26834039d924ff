"""Adapters written to files: peft loads them unchanged, and training resumed from them goes on as if never stopped."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from tests.server.engine.oracle import randomise
from tests.server.tiny_models import make_model, save_model
from tinsmith.errors import InvalidInputError
from tinsmith.server.engine import adapter_facts, adapter_files
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.attention import PackedCausal
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.damage import DamagedError
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.lora import LoraRows
from tinsmith.types import AdamParams

TOKENS = [3, 14, 15, 92, 65, 35]
FLAGS: dict[str, dict[str, bool]] = {
    "everything": {},
    "attention": {"train_mlp": False, "train_unembed": False},
    "mlp": {"train_attn": False, "train_unembed": False},
    "unembedding": {"train_attn": False, "train_mlp": False},
}


@pytest.fixture(scope="module", params=["llama", "smollm2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(family: str, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = save_model(tmp_path_factory.mktemp("models") / family, family)
    return Engine.open(folder, device="cpu", dtype="float32", kv_tokens=512)


def trained(engine: Engine, adapter: Adapter, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        losses.append(_forward_backward(engine, adapter, first=step))
        engine.optim_step(adapter, AdamParams(learning_rate=1e-2, weight_decay=0.1))
    return losses


def _forward_backward(engine: Engine, adapter: Adapter, first: int) -> float:
    tokens = np.arange(first, first + 8)
    inputs: dict[str, Any] = {"target_tokens": tokens + 1, "weights": np.ones(8, np.float32)}
    (output,) = engine.forward_backward([TrainRow(adapter, tokens, "cross_entropy", inputs)])
    return output.loss


def logits(engine: Engine, adapter: Adapter) -> torch.Tensor:
    tokens = torch.tensor(TOKENS)
    rows = LoraRows([(0, len(TOKENS), adapter)])
    with torch.no_grad():
        hidden = engine.model.hidden(tokens, torch.arange(len(TOKENS)), PackedCausal([len(TOKENS)]), rows)
        return engine.model.logits(hidden, rows)


# With tied embeddings peft warns that the unembedding gets an adapter and the embedding none, which is what we mean.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_peft_loads_a_saved_adapter_and_gives_the_same_logits(
    engine: Engine, family: str, flags: dict[str, bool], tmp_path: Path
) -> None:
    adapter = randomise(engine.create_adapter(AdapterSpec(rank=4, seed=1, **flags)))
    adapter_files.write_adapter(tmp_path, adapter, family)
    model = PeftModel.from_pretrained(make_model(family), str(tmp_path))
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(engine, adapter), theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(theirs, make_model(family)(torch.tensor([TOKENS])).logits[0], atol=1e-3)


def test_every_adapted_layer_is_listed(engine: Engine, tmp_path: Path) -> None:
    adapter_files.write_adapter(tmp_path, engine.create_adapter(AdapterSpec(rank=4, seed=1)), "tiny/model")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert set(config["target_modules"]) == layers
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    assert config["base_model_name_or_path"] == "tiny/model"


def test_training_resumed_with_the_optimizer_is_bitwise_the_same(engine: Engine, tmp_path: Path) -> None:
    spec = AdapterSpec(rank=4, seed=7, train_mlp=False)
    first = engine.create_adapter(spec)
    trained(engine, first)
    _forward_backward(engine, first, first=20)  # a gradient that still waits for its step
    adapter_files.write_adapter(tmp_path, first, "tiny/model", with_optimizer=True)
    assert adapter_files.read_spec(tmp_path) == spec
    second = engine.create_adapter(adapter_files.read_spec(tmp_path))
    adapter_files.read_adapter(tmp_path, second, with_optimizer=True)
    assert trained(engine, second) == trained(engine, first)
    assert torch.equal(second.weights, first.weights)


def test_without_the_optimizer_only_the_weights_come_back(engine: Engine, tmp_path: Path) -> None:
    first = engine.create_adapter(AdapterSpec(rank=4, seed=7))
    trained(engine, first)
    adapter_files.write_adapter(tmp_path, first, "tiny/model")
    second = engine.create_adapter(AdapterSpec(rank=4, seed=8))
    trained(engine, second)
    adapter_files.read_adapter(tmp_path, second, with_optimizer=False)
    assert torch.equal(second.weights, first.weights)
    assert second.step == 0
    third = engine.create_adapter(AdapterSpec(rank=4, seed=9))
    before = third.weights.clone()
    with pytest.raises(InvalidInputError, match="no optimizer state"):
        adapter_files.read_adapter(tmp_path, third, with_optimizer=True)
    assert torch.equal(third.weights, before)


def test_an_adapter_of_another_rank_is_refused(engine: Engine, tmp_path: Path) -> None:
    adapter_files.write_adapter(tmp_path, engine.create_adapter(AdapterSpec(rank=4, seed=1)), "tiny/model")
    with pytest.raises(InvalidInputError, match="same base model and rank"):
        adapter_files.read_adapter(tmp_path, engine.create_adapter(AdapterSpec(rank=8, seed=1)), with_optimizer=False)


def test_every_byte_that_is_read_is_looked_at(engine: Engine, tmp_path: Path) -> None:
    """A space between the parts of a JSON file means nothing."""
    first = randomise(engine.create_adapter(AdapterSpec(rank=1, seed=1, train_mlp=False, train_unembed=False)))
    adapter_files.write_adapter(tmp_path, first, "tiny/model", with_optimizer=True)
    kept, second = tmp_path / "kept", engine.create_adapter(first.spec)
    for name in (adapter_facts.WEIGHTS, adapter_facts.OPTIMIZER, adapter_facts.FACTS):
        file = (tmp_path / name).rename(kept)
        content = file.read_bytes()
        for place in {*range(0, len(content), 1 + len(content) // 300), len(content) - 1}:
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            (tmp_path / name).write_bytes(changed)
            if name != adapter_facts.FACTS or not chr(content[place]).isspace():
                with pytest.raises(DamagedError, match=name):
                    adapter_files.read_adapter(tmp_path, second, with_optimizer=True)
        kept.rename(tmp_path / name)
    adapter_files.read_adapter(tmp_path, second, with_optimizer=True)
    assert torch.equal(second.weights, first.weights)


def test_an_adapter_of_a_release_without_checksums_is_read(engine: Engine, tmp_path: Path) -> None:
    first = randomise(engine.create_adapter(AdapterSpec(rank=4, seed=1, train_mlp=False)))
    adapter_files.write_adapter(tmp_path, first, "tiny/model")
    facts = json.loads((tmp_path / adapter_facts.FACTS).read_text())
    del facts["checksums"]
    (tmp_path / adapter_facts.FACTS).write_text(json.dumps(facts))
    second = engine.create_adapter(adapter_files.read_spec(tmp_path))
    adapter_files.read_adapter(tmp_path, second, with_optimizer=False)
    assert torch.equal(second.weights, first.weights)


@pytest.mark.parametrize("name", [adapter_facts.WEIGHTS, adapter_facts.OPTIMIZER, adapter_facts.FACTS])
def test_whatever_keeps_a_file_from_being_read_is_damage(engine: Engine, tmp_path: Path, name: str) -> None:
    adapter = engine.create_adapter(AdapterSpec(rank=4, seed=1))
    adapter_files.write_adapter(tmp_path, adapter, "tiny/model", with_optimizer=True)
    file = tmp_path / name
    file.unlink()
    obstacles: list[Callable[[], object]] = [lambda: None, file.mkdir, lambda: file.symlink_to(file)]
    for place_in_the_way in obstacles:
        place_in_the_way()
        with pytest.raises(DamagedError, match=f"{name} cannot be read"):
            adapter_files.read_adapter(tmp_path, adapter, with_optimizer=True)
        if file.is_dir():
            file.rmdir()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EINTR])
def test_what_any_file_would_have_met_is_no_damage(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    adapter = engine.create_adapter(AdapterSpec(rank=4, seed=1))
    adapter_files.write_adapter(tmp_path, adapter, "tiny/model")
    adapter_files.write_frozen(tmp_path / "one", adapter.frozen_copy())

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        adapter_files.read_adapter(tmp_path, adapter, with_optimizer=False)
    with pytest.raises(OSError, match=os.strerror(number)):
        adapter_files.read_frozen(tmp_path / "one", engine.model)


def test_sampler_weights_come_back_bitwise(engine: Engine, tmp_path: Path) -> None:
    adapter = randomise(engine.create_adapter(AdapterSpec(rank=4, seed=1, train_attn=False)))
    frozen = adapter.frozen_copy()
    adapter_files.write_frozen(tmp_path / "one", frozen)
    found = adapter_files.read_frozen(tmp_path / "one", engine.model)
    assert torch.equal(found.flat, frozen.flat)
    assert found.spec == frozen.spec


def test_every_byte_of_sampler_weights_is_looked_at(engine: Engine, tmp_path: Path) -> None:
    spec = AdapterSpec(rank=1, seed=1, train_mlp=False, train_unembed=False)
    frozen = randomise(engine.create_adapter(spec)).frozen_copy()
    file = tmp_path / "one"
    adapter_files.write_frozen(file, frozen)
    content = file.read_bytes()
    padding = range(8 + content[8:].rindex(b"}}") + 2, len(content) - frozen.flat.nbytes)
    for place in {*range(len(content) - frozen.flat.nbytes), *range(0, len(content), 1 + len(content) // 300)}:
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        file.write_bytes(changed)
        try:
            found = adapter_files.read_frozen(file, engine.model)
        except DamagedError:
            continue
        assert place in padding
        assert torch.equal(found.flat, frozen.flat)


def test_sampler_weights_of_a_release_without_checksums_are_read(engine: Engine, tmp_path: Path) -> None:
    frozen = randomise(engine.create_adapter(AdapterSpec(rank=4, seed=1))).frozen_copy()
    spec = {name: json.dumps(getattr(frozen.spec, name)) for name in vars(frozen.spec)}
    save_file({"flat": frozen.flat}, tmp_path / "one", metadata=spec)
    assert torch.equal(adapter_files.read_frozen(tmp_path / "one", engine.model).flat, frozen.flat)
