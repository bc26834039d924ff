"""The settings of supervised fine-tuning."""

from __future__ import annotations

from typing import Any

import msgspec

from tinsmith.recipes.examples import ExampleFile
from tinsmith.recipes.plan import Schedule


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    rank: int = 32
    learning_rate: float = 5e-4
    batch_size: int = 8
    epochs: int = 3
    steps: int | None = None
    """Instead of epochs."""
    schedule: Schedule = "cosine"
    warmup: int = 0
    eval_split: float = 0.0
    max_length: int | None = None
    seed: int = 0
    eval_every: int | None = None
    """Steps between evaluations; None means once per epoch."""
    save_every: int = 50
    name: str = "sft"
    """What checkpoints are called."""

    def identity(self, data: ExampleFile, eval_data: ExampleFile | None) -> dict[str, Any]:
        """All that decides what is computed, by the names of the options; the rest may change from part to part."""
        free = ("eval_every", "save_every", "name")
        decisive = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in free}
        decisive["epochs"] = None if self.steps else self.epochs
        files = {"data (SHA-256)": data.sha256, "eval-data (SHA-256)": eval_data.sha256 if eval_data else None}
        return {name.replace("_", "-"): value for name, value in {**decisive, **files}.items()}
