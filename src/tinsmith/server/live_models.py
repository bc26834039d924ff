"""The models of one base model that are being trained: in memory while they are used, on the disk when they are not.

A model that is not in memory is built again: from its last snapshot, or from the one before if that is damaged, or from
its seeded beginning, by doing once more what was done since. A snapshot is written when that would take long, when
there is nothing to do, and before a model leaves the memory, unless it has not changed. The data of operations that are
in the last two snapshots need not be kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from safetensors import SafetensorError

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine import adapter_files
from tinsmith.server.engine.adapters import Adapter
from tinsmith.server.engine.damage import DamagedError
from tinsmith.server.full_disk import Disk, WaitError
from tinsmith.server.messages import Replay
from tinsmith.server.outage import Outage
from tinsmith.server.reasons import reason
from tinsmith.server.sampling_weights import SamplingWeights
from tinsmith.server.snapshots import LostError, SnapshotFolders
from tinsmith.server.store import Store, ids
from tinsmith.server.store.records import Cancelled, CheckpointKey, Done, Failed, Job, Model
from tinsmith.server.worker_metrics import WorkerMetrics
from tinsmith.types import LoadWeightsResponse
from tinsmith.wire import json

log = logging.getLogger(__name__)

WRITING_SHARE = 0.02
"""More of a model's time is not spent on writing it down while there is other work."""
SETTLED_SECONDS = 5.0
WORTH_SECONDS = 1.0
"""A model that was not used for so long is written down if so much work would have to be done again."""
IDLE_SECONDS = 600.0
RETRY_SECONDS = 10.0
REPLAYED_AT_ONCE = 50
TELL_SECONDS = 1.0
LOG_SECONDS = 10.0

_CANNOT_WRITE = (OSError, SafetensorError, WaitError)


@dataclass
class _Live:
    adapter: Adapter
    base_model: str
    seq_id: int
    """The last operation that is in it."""
    is_changed: bool = False
    """Since the last snapshot."""
    work_seconds: float = 0.0
    """What it would take to build it again from there."""
    write_seconds: float = 0.0
    """What the last snapshot took."""
    retry_at: float = 0.0
    """When the next one may be tried, after one that failed."""
    used: float = field(default_factory=time.monotonic)

    @property
    def bytes_on_disk(self) -> int:
        """Weights and moments, and the gradient if there is one."""
        return 4 * self.adapter.layout.size * (4 if self.adapter.has_gradient else 3)

    @property
    def is_affordable(self) -> bool:
        """Whether the work is worth a snapshot."""
        return self._may_try and self.work_seconds > self.write_seconds / WRITING_SHARE

    @property
    def is_settled(self) -> bool:
        """Whether nobody seems to need it now, so that a snapshot costs nobody's time."""
        idle = time.monotonic() - self.used
        return self._may_try and self.work_seconds > WORTH_SECONDS and idle > max(SETTLED_SECONDS, self.write_seconds)

    @property
    def _may_try(self) -> bool:
        return self.is_changed and time.monotonic() >= self.retry_at


class LiveModels:
    """`new_adapter` makes the beginning of a model, which takes up `size` bytes. `replay` does an operation once more;
    `tell` hears how far that is.

    All models together take up about `max_bytes` of memory, and `replay_bound` seconds would do again the work on them
    that is in no snapshot.
    """

    def __init__(
        self,
        store: Store,
        snapshots: SnapshotFolders,
        disk: Disk,
        weights: SamplingWeights,
        new_adapter: Callable[[Model], Adapter],
        size: Callable[[Model], int],
        replay: Callable[[Job, Adapter], None],
        tell: Callable[[Replay], None],
        *,
        replay_bound: float,
        max_bytes: int,
    ) -> None:
        self._store = store
        self._snapshots = snapshots
        self._disk = disk
        self._weights = weights
        self._new_adapter = new_adapter
        self._size = size
        self._replay = replay
        self._tell = tell
        self._replay_bound = replay_bound
        self._max_bytes = max_bytes
        self.metrics = WorkerMetrics()
        """Those of the worker, which puts them here."""
        self._live: dict[str, _Live] = {}
        self._sizes: dict[str, int] = {}
        self._lost: dict[str, InvalidInputError] = {}
        self._unwritten = Outage(log, over="Snapshots are written again")

    def __len__(self) -> int:
        """How many are in memory."""
        return len(self._live)

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._live

    def bytes_on_disk(self, model_id: str, most: int) -> int:
        """What all of a model takes up, which is known exactly of one that is in memory, and else is `most`."""
        live = self._live.get(model_id)
        return most if live is None else live.bytes_on_disk

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
        self._live[model_id].used = time.monotonic()
        return self._live[model_id].adapter

    def newest(self, model: Model) -> tuple[int, Callable[[], Adapter]]:
        """The last operation that is done, and how to get at the model as it is after that, which may take long."""
        if (live := self._live.get(model.model_id)) is not None:
            return live.seq_id, lambda: live.adapter
        following = self._store.jobs.first_unfinished(model.model_id)
        return following - 1, lambda: self.rebuilt(model, before_seq=following)

    def will_change(self, model_id: str) -> None:
        """The operation that is being done is not only about looking at the model."""
        self._live[model_id].is_changed = True

    def drop(self, model_id: str) -> None:
        """Out of memory, without a trace of what was not finished."""
        self._live.pop(model_id, None)
        self._sizes.pop(model_id, None)

    # Building again

    def _rebuilt_or_lost(self, model: Model, before_seq: int) -> _Live:
        """What cannot be built is marked, and tried again by the next worker: the disk may have been mended."""
        if model.model_id in self._lost:
            raise self._lost[model.model_id]
        try:
            live = self._rebuilt(model, before_seq)
        except InvalidInputError as error:
            log.error("%s", error.message, extra={"model_id": model.model_id})
            self._lost[model.model_id] = error
            self._store.models.mark_corrupted(model.model_id, error.message)
            raise
        if model.corrupted is not None:
            self._store.models.clear_corrupted(model.model_id)
        return live

    def rebuilt(self, model: Model, before_seq: int) -> Adapter:
        """The adapter as it was just before an operation."""
        return self._rebuilt(model, before_seq).adapter

    def _rebuilt(self, model: Model, before_seq: int) -> _Live:
        damaged: dict[int | None, str] = {}
        for seq_id in _starts(model, before_seq):
            live = _Live(self._new_adapter(model), model.base_model, before_seq - 1)
            try:
                done = self._beginning(model) if seq_id is None else self._read_snapshot(model.model_id, seq_id, live)
                self._replay_all(model.model_id, live, done)
            except DamagedError as error:
                damaged[seq_id] = str(error)
                start = "its beginning" if seq_id is None else f"its snapshot after operation {seq_id}"
                log.error("%s cannot be built from %s: %s", model.model_id, start, error)
            else:
                self._mend(model, live, [each for each in damaged if each is not None])
                return live
        raise self._lost_error(model, damaged)

    def _beginning(self, model: Model) -> int:
        """How far the seeded beginning goes, if all that came after it is known."""
        first = self._store.jobs.history(model.model_id, -1, 1)
        if first and first[0].seq_id == 0:
            return 0 if first[0].kind == "create_model" else -1
        request_id = ids.request_id(model.model_id, 0)
        status = self._store.results.statuses([request_id]).get(request_id)
        if status is not None and isinstance(status.outcome, Failed | Cancelled):
            why = status.outcome.error.rstrip(".") if isinstance(status.outcome, Failed) else "that was cancelled"
            raise InvalidInputError(
                f"{model.model_id} cannot go on: it was never made: {why}. Make a new model.", field="model_id"
            )
        raise DamagedError("what was done to it since its beginning is not kept any more")

    def _read_snapshot(self, model_id: str, seq_id: int, live: _Live) -> int:
        folder = self._snapshots.folder(model_id, seq_id)
        try:
            adapter_files.read_adapter(folder, live.adapter, with_optimizer=True)
        except InvalidInputError as error:
            raise DamagedError(error.message) from error
        return seq_id

    def _replay_all(self, model_id: str, live: _Live, done: int) -> None:
        """What was done after operation `done`, as far as `live.seq_id`."""
        started, replayed = time.perf_counter(), 0
        progress = _Progress(model_id, self._store.jobs.count_history(model_id, done, live.seq_id + 1), self._tell)
        try:
            while due := self._due(model_id, done, live.seq_id):
                for job in due:
                    self._replay_one(job, live.adapter)
                    replayed += 1
                    progress.reached(replayed)
                done = due[-1].seq_id
        finally:
            progress.is_over()
        live.is_changed, live.work_seconds = replayed > 0, time.perf_counter() - started
        self.metrics.replayed(replayed, live.work_seconds)
        level = logging.INFO if replayed else logging.DEBUG  # to read a snapshot is nothing to speak of
        said = f"Rebuilt {model_id} in {live.work_seconds:.2f} s: replayed {replayed} operations."
        log.log(level, said, extra={"model_id": model_id})

    def _replay_one(self, job: Job, adapter: Adapter) -> None:
        try:
            self._replay(job, adapter)
        except InvalidInputError as error:
            # Without its text: this goes into the log, which quotes nothing that was sent.
            raise DamagedError(f"operation {job.seq_id} cannot be done once more ({reason(error)})") from error

    def _due(self, model_id: str, done: int, last: int) -> list[Job]:
        return [job for job in self._store.jobs.history(model_id, done, REPLAYED_AT_ONCE) if job.seq_id <= last]

    def _mend(self, model: Model, live: _Live, damaged: Collection[int]) -> None:
        """A model that was built without its damaged snapshots gets a new one at once: no other may be left."""
        if not damaged:
            return
        model_id = model.model_id
        self._store.models.forget_snapshots(model_id, damaged)
        whose = {"model_id": model_id}
        log.warning("%s goes on without its damaged snapshots, and has lost nothing.", model_id, extra=whose)
        if model.snapshots.last in damaged:
            self._has_written(model_id, live)

    def _lost_error(self, model: Model, damaged: dict[int | None, str]) -> LostError:
        snapshots = [f"the snapshot after operation {each}: {why}" for each, why in damaged.items() if each is not None]
        saved = self._store.checkpoints.latest([model.model_id], "weights", model.owner).get(model.model_id)
        if saved is not None:
            remedy = f"Make a new model from its last checkpoint, {saved.key.tinker_path}"
        elif (origin := self._origin(model)) is not None:
            remedy = f"It has no checkpoint of its own: make a new model from the one it was made from, {origin}"
        else:
            remedy = "It has no checkpoint: begin with a new model"
        return LostError(
            f"{model.model_id} cannot go on, because what the server keeps of it is damaged "
            f"({'; '.join(snapshots or damaged.values())}). {remedy}, or ask who runs the server for a backup.",
            field="model_id",
            value=model.model_id,
        )

    def _origin(self, model: Model) -> str | None:
        """The checkpoint that the model was made from, if that is known and still there."""
        request_id = ids.request_id(model.model_id, 0)
        status = self._store.results.statuses([request_id]).get(request_id)
        if status is None or status.kind != "load_weights" or not isinstance(status.outcome, Done):
            return None
        path = json.decode(LoadWeightsResponse, status.outcome.result).path
        if path is None or self._store.checkpoints.get(CheckpointKey.of(path), model.owner) is None:
            return None
        return path

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
                live.used = time.monotonic()
                if live.is_changed:
                    live.work_seconds += seconds * job.size / size
        self._keep_bound()

    def _keep_bound(self) -> None:
        """Writes down the models with the most work in them until what is in no snapshot is within the bound."""
        unsaved = sum(live.work_seconds for live in self._live.values())
        if unsaved <= self._replay_bound:
            return
        affordable = [(live.work_seconds, model_id) for model_id, live in self._live.items() if live.is_affordable]
        for work_seconds, model_id in sorted(affordable, reverse=True):
            if unsaved > self._replay_bound and self._has_written(model_id, self._live[model_id]):
                unsaved -= work_seconds

    def has_loaded(self, model_id: str, seq_id: int) -> None:
        """This operation has loaded weights, and counts as done only when the model is written down."""
        live = self._live[model_id]
        live.seq_id, live.is_changed = seq_id, True
        try:
            self._write(model_id, live)
        except WaitError:  # if it is cancelled while it waits, it must have changed nothing
            self.drop(model_id)
            raise

    def put_away(self, model_id: str) -> bool:
        """Out of memory, to be read from the disk when it is needed again; False if it cannot be written."""
        live = self._live.get(model_id)
        if live is not None and live.is_changed and not self._has_written(model_id, live):
            return False
        self.drop(model_id)
        return True

    def put_away_idle(self) -> None:
        long_ago = time.monotonic() - IDLE_SECONDS
        for model_id, live in list(self._live.items()):
            if live.used < long_ago and time.monotonic() >= live.retry_at:
                self.put_away(model_id)
            elif live.is_settled:
                self._has_written(model_id, live)

    def put_away_all(self) -> None:
        """Before the worker ends, so that the next one has nothing to do again; first what took longest."""
        for model_id in sorted(self._live, key=lambda model_id: -self._live[model_id].work_seconds):
            self.put_away(model_id)

    # Fitting into memory

    def that_fit(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """The first of these jobs: as many as have models that fit into memory together, and one at least."""
        together: set[str] = set()
        for place, job in enumerate(jobs):
            together.add(self._model_of(job))
            if place and self._bytes_of(together) > self._max_bytes:
                return jobs[:place]
        return jobs

    def make_room(self, jobs: Sequence[Job]) -> None:
        """Puts away what was not used for longest until the models of these jobs fit beside what is left.

        Their own are not touched: they may hold what is not in the store yet, later on. If the disk is full, some may
        have to stay, and there is an error for jobs whose models are not in memory.
        """
        wanted = {self._model_of(job) for job in jobs}
        others = sorted(self._live.keys() - wanted, key=lambda model_id: self._live[model_id].used)
        full: WaitError | None = None
        for model_id in others:
            if self._fits(wanted):
                return
            full = self._put_away_or_keep(model_id) or full
        if full is not None and not wanted <= self._live.keys() and not self._fits(wanted):
            raise full

    def _fits(self, wanted: set[str]) -> bool:
        return self._bytes_of(wanted | self._live.keys()) <= self._max_bytes

    def _put_away_or_keep(self, model_id: str) -> WaitError | None:
        """It stays if it cannot be written; gives back the error if the disk was full or the storage away."""
        live = self._live[model_id]
        try:
            if live.is_changed:
                self._write(model_id, live)
        except _CANNOT_WRITE as error:
            self._note_failure(model_id, live, error)
            return error if isinstance(error, WaitError) else None
        self.drop(model_id)
        return None

    def _model_of(self, job: Job) -> str:
        model_id = job.model_id or ""
        if model_id not in self._sizes:
            model = self._store.models.get(model_id, job.owner)
            self._sizes[model_id] = 0 if model is None else self._size(model)
        return model_id

    def _bytes_of(self, models: Iterable[str]) -> int:
        return sum(self._sizes[model_id] for model_id in models)

    # Files

    def _has_written(self, model_id: str, live: _Live) -> bool:
        """Whether there is a snapshot now of all that was done. If the disk is full, say, work goes on without one."""
        try:
            self._write(model_id, live)
        except _CANNOT_WRITE as error:
            self._note_failure(model_id, live, error)
            return False
        return True

    def _note_failure(self, model_id: str, live: _Live, error: Exception) -> None:
        self._unwritten.met(f"A snapshot of {model_id} cannot be written, so it stays in memory", error)
        self.metrics.could_not_write_snapshot()
        live.retry_at = time.monotonic() + RETRY_SECONDS

    def _write(self, model_id: str, live: _Live) -> None:
        started = time.perf_counter()
        with self._disk.room("A snapshot", live.bytes_on_disk):
            # First, because samplers' copies of earlier states cannot be built from a later snapshot.
            self._weights.save(self._store.samplers.copies_of(model_id, live.seq_id))
            with self._snapshots.writing(model_id, live.seq_id) as folder:
                adapter_files.write_adapter(folder, live.adapter, live.base_model, with_optimizer=True)
                size_bytes = sum(file.stat().st_size for file in folder.iterdir())
            self._publish(model_id, live.seq_id)
        live.is_changed, live.work_seconds, live.write_seconds = False, 0.0, time.perf_counter() - started
        self.metrics.wrote_snapshot(size_bytes, live.write_seconds)
        self._unwritten.is_over()

    def _publish(self, model_id: str, seq_id: int) -> None:
        change = self._store.models.set_snapshot(model_id, seq_id)
        if not change.is_newest:  # our successor has gone further, or nobody wants this model any more
            if seq_id != change.kept.previous:
                self._snapshots.delete(model_id, seq_id)
            self.drop(model_id)
            return
        self._snapshots.prune(model_id, change.kept)
        if change.kept.previous is not None:
            self._store.jobs.forget_payloads(model_id, change.kept.previous)


class _Progress:
    """Tells how far a replay is, and says so in the log if it takes long."""

    def __init__(self, model_id: str, total: int, tell: Callable[[Replay], None]) -> None:
        self._model_id = model_id
        self._total = total
        self._tell = tell
        self._tell_at = self._log_at = time.monotonic()
        if total:
            self.reached(0)

    def reached(self, replayed: int) -> None:
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + TELL_SECONDS
            self._tell(Replay(model_id=self._model_id, replayed=replayed, total=self._total))
        if now >= self._log_at:
            self._log_at = now + LOG_SECONDS
            log.info("Rebuilding %s: %d of %d operations replayed.", self._model_id, replayed, self._total)

    def is_over(self) -> None:
        if self._total:
            self._tell(Replay(model_id=self._model_id, replayed=self._total, total=self._total))


def _starts(model: Model, before_seq: int) -> Iterator[int | None]:
    """From where a model can be built as it was before an operation: its snapshots, then its beginning."""
    for seq_id in (model.snapshots.last, model.snapshots.previous):
        if seq_id is not None and seq_id < before_seq:
            yield seq_id
    yield None
