"""A checkpoint as a folder that `peft` loads."""

from __future__ import annotations

from tinsmith.export.adapter import CONFIG, WEIGHTS, Adapter
from tinsmith.export.card import Learned, Story, peft_card
from tinsmith.export.files import NewFile
from tinsmith.export.tensor_files import NewTensor, tensors_file


def peft_files(adapter: Adapter, story: Story) -> list[NewFile]:
    """The adapter under the names of published weights."""
    tensors = {
        f"base_model.model.{module}.lora_{half}.weight": NewTensor.copy(tensor)
        for module, pair in adapter.pairs.items()
        for half, tensor in (("A", pair.a), ("B", pair.b))
    }
    # Spelt out, because to peft "all-linear" means all but the output matrix.
    modules = sorted({module.rpartition(".")[2] for module in adapter.pairs})
    config = {**adapter.config, "base_model_name_or_path": story.base_model, "target_modules": modules}
    return [
        NewFile.json(CONFIG, config),
        peft_card(Learned.of(adapter), story),
        tensors_file(WEIGHTS, tensors),
    ]
