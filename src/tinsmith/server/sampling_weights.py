"""The weights that samplers use: frozen copies, made from a live model or read from a checkpoint.

A sampler keeps the weights it was made from, whatever the trainer does next. The least recently used ones leave memory;
those that no checkpoint holds are written to a file first. A sampler that was made to follow a model has none of its
own: a sample begins with what the weights are in that moment, and keeps those to its end. So it does with an inflight
sampler, which draws with the newest weights that were published for all such samplers of its model.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

from safetensors import SafetensorError

from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints import Folders
from tinsmith.server.engine import adapter_files
from tinsmith.server.engine.adapters import Adapter, FrozenAdapter
from tinsmith.server.engine.damage import DamagedError
from tinsmith.server.engine.engine import Engine
from tinsmith.server.full_disk import WaitError
from tinsmith.server.snapshots import LostError
from tinsmith.server.spilled import Spilled
from tinsmith.server.store.records import Sampler

log = logging.getLogger(__name__)

MAX_IN_MEMORY = 32
MAX_NEWEST = 8
"""Models whose present weights are kept for samplers that follow them."""


class SamplingWeights:
    """`on_copy` hears of weights that exist nowhere else. `check_source` refuses to read a checkpoint for a sampler."""

    def __init__(
        self,
        engine: Engine,
        folders: Folders,
        spilled: Spilled,
        on_copy: Callable[[str, FrozenAdapter], None] | None = None,
        check_source: Callable[[Sampler, str], None] = lambda sampler, path: None,
    ) -> None:
        self._engine = engine
        self._folders = folders
        self._spilled = spilled
        self._on_copy = on_copy
        self._check_source = check_source
        self._frozen: OrderedDict[str, FrozenAdapter] = OrderedDict()
        self._unsaved: set[str] = set()
        self._newest: OrderedDict[str, tuple[int, FrozenAdapter]] = OrderedDict()

    def __contains__(self, sampler_id: str) -> bool:
        """Whether they are here, in memory or written down, and need not be read or made again."""
        return sampler_id in self._frozen or self._spilled.exists(sampler_id)

    def keep(self, sampler_id: str, frozen: FrozenAdapter) -> None:
        """Weights that exist nowhere else."""
        self._unsaved.add(sampler_id)
        self._add(sampler_id, frozen)
        if self._on_copy is not None:
            self._on_copy(sampler_id, frozen)

    def drop(self, sampler_id: str) -> None:
        """Weights that nobody begins with any more; samples that have begun with them hold them."""
        self._frozen.pop(sampler_id, None)
        self._unsaved.discard(sampler_id)

    def get(self, sampler: Sampler, rebuild: Callable[[Sampler], Adapter]) -> FrozenAdapter | None:
        """The weights of a sampler; None for the base model. `rebuild` replays the model it was copied from."""
        if sampler.model_path is None and sampler.model_id is None:
            return None
        if sampler.sampler_id not in self._frozen:
            self._find(sampler, rebuild)
        self._frozen.move_to_end(sampler.sampler_id)
        return self._frozen[sampler.sampler_id]

    def newest(self, model_id: str, seq_id: int, copy: Callable[[], FrozenAdapter]) -> FrozenAdapter:
        """The weights of a model as they are after this operation. They can be copied again, so few are kept."""
        known = self._newest.pop(model_id, None)
        if known is None or known[0] != seq_id:
            known = seq_id, copy()
        self._newest[model_id] = known
        while len(self._newest) > MAX_NEWEST:
            self._newest.popitem(last=False)
        return known[1]

    def _find(self, sampler: Sampler, rebuild: Callable[[Sampler], Adapter]) -> None:
        try:
            if sampler.model_path is not None:
                self._add(sampler.sampler_id, self._from_checkpoint(sampler, sampler.model_path))
            elif self._spilled.exists(sampler.sampler_id):
                self._find_spilled(sampler, rebuild)
            else:
                self.keep(sampler.sampler_id, rebuild(sampler).frozen_copy())
        except DamagedError as error:
            raise LostError(
                f"The weights of this sampling client are damaged on the server's disk ({error}). Make a new sampling "
                "client, from the model or from another checkpoint.",
                field="sampling_session_id",
            ) from error

    def _find_spilled(self, sampler: Sampler, rebuild: Callable[[Sampler], Adapter]) -> None:
        """If the file is damaged, its model may still be built as it was then, and the file is written once more."""
        try:
            spilled = self._spilled.path(sampler.sampler_id)
            self._add(sampler.sampler_id, adapter_files.read_frozen(spilled, self._engine.model))
        except DamagedError as error:
            try:
                rebuilt = rebuild(sampler)
            except InvalidInputError:
                raise error from None
            log.warning("The damaged weights of %s were made again from its model: %s", sampler.sampler_id, error)
            self.keep(sampler.sampler_id, rebuilt.frozen_copy())

    def _from_checkpoint(self, sampler: Sampler, path: str) -> FrozenAdapter:
        self._check_source(sampler, path)
        if not self._folders.exists(path):
            raise InvalidInputError(f"{path} does not exist any more.", field="model_path", value=path)
        folder = self._folders.folder(path)
        adapter = self._engine.create_adapter(adapter_files.read_spec(folder))
        adapter_files.read_adapter(folder, adapter, with_optimizer=False)
        self._check_source(sampler, path)  # another one may have been saved in its place meanwhile
        return adapter.frozen_copy()

    def _add(self, sampler_id: str, frozen: FrozenAdapter) -> None:
        self._frozen[sampler_id] = frozen
        for eldest in list(self._frozen)[: max(0, len(self._frozen) - MAX_IN_MEMORY)]:
            try:
                self.save([eldest])
            except (OSError, SafetensorError, WaitError) as error:  # a full disk, say; then they all stay
                log.error("The weights of %s stay in memory, as they cannot be written: %s", eldest, error)
                return
            del self._frozen[eldest]

    def save(self, sampler_ids: Iterable[str]) -> None:
        """Writes those of these that exist nowhere else."""
        for sampler_id in self._unsaved.intersection(sampler_ids):
            with self._spilled.writing(sampler_id) as file:
                adapter_files.write_frozen(file, self._frozen[sampler_id])
            self._unsaved.discard(sampler_id)
