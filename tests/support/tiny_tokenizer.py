"""Small real tokenizers, trained on the spot, as folders and as a Hugging Face cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A tinsmith makes and mends things of tin; a tinker mends what others made.",
    "user assistant system tool, think and answer: 3 + 4 = 7, naïve café, 你好",
]
CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML_CONFIG: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
}


def byte_level_bpe(special_tokens: list[str] | None = None, *, bos: str | None = None) -> tokenizers.Tokenizer:
    """A byte-level BPE as Qwen, Llama 3 and most others have; with `bos` it starts every text with that token."""
    special_tokens = CHAT_TOKENS if special_tokens is None else special_tokens
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def write_folder(
    folder: Path,
    backend: tokenizers.Tokenizer | None = None,
    files: Mapping[str, Mapping[str, Any] | str] | None = None,
) -> Path:
    """A model folder: tokenizer.json and the other `files`, given as text or as what goes into the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or byte_level_bpe()).save(str(folder / "tokenizer.json"))
    for name, content in (files or {"tokenizer_config.json": CHATML_CONFIG}).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def cache_folder(cache: Path, repository: str, commit: str = "0" * 40) -> Path:
    """Where a Hugging Face cache keeps one commit of a repository, known as its main branch."""
    storage = cache / f"models--{repository.replace('/', '--')}"
    (storage / "refs").mkdir(parents=True)
    (storage / "refs" / "main").write_text(commit)
    snapshot = storage / "snapshots" / commit
    snapshot.mkdir(parents=True)
    return snapshot
