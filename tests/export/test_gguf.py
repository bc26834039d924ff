"""A GGUF file holds the merged model, in the order, under the names and with the tokenizer that llama.cpp knows."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.export.making import ORIGIN, PROMPT, export, greedy, load, write_random_adapter
from tests.server.tiny_models import FAMILIES, ROPES, make_model, save_model
from tests.support.tiny_tokenizer import CHATML_CONFIG, byte_level_bpe, write_folder
from tinsmith.errors import InvalidInputError
from tinsmith.export import GGUF, MERGED, Adapter, BaseModel, Story, export_files, tensor_files
from tinsmith.export.gguf_model import Shape, rope_divisors
from tinsmith.server.engine.adapters import AdapterSpec
from tinsmith.server.engine.model import rope_from_config

VOCAB_SIZE = 430
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def make_base(folder: Path, family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    settings: dict[str, Any] = {"vocab_size": VOCAB_SIZE, **overrides}
    if family == "smollm3":
        settings = {"num_hidden_layers": 4, "no_rope_layer_interval": 4, **settings}
    make_model(family, **settings).to(dtype).save_pretrained(folder)
    return write_folder(folder)


def gguf_of(adapter: Path, base: Path, target: Path) -> Path:
    (file,) = export(GGUF, adapter, base, target).glob("*.gguf")
    return file


def our_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def halves_apart(tensor: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's order was before: written down here once more, to be compared with."""
    half = tensor.shape[0] // num_heads // 2
    rows = [head * 2 * half + 2 * place + part for head in range(num_heads) for part in (0, 1) for place in range(half)]
    return tensor[rows]


def values(reader: GGUFReader) -> dict[str, np.ndarray[Any, Any]]:
    return {
        each.name: dequantize(each.data, each.tensor_type).reshape(tuple(map(int, reversed(each.shape))))
        for each in reader.tensors
    }


def field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


# --- the same model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), ("llama_biases", torch.bfloat16), ("qwen3", torch.float16)],
)
def test_every_tensor_is_that_of_the_merged_model(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    base = make_base(tmp_path / "base", family, dtype)
    adapter = write_random_adapter(tmp_path / "adapter", base)
    merged = load_file(export(MERGED, adapter, base, tmp_path / "merged") / "model.safetensors")
    reader = GGUFReader(gguf_of(adapter, base, tmp_path / "gguf"))
    found, config = values(reader), json.loads((base / "config.json").read_bytes())
    assert found.keys() == {our_name(name) for name in merged}
    for name, tensor in merged.items():
        ours = found[our_name(name)]
        if family.startswith(("llama", "smollm")) and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            ours = halves_apart(ours, heads)
        np.testing.assert_array_equal(ours, tensor.float().numpy(), err_msg=name)
    stored = {"F32"} if dtype == torch.float32 else {"F32", {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]}
    assert {each.tensor_type.name for each in reader.tensors} == stored


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama", {}), ("smollm2", {}), ("qwen2", {}), ("qwen3", {"head_dim": 128, "num_attention_heads": 2})],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_transformers_says_the_same_of_the_file_and_of_the_merged_folder(
    tmp_path: Path, family: str, sizes: dict[str, Any]
) -> None:
    """Of the families that it reads; it believes that all heads of Qwen3 are of the usual size."""
    base = make_base(tmp_path / "base", family, **sizes)
    adapter = write_random_adapter(tmp_path / "adapter", base)
    merged = load(export(MERGED, adapter, base, tmp_path / "merged"))
    file = gguf_of(adapter, base, tmp_path / "gguf")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    said = greedy(merged, PROMPT, 16)
    assert greedy(read, PROMPT, 16) == said
    assert said != greedy(load(base), PROMPT, 16), "the adapter changes nothing"


def test_an_output_matrix_that_is_the_embedding_is_not_stored_twice(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "smollm2")
    adapter = write_random_adapter(tmp_path / "adapter", base, AdapterSpec(rank=4, seed=1, train_unembed=False))
    reader = GGUFReader(gguf_of(adapter, base, tmp_path / "gguf"))
    assert "output.weight" not in {each.name for each in reader.tensors}


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of the tokenizer are in memory, the weights only in blocks."""
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", block := 64 * 1024)
    base = make_base(tmp_path / "base", "smollm2", vocab_size=20_000)
    adapter = write_random_adapter(tmp_path / "adapter", base, AdapterSpec(rank=4, seed=1, train_unembed=False))
    *_, weights = export_files(GGUF, Adapter(adapter), BaseModel(base), Story("tiny/base", ORIGIN))
    tracemalloc.start()
    written = sum(len(piece) for piece in weights.blocks())
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written == weights.size > 50 * block
    assert used < 6 * block


# --- what llama.cpp is told ------------------------------------------------------------------------------------------


def test_sizes_are_told(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3")
    reader = GGUFReader(gguf_of(write_random_adapter(tmp_path / "adapter", base), base, tmp_path / "gguf"))
    told = {name.removeprefix("qwen3."): field(reader, name) for name in reader.fields if name.startswith("qwen3.")}
    assert told.pop("attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert told == {
        "vocab_size": VOCAB_SIZE,
        "context_length": 128,
        "embedding_length": 32,
        "block_count": 3,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
    }
    assert field(reader, "general.architecture") == "qwen3"


@pytest.mark.parametrize("rope", [name for name in ROPES if name != "yarn_mscale"])
def test_rotary_embeddings_are_told_as_llama_cpp_computes_them(tmp_path: Path, rope: str) -> None:
    base = make_base(tmp_path / "base", "llama", rope=rope)
    reader = GGUFReader(gguf_of(write_random_adapter(tmp_path / "adapter", base), base, tmp_path / "gguf"))
    told = {name: field(reader, name) for name in reader.fields if ".rope." in name}
    assert told["llama.rope.freq_base"] == ROPES[rope]["rope_theta"]
    assert told.get("llama.rope.scaling.type") == (rope if rope in ("linear", "yarn") else None)
    assert told.get("llama.rope.scaling.factor") == (4.0 if rope in ("linear", "yarn") else None)
    assert told.get("llama.rope.scaling.original_context_length") == (32 if rope == "yarn" else None)
    assert ("rope_freqs.weight" in values(reader)) == (rope == "llama3")


def test_the_divisors_of_llama_3_give_the_frequencies_that_the_engine_uses() -> None:
    config = make_model("llama", "llama3").config.to_dict()
    plain = make_model("llama", rope=None, rope_parameters={"rope_type": "default", "rope_theta": 500.0}).config
    divisors = rope_divisors(Shape.of(config))
    assert divisors is not None
    engine = [np.array(rope_from_config(each, 8).inverse_frequencies) for each in (config, plain.to_dict())]
    np.testing.assert_allclose(engine[1] / divisors, engine[0], rtol=1e-6)


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def split(regex: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), bytes_only])


PRE_TOKENIZERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": split(f"{WORDS}|\\p{{N}}|{REST}"),
    "llama-bpe": split(f"{WORDS}|\\p{{N}}{{1,3}}|{REST}"),
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_the_tokenizer_comes_along_with_the_name_that_its_rules_have_in_llama_cpp(tmp_path: Path, name: str) -> None:
    backend = byte_level_bpe(bos="<|endoftext|>")
    backend.pre_tokenizer = PRE_TOKENIZERS[name]
    base = make_base(tmp_path / "base", "llama")
    config = {**CHATML_CONFIG, "bos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
    write_folder(base, backend, {"tokenizer_config.json": config})
    change_tokenizer(base, ignore_merges=name == "llama-bpe")
    reader = GGUFReader(gguf_of(write_random_adapter(tmp_path / "adapter", base), base, tmp_path / "gguf"))
    told = {key.removeprefix("tokenizer."): field(reader, key) for key in reader.fields if key.startswith("tokenizer.")}
    tokens = told["ggml.tokens"]
    assert (told["ggml.model"], told["ggml.pre"], told["chat_template"]) == ("gpt2", name, "{{ messages }}")
    assert {token: tokens.index(token) for token in backend.get_vocab()} == backend.get_vocab()
    assert len(tokens) == VOCAB_SIZE
    assert tokens[-1] == f"[PAD{VOCAB_SIZE - 1}]"
    kinds = dict(zip(tokens, told["ggml.token_type"], strict=True))
    assert [kinds[token] for token in ("<|im_end|>", "a", tokens[-1])] == [3, 1, 5]
    assert told["ggml.merges"] == [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    assert tokens[told["ggml.bos_token_id"]] == "<|endoftext|>"
    assert tokens[told["ggml.eos_token_id"]] == "<|im_end|>"
    assert told["ggml.add_bos_token"]


def test_transformers_reads_the_tokenizer_of_the_file(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2")
    file = gguf_of(write_random_adapter(tmp_path / "adapter", base), base, tmp_path / "gguf")
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = "The lazy tinsmith mends the brown fox."
    ours = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json")).encode(text).ids
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours


def change_tokenizer(base: Path, top: dict[str, Any] | None = None, **model: Any) -> None:
    file = base / "tokenizer.json"
    content = json.loads(file.read_bytes())
    file.write_text(json.dumps({**content, **(top or {}), "model": {**content["model"], **model}}))


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(tmp_path: Path, base: Path) -> str:
    adapter = write_random_adapter(tmp_path / "adapter", base)
    with pytest.raises(InvalidInputError) as refused:
        export(GGUF, adapter, base, tmp_path / "gguf")
    assert not (tmp_path / "gguf").exists()
    assert "--to merged" in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("top", "model", "complaint"),
    [
        ({}, {"type": "WordPiece"}, "its model is WordPiece"),
        ({}, {"byte_fallback": True}, "its model is BPE with byte fallback (SentencePiece)"),
        ({}, {"ignore_merges": True}, "its ignore_merges is not what llama.cpp does for 'gpt-2'"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, {}, "splits a text by ('Metaspace',) after NFC"),
        ({"normalizer": {"type": "Lowercase"}}, {}, "after Lowercase"),
        ({"added_tokens": [{"id": VOCAB_SIZE, "content": "x"}]}, {}, f"it has a token {VOCAB_SIZE}, and the model"),
    ],
    ids=["words", "sentencepiece", "whole words", "split", "normalizer", "size"],
)
def test_a_tokenizer_that_llama_cpp_would_not_read_as_it_is_is_refused(
    tmp_path: Path, top: dict[str, Any], model: dict[str, Any], complaint: str
) -> None:
    base = make_base(tmp_path / "base", "llama")
    change_tokenizer(base, top, **model)
    assert complaint in refusal(tmp_path, base)


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("smollm3", {"no_rope_layer_interval": 2}, "without rotary embedding are not every 4th"),
        ("llama", {"rope": "yarn_mscale"}, "its yarn scaling has mscale, mscale_all_dim"),
        ("qwen3", {"attention_bias": True}, "llama.cpp knows no qwen3 with attention_bias"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], complaint: str
) -> None:
    assert complaint in refusal(tmp_path, make_base(tmp_path / "base", family, **changes))


def test_a_base_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    assert "there is no tokenizer.json" in refusal(tmp_path, base)
