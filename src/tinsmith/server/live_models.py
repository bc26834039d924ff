"""The models of one base model that are being trained: in memory while they are used, on the disk when they are not.

A model that is not in memory is built again: from its last snapshot, or from its seeded beginning, by doing once more
what was done since. A snapshot is written when that would take long, and before a model that nobody uses leaves the
memory. The data of operations that are in a snapshot need not be kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from safetensors import SafetensorError

from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.engine import adapter_files
from tinsmith.server.engine.adapters import Adapter
from tinsmith.server.sampling_weights import SamplingWeights
from tinsmith.server.snapshots import snapshot_path
from tinsmith.server.store import Store, ids
from tinsmith.server.store.records import Failed, Job, Model

log = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 30.0
"""Work on a model after which it is written down: about so long may building it again take."""
WRITING_SHARE = 0.02
"""More of a model's time is not spent on writing it down."""
WORTH_SECONDS = 1.0
IDLE_SECONDS = 600.0
REPLAYED_AT_ONCE = 50


@dataclass
class _Live:
    adapter: Adapter
    base_model: str
    seq_id: int
    """The last operation that is in it."""
    work_seconds: float = 0.0
    """Spent on it since the last snapshot."""
    write_seconds: float = 0.0
    """What the last snapshot took."""
    has_loaded: bool = False
    """Since the last snapshot."""
    used: float = field(default_factory=time.monotonic)

    @property
    def is_due(self) -> bool:
        return self.has_loaded or self.work_seconds > max(SNAPSHOT_SECONDS, self.write_seconds / WRITING_SHARE)

    @property
    def is_worth_writing(self) -> bool:
        return self.has_loaded or self.work_seconds > WORTH_SECONDS


class LiveModels:
    """`new_adapter` makes the beginning of a model; `replay` does an operation once more."""

    def __init__(
        self,
        store: Store,
        snapshots: CheckpointFolders,
        weights: SamplingWeights,
        new_adapter: Callable[[Model], Adapter],
        replay: Callable[[Job, Adapter], None],
    ) -> None:
        self._store = store
        self._snapshots = snapshots
        self._weights = weights
        self._new_adapter = new_adapter
        self._replay = replay
        self._live: dict[str, _Live] = {}

    def begin(self, model: Model) -> Adapter:
        """A model that has no history yet."""
        self._live[model.model_id] = _Live(self._new_adapter(model), model.base_model, seq_id=0)
        return self._live[model.model_id].adapter

    def adapter(self, model_id: str, owner: str, before_seq: int) -> Adapter:
        """The model as it is when the operation with this number is next."""
        if model_id not in self._live:
            model = self._store.models.get(model_id, owner)
            if model is None:
                raise InvalidInputError(f"There is no model {model_id!r}.", field="model_id", value=model_id)
            self._live[model_id] = self._rebuilt_or_lost(model, before_seq)
        return self._live[model_id].adapter

    def drop(self, model_id: str) -> None:
        """Out of memory, without a trace of what was not finished."""
        self._live.pop(model_id, None)

    # Building again

    def _rebuilt_or_lost(self, model: Model, before_seq: int) -> _Live:
        """What cannot be built now never can, so it is written down and not tried again."""
        if model.corrupted is not None:
            raise _lost(model, model.corrupted)
        try:
            return self._rebuilt(model, before_seq)
        except InvalidInputError as error:
            self._store.models.mark_corrupted(model.model_id, error.message)
            raise _lost(model, error.message) from error

    def rebuilt(self, model: Model, before_seq: int) -> Adapter:
        """The adapter as it was just before an operation."""
        return self._rebuilt(model, before_seq).adapter

    def _rebuilt(self, model: Model, before_seq: int) -> _Live:
        adapter, done = self._new_adapter(model), -1
        if model.snapshot_seq is not None and model.snapshot_seq < before_seq:
            self._read_snapshot(model, adapter)
            done = model.snapshot_seq
        history = self._store.jobs.history(model.model_id, done, REPLAYED_AT_ONCE)
        if done < 0 < before_seq and not (history and history[0].seq_id == 0):
            raise InvalidInputError(self._why_without_beginning(model), field="model_id", value=model.model_id)
        live = _Live(adapter, model.base_model, before_seq - 1)
        self._replay_all(model.model_id, live, history)
        return live

    def _replay_all(self, model_id: str, live: _Live, history: Sequence[Job]) -> None:
        """From here on as far as `live.seq_id`."""
        started, replayed = time.perf_counter(), 0
        while due := [job for job in history if job.seq_id <= live.seq_id]:
            for job in due:
                self._replay(job, live.adapter)
                live.has_loaded |= job.kind == "load_weights"
            replayed += len(due)
            log.info("Rebuilding %s: replayed up to operation %d.", model_id, due[-1].seq_id)
            history = self._store.jobs.history(model_id, due[-1].seq_id, REPLAYED_AT_ONCE)
        live.work_seconds = time.perf_counter() - started
        log.info("Rebuilt %s in %.2f s: replayed %d operations.", model_id, live.work_seconds, replayed)

    def _read_snapshot(self, model: Model, adapter: Adapter) -> None:
        folder = self._snapshots.folder(snapshot_path(model.model_id, model.snapshot_seq or 0))
        try:
            adapter_files.read_adapter(folder, adapter, with_optimizer=True)
        except (FileNotFoundError, SafetensorError) as error:
            raise InvalidInputError(f"its snapshot cannot be read: {error}", field="model_id") from error

    def _why_without_beginning(self, model: Model) -> str:
        first = ids.request_id(model.model_id, 0)
        status = self._store.results.statuses([first]).get(first)
        if status is not None and isinstance(status.outcome, Failed):
            return f"it was never made: {status.outcome.error}"
        return "what it was made from is not kept any more"

    # Writing down

    def finished(self, jobs: Sequence[Job], accepted: Collection[str], seconds: float) -> None:
        """These jobs were done, which took so long; of those accepted, the outcomes are in the store."""
        size = sum(job.size for job in jobs)
        for job in jobs:
            live = self._live.get(job.model_id or "")
            if job.request_id not in accepted:  # somebody else does it once more
                self.drop(job.model_id or "")
            elif live is not None:
                live.seq_id = max(live.seq_id, job.seq_id)
                live.work_seconds += seconds * job.size / size
                live.used = time.monotonic()
        for model_id in {job.model_id or "" for job in jobs} & self._live.keys():
            if self._live[model_id].is_due:
                self._write(model_id, self._live[model_id])

    def has_loaded(self, model_id: str, seq_id: int) -> None:
        """This operation has loaded weights, which may be gone or others when they are to be loaded once more.

        So the model is written down at once, before the operation counts as done.
        """
        live = self._live[model_id]
        live.seq_id, live.has_loaded = seq_id, True
        self._write(model_id, live)

    def put_away(self, model_id: str) -> None:
        """Out of memory, to be read from the disk when it is needed again."""
        live = self._live.get(model_id)
        if live is not None and (not live.work_seconds or self._write(model_id, live)):
            self.drop(model_id)

    def put_away_idle(self) -> None:
        long_ago = time.monotonic() - IDLE_SECONDS
        for model_id in [model_id for model_id, live in self._live.items() if live.used < long_ago]:
            self.put_away(model_id)

    def put_away_all(self) -> None:
        """Before the worker ends, so that the next one need not do much again."""
        for model_id in [model_id for model_id, live in self._live.items() if live.is_worth_writing]:
            self.put_away(model_id)

    def _write(self, model_id: str, live: _Live) -> bool:
        """Whether there is a snapshot now of all that was done. If the disk is full, say, work goes on without one."""
        path, started = snapshot_path(model_id, live.seq_id), time.perf_counter()
        try:
            # First, because samplers' copies of earlier states cannot be built from a later snapshot.
            self._weights.save(self._store.samplers.copies_of(model_id, live.seq_id))
            with self._snapshots.writing(path) as folder:
                adapter_files.write_adapter(folder, live.adapter, live.base_model)
                adapter_files.write_optimizer(folder, live.adapter)
        except (OSError, SafetensorError) as error:
            log.error("A snapshot of %s cannot be written: %s", model_id, error)
            live.work_seconds, live.used = 0.001, time.monotonic()
            return False
        self._publish(model_id, live.seq_id, path)
        live.work_seconds, live.write_seconds, live.has_loaded = 0.0, time.perf_counter() - started, False
        return True

    def _publish(self, model_id: str, seq_id: int, path: str) -> None:
        change = self._store.models.set_snapshot(model_id, seq_id)
        if not change.is_newest:  # we are being replaced, and our successor has gone further
            self._snapshots.delete(path)
            self.drop(model_id)
            return
        if change.before is not None and change.before != seq_id:
            self._snapshots.delete(snapshot_path(model_id, change.before))
        self._store.jobs.forget_payloads(model_id, seq_id)


def _lost(model: Model, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"{model.model_id} cannot go on: {reason.rstrip('.')}. Make a new model, or resume a checkpoint.",
        field="model_id",
        value=model.model_id,
    )
