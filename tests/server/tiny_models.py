"""Tiny random models of every family as real model folders, written by transformers, which is also the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1,
                "hidden_size": 48},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2, "tie_word_embeddings": True},
}  # fmt: skip

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64, "rope_theta": 500.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 100.0},
    "yarn_mscale": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 100.0,
                    "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8, "beta_slow": 0.5},
}  # fmt: skip


def make_model(family: str = "llama", rope: str | None = None, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of transformers, in float32 and evaluation mode.

    Biases and norm weights are random too: with the usual zeros and ones a mistake in them would not show.
    """
    settings = {**SIZES, **FAMILIES[family], **overrides}
    if rope is not None:
        settings["rope_parameters"] = ROPES[rope]
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.normal_(1, 0.2)
            else:
                parameter.normal_(0, 0.15)
    return model.eval()


def save_model(folder: Path, family: str = "llama", rope: str | None = None, **overrides: Any) -> Path:
    """Write a random model as a folder; the same arguments give the same weights."""
    make_model(family, rope, **overrides).save_pretrained(folder)
    return folder
