"""From the GGUF file of a small Llama to an ordinary model folder, without torch or transformers.

The weights are written as float32, which holds every dequantised value exactly: scale times number plus minimum needs
more than the 8 significant bits of bfloat16 or the 11 of float16. Tensors are written one by one, so that the largest
of them, not the model, sets the memory needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import MissingExtraError
from tinsmith.server.gguf import GGUF, Tensor

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_COUNTS = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
_CONTROL_TOKEN = 3


def convert(gguf: GGUF, folder: Path, progress: Callable[[float], None]) -> None:
    """Fill the folder with config, tokenizer and weights; `progress` hears which share of the weights is written."""
    _write_json(folder / "config.json", _config(gguf.metadata))
    _write_json(folder / "generation_config.json", _special_ids(gguf.metadata))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(gguf.metadata))
    _write_tokenizer(folder / "tokenizer.json", gguf.metadata)
    _write_weights(folder / "model.safetensors", gguf, progress)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- configuration ---------------------------------------------------------------------------------------------------


def _config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": _as_written(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _as_written(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": metadata["llama.vocab_size"],
        **_special_ids(metadata),
    }


def _as_written(value: float) -> float:
    """The decimal number that was rounded to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


# --- tokenizer -------------------------------------------------------------------------------------------------------


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_tokenizer(path: Path, metadata: Mapping[str, Any]) -> None:
    """Byte-level BPE that splits off every digit first, which GGUF calls the pre-tokenizer "smollm"."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "server", "Converting the embedded model") from error
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.save(str(path))


# --- weights ---------------------------------------------------------------------------------------------------------


def _write_weights(path: Path, gguf: GGUF, progress: Callable[[float], None]) -> None:
    progress(0)
    head, num_bytes = _safetensors_head(gguf.tensors)
    with path.open("wb") as file:
        file.write(head)
        for name, tensor in gguf.tensors.items():
            file.write(_weights(name, tensor, gguf.metadata).data)
            progress((file.tell() - len(head)) / num_bytes)


def _safetensors_head(tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """The start of a safetensors file that holds the tensors in this order, and how many bytes of weights follow."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * int(np.prod(tensor.shape))
        entries[_published_name(name)] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the weights begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text, end


def _published_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`"""
    *layer, module, kind = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{_NAMES[module]}.{kind}"


def _weights(name: str, tensor: Tensor, metadata: Mapping[str, Any]) -> NDArray[np.float32]:
    weights = tensor.dequantised()
    count = _HEAD_COUNTS.get(name.split(".")[-2])
    return weights if count is None else _halves_apart(weights, metadata[count])


def _halves_apart(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo the order of rows that GGUF has in Q and K.

    There the two rows that rotate together are neighbours; in published weights they are half a head apart.
    """
    num_rows, num_columns = weights.shape
    pairs = weights.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, num_columns)
