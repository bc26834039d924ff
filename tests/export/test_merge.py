"""A merged folder is the base plus the adapter, to the last bit that the base's format holds."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.export.making import TIED, export, load, logits, write_random_adapter
from tests.server.tiny_models import FAMILIES, make_model, save_model
from tinsmith.errors import InvalidInputError
from tinsmith.export import MERGED, PEFT
from tinsmith.export.numbers import from_floats, to_floats
from tinsmith.export.tensor_files import BLOCK_BYTES
from tinsmith.server.engine.adapters import AdapterSpec


def merge(adapter: Path, base: Path, target: Path, **options: Any) -> Path:
    return export(MERGED, adapter, base, target, **options)


def peft_folder(adapter: Path, target: Path) -> Path:
    return export(PEFT, adapter, None, target)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", "qwen3")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return write_random_adapter(tmp_path / "adapter", base)


# --- the same model --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(TIED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_folder_computes_what_the_adapter_computes(tmp_path: Path, family: str) -> None:
    base = save_model(tmp_path / "base", family)
    adapter = write_random_adapter(tmp_path / "adapter", base)
    merged = load(merge(adapter, base, tmp_path / "merged"))
    adapted = PeftModel.from_pretrained(load(base), peft_folder(adapter, tmp_path / "peft"))
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
    assert (logits(adapted) - logits(load(base))).abs().max() > 0.1, "the adapter changes nothing"
    assert not merged.config.tie_word_embeddings, "the adapter changes the output matrix and not the embedding"


@pytest.mark.parametrize("family", ["qwen3", "llama_biases"])
def test_merged_weights_are_those_that_peft_merges(tmp_path: Path, family: str) -> None:
    base = save_model(tmp_path / "base", family)
    adapter = write_random_adapter(tmp_path / "adapter", base)
    ours = load_file(merge(adapter, base, tmp_path / "merged") / "model.safetensors")
    theirs = PeftModel.from_pretrained(load(base), peft_folder(adapter, tmp_path / "peft")).merge_and_unload()
    assert ours.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


def test_tied_embeddings_stay_tied_if_the_output_was_not_trained(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "smollm2")
    spec = AdapterSpec(rank=4, seed=1, train_unembed=False)
    adapter = write_random_adapter(tmp_path / "adapter", base, spec)
    folder = merge(adapter, base, tmp_path / "merged")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    merged = load(folder)
    assert merged.config.tie_word_embeddings
    adapted = PeftModel.from_pretrained(load(base), peft_folder(adapter, tmp_path / "peft"))
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)


def test_a_tied_model_that_stores_its_head_all_the_same_is_untied_too(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "smollm2")
    plain = merge(write_random_adapter(tmp_path / "adapter", base), base, tmp_path / "merged")
    weights = load_file(base / "model.safetensors")
    save_file({**weights, "lm_head.weight": torch.zeros(97, 48)}, base / "model.safetensors", {"format": "pt"})
    again = merge(tmp_path / "adapter", base, tmp_path / "again")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (plain, again))
    torch.testing.assert_close(ours["lm_head.weight"], theirs["lm_head.weight"], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_is_taken_in_float32_and_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    make_model("llama").to(dtype).save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    adapter = write_random_adapter(tmp_path / "adapter", base)
    merged = load_file(merge(adapter, base, tmp_path / "merged") / "model.safetensors")
    before, lora = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    a, b = (lora[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
    expected = (before[f"{name}.weight"].float() + (b * 8.0) @ a).to(dtype)
    assert merged[f"{name}.weight"].dtype == dtype
    torch.testing.assert_close(merged[f"{name}.weight"], expected, rtol=0, atol=0)
    torch.testing.assert_close(merged["model.norm.weight"], before["model.norm.weight"], rtol=0, atol=0)


@pytest.mark.parametrize(("name", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)])
def test_numbers_are_rounded_as_torch_rounds_them(name: str, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(100_000).astype(np.float32)
    values = np.concatenate(
        [values, values * np.float32(1e-30), np.float32([0.0, -0.0, 1.00390625, 1.01171875, 65504])]
    )
    theirs = torch.from_numpy(values).to(dtype)
    ours = from_floats(values, name)
    assert ours == theirs.view(torch.uint8).numpy().tobytes()
    np.testing.assert_array_equal(to_floats(ours, name), theirs.float().numpy())


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_a_base_in_several_files_stays_in_several_files(tmp_path: Path, family: str) -> None:
    base = save_model(tmp_path / "base", family)
    sharded = tmp_path / "sharded"
    make_model(family).save_pretrained(sharded, max_shard_size="30KB")
    adapter = write_random_adapter(tmp_path / "adapter", base)
    whole = load_file(merge(adapter, base, tmp_path / "merged") / "model.safetensors")
    folder = merge(adapter, sharded, tmp_path / "parts")
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) > 2
    assert (
        sorted(path.name for path in folder.glob("*.safetensors")) == files == sorted(set(index["weight_map"].values()))
    )
    parts = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert parts.keys() == whole.keys() == index["weight_map"].keys()
    for name, tensor in parts.items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=0)
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in parts.values())
    torch.testing.assert_close(logits(load(folder)), logits(load(tmp_path / "merged")), rtol=0, atol=0)


def test_what_belongs_to_the_model_comes_along_and_nothing_else(tmp_path: Path, base: Path, adapter: Path) -> None:
    companions = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "hi",
        "LICENSE": "free",
        "additional_chat_templates/tools.jinja": "tools",
    }
    (base / "additional_chat_templates").mkdir()
    for name, text in {**companions, "README.md": "old", "pytorch_model.bin": "x", "tinsmith.json": "{}"}.items():
        (base / name).write_text(text)
    folder = merge(adapter, base, tmp_path / "merged")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {*companions, "README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert (folder / "chat_template.jinja").read_text() == "hi"
    card = (folder / "README.md").read_text()
    assert "base_model: tiny/base\n" in card
    assert "tinker_path: tinker://run/weights/one\n" in card
    assert "| adapter | LoRA, merged into the weights |\n| rank | 4 |\n| alpha | 32 |" in card


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Of two bases, one with matrices ten times as large as a block: the same few blocks for both."""

    def peak(vocab_size: int) -> int:
        place = tmp_path / str(vocab_size)
        base = save_model(place / "base", "smollm2", vocab_size=vocab_size)
        adapter = write_random_adapter(place / "adapter", base)
        tracemalloc.start()
        merge(adapter, base, place / "merged")
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        shutil.rmtree(place)
        return used - 2 * vocab_size * 4 * 4  # B of the output matrix, as it is and scaled, is in memory whole

    small, large = peak(1_000), peak(500_000)
    assert 10 * BLOCK_BYTES < 500_000 * 48 * 4
    assert small < large < 6 * BLOCK_BYTES


def test_progress_counts_every_byte(tmp_path: Path, base: Path, adapter: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    folder = merge(adapter, base, tmp_path / "merged", on_progress=lambda *told: heard.append(told))
    total = sum(file.stat().st_size for file in folder.iterdir())
    assert heard[-1] == ("model.safetensors", total, total)
    assert [done for _, done, _ in heard] == sorted(done for _, done, _ in heard)


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(adapter: Path, base: Path, target: Path) -> str:
    with pytest.raises(InvalidInputError) as refused:
        merge(adapter, base, target)
    assert sorted(path.name for path in target.parent.iterdir()) == ["adapter", "base"], "something was left behind"
    return str(refused.value)


def test_a_base_of_another_shape_is_refused_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3")
    adapter = write_random_adapter(tmp_path / "adapter", base)
    shutil.rmtree(base)
    save_model(base, "qwen3", intermediate_size=64)
    text = refusal(adapter, base, tmp_path / "merged")
    assert "model.layers.0.mlp.down_proj as a matrix of [32, 48]" in text
    assert "is [32, 64]. Give the model that the adapter was trained on" in text


def test_a_base_without_a_layer_is_refused_by_the_name_of_the_module(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3")
    adapter = write_random_adapter(tmp_path / "adapter", base)
    shutil.rmtree(base)
    save_model(base, "qwen3", num_hidden_layers=2)
    assert "changes model.layers.2.mlp.down_proj, but the base" in refusal(adapter, base, tmp_path / "merged")


def change_config(folder: Path, file: str, **changes: Any) -> None:
    config = json.loads((folder / file).read_bytes())
    (folder / file).write_text(json.dumps({**config, **changes}))


def test_quantised_and_incomplete_bases_are_refused(tmp_path: Path, base: Path, adapter: Path) -> None:
    change_config(base, "config.json", quantization_config={"quant_method": "fp8"})
    assert "quantised with fp8" in refusal(adapter, base, tmp_path / "merged")
    (base / "config.json").unlink()
    assert "has no config.json" in refusal(adapter, base, tmp_path / "merged")


def test_a_base_file_that_was_cut_short_is_refused(tmp_path: Path, base: Path, adapter: Path) -> None:
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "but its head announces" in refusal(adapter, base, tmp_path / "merged")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "is not a safetensors file" in refusal(adapter, base, tmp_path / "merged")
    file.unlink()
    assert "lacks model.safetensors" in refusal(adapter, base, tmp_path / "merged")


def test_a_base_in_a_format_that_cannot_be_added_to_is_refused(tmp_path: Path, base: Path, adapter: Path) -> None:
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, base / "model.safetensors")
    assert f"{name} of the base" in (text := refusal(adapter, base, tmp_path / "merged"))
    assert "F8_E4M3" in text


def change_adapter(adapter: Path, **tensors: torch.Tensor) -> None:
    """Tensors by the end of their name; an empty one takes it away."""
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    for end, tensor in tensors.items():
        name = f"base_model.model.model.layers.0.{end.replace('__', '.')}.weight"
        weights[name] = tensor
        if not tensor.numel():
            del weights[name]
    save_file(weights, file)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"mlp__experts__w1__lora_A": torch.ones(2, 4, 32)}, "mlp.experts.w1.lora_A.weight [2, 4, 32]"),
        ({"self_attn__q_proj__lora_magnitude_vector": torch.ones(4)}, "lora_magnitude_vector"),
        ({"self_attn__q_proj__lora_A": torch.empty(0)}, "do not belong together: {'lora_B': [64, 4]}"),
        ({"self_attn__q_proj__lora_A": torch.full((4, 32), torch.nan)}, "its training broke down"),
    ],
    ids=["experts", "dora", "half", "nan"],
)
def test_an_adapter_that_is_no_sound_lora_is_refused(
    tmp_path: Path, base: Path, adapter: Path, tensors: dict[str, torch.Tensor], complaint: str
) -> None:
    change_adapter(adapter, **tensors)
    assert complaint in refusal(adapter, base, tmp_path / "merged")


def test_adapters_that_are_more_than_a_product_are_refused(tmp_path: Path, base: Path, adapter: Path) -> None:
    change_config(adapter, "adapter_config.json", use_dora=True)
    assert "uses use_dora" in refusal(adapter, base, tmp_path / "merged")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.safetensors.age")
    assert "its files are adapter_config.json, adapter_model.safetensors.age" in refusal(
        adapter, base, tmp_path / "merged"
    )


def test_a_sum_that_does_not_fit_the_format_of_the_base_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_model("llama").to(torch.float16).save_pretrained(base)
    adapter = write_random_adapter(tmp_path / "adapter", base)
    change_adapter(adapter, self_attn__q_proj__lora_A=torch.full((4, 32), 1e6))
    assert "model.layers.0.self_attn.q_proj does not fit F16" in refusal(adapter, base, tmp_path / "merged")


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    text = refusal(adapter, base, tmp_path / "merged")
    assert "has 0.00 GiB left. Make room, or export to another disk." in text
