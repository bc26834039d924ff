"""A checkpoint as a folder that `peft` loads."""

from __future__ import annotations

from pathlib import Path

from tinsmith.export.adapter import CONFIG, WEIGHTS, Adapter, write_json
from tinsmith.export.card import peft_card, write_card
from tinsmith.export.tensor_files import NewTensor, write_tensors


def write_peft(adapter_folder: Path, folder: Path, *, base_model: str, origin: str) -> None:
    """Fills a folder with the adapter under the names of published weights. `origin` is the checkpoint's path."""
    adapter = Adapter(adapter_folder)
    tensors = {
        f"base_model.model.{module}.lora_{half}.weight": NewTensor.copy(tensor)
        for module, pair in adapter.pairs.items()
        for half, tensor in (("A", pair.a), ("B", pair.b))
    }
    write_tensors(folder / WEIGHTS, tensors)
    # Spelt out, because to peft "all-linear" means all but the output matrix.
    modules = sorted({module.rpartition(".")[2] for module in adapter.pairs})
    write_json(folder / CONFIG, {**adapter.config, "base_model_name_or_path": base_model, "target_modules": modules})
    write_card(folder, peft_card(adapter, base_model, origin))
