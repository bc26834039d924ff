"""The weights that samplers use: frozen copies, made from a live model or read from a checkpoint.

A sampler keeps the weights it was made from, whatever the trainer does next. The least recently used ones leave memory;
those that no checkpoint holds are written to a file first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.engine import adapter_files
from tinsmith.server.engine.adapters import Adapter, FrozenAdapter
from tinsmith.server.engine.engine import Engine
from tinsmith.server.store.records import Sampler

MAX_IN_MEMORY = 32


class SamplingWeights:
    def __init__(self, engine: Engine, folders: CheckpointFolders, spill: Path) -> None:
        self._engine = engine
        self._folders = folders
        self._spill = spill
        self._frozen: OrderedDict[str, FrozenAdapter] = OrderedDict()
        self._unsaved: set[str] = set()

    def keep(self, sampler_id: str, frozen: FrozenAdapter) -> None:
        """Weights that exist nowhere else."""
        self._unsaved.add(sampler_id)
        self._add(sampler_id, frozen)

    def get(self, sampler: Sampler, rebuild: Callable[[Sampler], Adapter]) -> FrozenAdapter | None:
        """The weights of a sampler; None for the base model. `rebuild` replays the model it was copied from."""
        if sampler.model_path is None and sampler.model_id is None:
            return None
        if sampler.sampler_id not in self._frozen:
            self._add(sampler.sampler_id, self._found(sampler, rebuild))
        self._frozen.move_to_end(sampler.sampler_id)
        return self._frozen[sampler.sampler_id]

    def _found(self, sampler: Sampler, rebuild: Callable[[Sampler], Adapter]) -> FrozenAdapter:
        if sampler.model_path is not None:
            return self._from_checkpoint(sampler.model_path)
        spilled = self._spill_file(sampler.sampler_id)
        if spilled.exists():
            return adapter_files.read_frozen(spilled, self._engine.model)
        return rebuild(sampler).frozen_copy()

    def _from_checkpoint(self, path: str) -> FrozenAdapter:
        if not self._folders.exists(path):
            raise InvalidInputError(f"{path} does not exist any more.", field="model_path", value=path)
        folder = self._folders.folder(path)
        adapter = self._engine.create_adapter(adapter_files.read_spec(folder))
        adapter_files.read_adapter(folder, adapter, with_optimizer=False)
        return adapter.frozen_copy()

    def _add(self, sampler_id: str, frozen: FrozenAdapter) -> None:
        self._frozen[sampler_id] = frozen
        while len(self._frozen) > MAX_IN_MEMORY:
            evicted, weights = self._frozen.popitem(last=False)
            if evicted in self._unsaved:
                self._spill.mkdir(parents=True, exist_ok=True)
                adapter_files.write_frozen(self._spill_file(evicted), weights)
                self._unsaved.discard(evicted)

    def _spill_file(self, sampler_id: str) -> Path:
        return self._spill / f"{sampler_id.replace(':', '_')}.safetensors"
