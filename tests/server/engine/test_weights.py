"""Model folders: one file or many, tied or not; what is missing is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.server.tiny_models import make_model, save_model
from tinsmith.errors import ConfigError
from tinsmith.server.engine.weights import end_of_text, load_model


def test_a_model_in_many_files_equals_the_same_in_one(tmp_path: Path, tiny_folder: Path) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    many, one = load_model(tmp_path, "cpu", torch.float32), load_model(tiny_folder, "cpu", torch.float32)
    assert torch.equal(many.layers[2].gate_up.plain(), one.layers[2].gate_up.plain())
    assert torch.equal(many.head.plain(), one.head.plain())


def test_tied_embeddings_are_the_head(tmp_path: Path) -> None:
    model = load_model(save_model(tmp_path, "smollm2"), "cpu", torch.float32)
    assert torch.equal(model.head.plain(), model.embedding)


def test_matrices_take_the_compute_dtype_and_norms_stay_float32(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, "cpu", torch.bfloat16)
    assert model.compute_dtype == model.layers[0].qkv.dtype == torch.bfloat16
    assert model.final_norm.dtype == model.layers[0].input_norm.dtype == torch.float32


def test_the_end_of_a_text_is_read_from_the_generation_settings_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert end_of_text(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert end_of_text(tmp_path) == {2, 5}


def test_what_a_folder_lacks_is_named(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path, "cpu", torch.float32)
    shutil.copy(tiny_folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load_model(tmp_path, "cpu", torch.float32)
    shutil.copy(tiny_folder / "model.safetensors", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.3"):
        load_model(tmp_path, "cpu", torch.float32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_model(tmp_path, "cpu", torch.float32)
