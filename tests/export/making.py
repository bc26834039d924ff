"""Adapters as the server writes them, but of random numbers: with the usual zeros nothing would show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tinsmith.export import Adapter as Exported
from tinsmith.export import BaseModel, Story, export_files, new_folder, write_files
from tinsmith.server.engine.adapter_files import write_adapter
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.model import ModelShape
from tinsmith.server.engine.weights import read_config

TIED = "ignore:Model has `tie_word_embeddings=True`:UserWarning"
"""What peft says of every adapter that changes a tied output matrix."""

torch.set_num_threads(1)  # tiny products gain nothing from threads

ORIGIN = "tinker://run/weights/one"
PROMPT = [5, 17, 3, 60, 21, 9]


def write_random_adapter(folder: Path, base: Path, spec: AdapterSpec | None = None, name: str = "tiny/base") -> Path:
    spec = spec or AdapterSpec(rank=4, seed=1)
    adapter = Adapter.create(ModelShape.from_config(read_config(base)), spec)
    generator = torch.Generator().manual_seed(3)
    adapter.weights.normal_(0, 0.05, generator=generator)
    folder.mkdir(parents=True)
    write_adapter(folder, adapter, name)
    return folder


def export(
    form: str, adapter: Path, base: Path | None, target: Path, base_model: str = "tiny/base", **options: Any
) -> Path:
    note = options.pop("data_note", "")
    story = Story(base_model, ORIGIN, note)
    with new_folder(target) as folder:
        files = export_files(form, Exported(adapter), None if base is None else BaseModel(base), story)
        write_files(files, folder, **options)
    return target


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def greedy(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """Written out: `generate` obeys settings of the folder."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.tensor([PROMPT])).logits
    return result
