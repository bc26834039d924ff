"""Carries out training jobs: what each kind of job does to the live models of a base model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError

from tinsmith.errors import InvalidInputError
from tinsmith.server.age import encrypt_files
from tinsmith.server.checkpoints import Folders
from tinsmith.server.engine import adapter_files
from tinsmith.server.engine.adapters import Adapter, AdapterSpec, layout_of
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.damage import DamagedError
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.room import available_memory
from tinsmith.server.engine.train import RowOutput
from tinsmith.server.full_disk import Disk, DiskFullError, WaitError, is_full
from tinsmith.server.live_models import LiveModels
from tinsmith.server.logs import of_job
from tinsmith.server.messages import LoadJob, Replay, WorkerSettings
from tinsmith.server.reasons import reason
from tinsmith.server.sampling_weights import SamplingWeights
from tinsmith.server.shown import stepped, trained_on
from tinsmith.server.snapshots import LostError, SnapshotFolders
from tinsmith.server.soundness import check_engine
from tinsmith.server.store import Store, StoreUnavailableError, ids
from tinsmith.server.store.checkpoints import name_taken
from tinsmith.server.store.records import (
    CheckpointKey,
    CheckpointKind,
    Done,
    ErrorCategory,
    Failed,
    Job,
    Model,
    NewCheckpoint,
    NewSampler,
    Outcome,
)
from tinsmith.types import (
    AdamParams,
    CreateCustomLossRequest,
    CreateModelResponse,
    CustomLossGraph,
    Datum,
    ForwardBackwardOutput,
    LoadWeightsRequest,
    LoadWeightsResponse,
    OptimStepRequest,
    OptimStepResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    TensorData,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinsmith.types._model import Model as WireModel
from tinsmith.wire import json, proto
from tinsmith.wire.proto import TrainingRequest

log = logging.getLogger(__name__)

REPLAYED = {"create_model", "optim_step", "load_weights", "save_weights_for_sampler"}
"""Besides data that leave a gradient: what a model, or a sampler's copy of it, is built from again."""

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


SHARE_OF_MEMORY = 0.2
"""What of the memory that a base model leaves free is for the models trained on it; batches and samples have theirs."""


FLOATS_PER_WEIGHT = 4
"""It, its gradient and two moments."""


class _Ready(NamedTuple):
    """A data job that was decoded."""

    job: Job
    rows: Sequence[TrainRow]
    is_replayed: bool


class Trainer:
    """Runs on the worker's one thread."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        folders: Folders,
        snapshots: SnapshotFolders,
        weights: SamplingWeights,
        settings: WorkerSettings,
        tell_replay: Callable[[Replay], None],
    ) -> None:
        self._engine = engine
        self._store = store
        self._folders = folders
        self._snapshots = snapshots
        self._weights = weights
        self._base_model = settings.base_model
        self._disk = Disk(Path(settings.state) / "checkpoints")
        self._max_checkpoint_bytes = settings.max_checkpoint_bytes
        self.live = LiveModels(
            store,
            snapshots,
            Disk(Path(settings.state) / "snapshots"),
            weights,
            self._new_adapter,
            self._adapter_bytes,
            self._replay,
            tell_replay,
            replay_bound=settings.replay_bound_seconds,
            max_bytes=int(SHARE_OF_MEMORY * available_memory(engine.model.device)),
        )
        self._superseded: dict[str, str] = {}
        """By the save that publishes others, the copy that nobody begins with once it is done."""
        self._run_one: Mapping[str, Callable[[Job], WireModel]] = {
            "create_model": self._create_model,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load_weights,
            "unload_model": self._unload_model,
        }

    def run(self, jobs: Sequence[Job]) -> dict[str, Outcome]:
        """The outcome of every job of a batch: data jobs of any models, or one of another kind.

        If the disk is full, or the storage is out of reach, there is none, and the models are as they were. If the
        database is out of reach there is none either, and they may be half changed.
        """
        self.live.make_room(jobs)
        try:
            if jobs[0].kind == "forward_backward":
                return self._forward_backward(jobs)
            return {job.request_id: self._outcome(job) for job in jobs}
        except StoreUnavailableError as error:
            if is_full(error):
                raise DiskFullError(self._disk, "The record of this operation", 0) from error
            raise

    def _outcome(self, job: Job) -> Outcome:
        try:
            result = self._run_one[job.kind](job)
            return Done(
                result=json.encode(result),
                content_type=JSON,
                is_replayed=job.kind in REPLAYED,
                shown=stepped(job, result) if isinstance(result, OptimStepResponse) else None,
                publishes=_published(job, result),
            )
        except InvalidInputError as error:
            if job.kind == "load_weights":
                self._drop_halves(job)
            return refused(job, error)
        except (WaitError, StoreUnavailableError):  # not this job's fault: it is done when they are back
            raise
        except (OSError, SafetensorError) as error:
            self._drop_halves(job)
            return _disk_failure(job, error)
        except Exception as error:  # noqa: BLE001 - our fault, and of this job alone
            self._drop_halves(job)
            return server_failure(job, error, self._engine)

    def finished(self, jobs: Sequence[Job], accepted: Collection[str], seconds: float) -> None:
        """These jobs were done, which took so long; of those accepted, the outcomes are in the store."""
        for job in jobs:
            superseded = self._superseded.pop(job.request_id, None)
            if superseded is not None and job.request_id in accepted:
                self._weights.drop(superseded)
        self.live.finished(jobs, accepted, seconds)

    def _drop_halves(self, job: Job) -> None:
        """A model that may have been changed in part is built again from what was done as a whole."""
        if job.kind in ("optim_step", "load_weights"):
            self.live.drop(job.model_id or "")
        if job.kind == "load_weights":
            self._snapshots.drop_loaded(job.model_id or "", job.seq_id)

    # Data

    def _forward_backward(self, jobs: Sequence[Job]) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        ready: list[_Ready] = []
        for job in jobs:
            try:
                ready.append(self._ready(job))
            except InvalidInputError as error:
                outcomes[job.request_id] = refused(job, error)
            except (WaitError, StoreUnavailableError):
                raise
            except Exception as error:  # noqa: BLE001 - our fault, and of this job alone
                outcomes[job.request_id] = server_failure(job, error, self._engine)
        return outcomes | self._through_engine(ready)

    def _through_engine(self, ready: Sequence[_Ready]) -> dict[str, Outcome]:
        """All at once; if the engine fails on them, one by one, to see whose fault it is."""
        if not ready:
            return {}
        try:
            outputs = iter(self._engine.forward_backward([row for each in ready for row in each.rows]))
        except Exception as error:  # noqa: BLE001 - the engine has left every gradient as it was
            if len(ready) == 1:
                return {ready[0].job.request_id: server_failure(ready[0].job, error, self._engine)}
            return {key: outcome for each in ready for key, outcome in self._through_engine([each]).items()}
        return {each.job.request_id: _data_outcome(each, list(islice(outputs, len(each.rows)))) for each in ready}

    def _ready(self, job: Job) -> _Ready:
        request = proto.decode_forward_backward_request(job.payload)
        adapter = self._adapter(job)
        graph = self._graph(job, request)
        if not request.forward_only:
            self.live.will_change(job.model_id or "")
        rows = [_row(job, request, datum, adapter, graph) for datum in request.input.data]
        return _Ready(job, rows, is_replayed=not request.forward_only)

    def _graph(self, job: Job, request: TrainingRequest) -> CustomLossGraph | None:
        if request.input.loss_fn != "custom":
            return None
        loss_id = (request.input.loss_fn_config or {}).get("loss_id")
        loss = self._store.losses.get(str(loss_id), job.owner)
        if loss is None:
            raise InvalidInputError(f"There is no custom loss {loss_id!r}.", field="loss_id", value=loss_id)
        return json.decode(CreateCustomLossRequest, loss.definition).graph

    # Everything else

    def _create_model(self, job: Job) -> CreateModelResponse:
        assert job.model_id is not None
        self.live.begin(self._model(job))
        return CreateModelResponse(model_id=job.model_id)

    def _optim_step(self, job: Job) -> OptimStepResponse:
        adapter = self._adapter(job)
        self.live.will_change(job.model_id or "")
        return OptimStepResponse(metrics=self._step(job, adapter))

    def _step(self, job: Job, adapter: Adapter) -> dict[str, float]:
        params = json.decode(OptimStepRequest, job.payload).optim_params
        if not isinstance(params, AdamParams):
            raise InvalidInputError(
                f"The optimizer {params.type!r} is not supported by this server; use AdamParams.",
                field="optim_params",
                value=params.type,
            )
        return self._engine.optim_step(adapter, params)

    def _save_weights(self, job: Job) -> SaveWeightsResponse:
        request = json.decode(SaveWeightsRequest, job.payload)
        path, _ = self._save(
            job,
            "weights",
            request.path or "",
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
            overwrite=request.overwrite,
            with_optimizer=True,
        )
        return SaveWeightsResponse(path=path)

    def _save_for_sampler(self, job: Job) -> SaveWeightsForSamplerResponseInternal:
        request = json.decode(SaveWeightsForSamplerRequest, job.payload)
        if request.path is None:
            return SaveWeightsForSamplerResponseInternal(sampling_session_id=self._snapshot(job, request))
        path, _ = self._save(
            job,
            "sampler_weights",
            request.path,
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        return SaveWeightsForSamplerResponseInternal(path=path)

    def _save_external(self, job: Job) -> SaveWeightsExternalResponseInternal:
        request = json.decode(SaveWeightsExternalRequest, job.payload)
        path, size = self._save(
            job,
            "external_weights",
            request.path,
            ttl_seconds=request.ttl_seconds,
            recipients=request.age_encryption_recipients or (),
        )
        return SaveWeightsExternalResponseInternal(path=path, size_bytes=size)

    def _save(
        self,
        job: Job,
        kind: CheckpointKind,
        name: str,
        *,
        ttl_seconds: int | None,
        user_metadata: dict[str, str] | None = None,
        overwrite: bool = False,
        with_optimizer: bool = False,
        recipients: Sequence[str] = (),
    ) -> tuple[str, int]:
        """The path and size of the new checkpoint. Its files are in place before anyone can find it."""
        model = self._model(job)
        size = self._checkpoint_bytes(model, with_optimizer, is_encrypted=bool(recipients))
        key = CheckpointKey(run_id=model.model_id, kind=kind, name=name)
        taken = self._store.checkpoints.get(key, job.owner)
        if taken is not None and not overwrite and taken.request_id != job.request_id:
            raise name_taken(key)
        expires = None if ttl_seconds is None else datetime.now(UTC) + timedelta(seconds=ttl_seconds)

        def enter(size: int) -> None:
            self._store.checkpoints.save(
                NewCheckpoint(
                    key=key,
                    owner=job.owner,
                    base_model=model.base_model,
                    lora=model.lora,
                    optimizer_config=model.optimizer_config,
                    size_bytes=size,
                    request_id=job.request_id,
                    user_metadata=user_metadata,
                    expires=expires,
                ),
                overwrite=overwrite,
                most_bytes=self._max_checkpoint_bytes,
            )

        with self._disk.room("A checkpoint", size), self._folders.writing(key.tinker_path, enter) as folder:
            adapter = self._adapter(job)
            adapter_files.write_adapter(folder, adapter, model.base_model, with_optimizer=with_optimizer)
            if recipients:
                encrypt_files(folder, recipients)
        return key.tinker_path, self._folders.size_bytes(key.tinker_path)

    def _checkpoint_bytes(self, model: Model, with_optimizer: bool, is_encrypted: bool) -> int:
        """What it takes to write one: whoever encrypts it has each file twice for a moment."""
        everything = self._adapter_bytes(model)
        if with_optimizer:
            return self.live.bytes_on_disk(model.model_id, most=everything)
        weights = everything // FLOATS_PER_WEIGHT
        return 2 * weights if is_encrypted else weights

    def _snapshot(self, job: Job, request: SaveWeightsForSamplerRequest) -> str:
        """A sampler of the weights as they are now, in memory."""
        frozen = self._adapter(job).frozen_copy()
        sampler = self._store.samplers.create(
            NewSampler(
                session_id=job.session_id,
                sampling_session_seq_id=request.sampling_session_seq_id or 0,
                owner=job.owner,
                base_model=self._base_model,
                model_id=job.model_id,
                model_seq_id=job.seq_id,
            )
        )
        if (sampler.model_id, sampler.model_seq_id) != (job.model_id, job.seq_id):
            raise InvalidInputError(
                f"sampling_session_seq_id is {request.sampling_session_seq_id}, which is another sampler of this "
                "session; take a number that was not used yet.",
                field="sampling_session_seq_id",
                value=request.sampling_session_seq_id,
            )
        self._weights.keep(sampler.sampler_id, frozen)
        if request.kind == "inflight":
            before = self._store.samplers.published(job.model_id or "", job.owner)
            if before is not None:
                self._superseded[job.request_id] = before.sampler_id
        return sampler.sampler_id

    def _load_weights(self, job: Job) -> LoadWeightsResponse:
        request, model = json.decode(LoadJob, job.payload), self._model(job)
        if model.snapshots.last != job.seq_id:  # else its worker died after it was done and before it could say so
            with self._disk.room("The model with what it loads", self._adapter_bytes(model)):
                folder = self._kept_checkpoint(job, request)
            adapter = self.live.begin(model) if job.seq_id == 0 else self._adapter(job)
            _load(request, folder, adapter)
            self.live.has_loaded(model.model_id, job.seq_id)
        return LoadWeightsResponse(path=request.path, model_id=job.model_id)

    def _kept_checkpoint(self, job: Job, request: LoadJob) -> Path:
        """A copy for ourselves: the checkpoint may be gone or another one when it has to be loaded once more."""
        path = request.path

        def checkpoint() -> Path:
            """Who asked may have had to wait, and its owner has withdrawn it, or put another one in its place."""
            if self._store.checkpoints.get(CheckpointKey.of(path), request.reader or job.owner) is None:
                raise FileNotFoundError(path)
            return self._folders.folder(path)

        try:
            return self._snapshots.keep_loaded(job.model_id or "", job.seq_id, checkpoint)
        except FileNotFoundError as error:
            raise InvalidInputError(f"{path} does not exist any more.", field="path", value=path) from error
        except DamagedError as error:
            raise _damaged(path, error) from error

    def _unload_model(self, job: Job) -> UnloadModelResponse:
        model_id = json.decode(UnloadModelRequest, job.payload).model_id
        self.live.put_away(model_id)
        return UnloadModelResponse(model_id=model_id)

    # Live models

    def _adapter(self, job: Job) -> Adapter:
        assert job.model_id is not None
        return self.live.adapter(job.model_id, job.owner, before_seq=job.seq_id)

    def _replay(self, job: Job, adapter: Adapter) -> None:
        if job.kind == "optim_step":
            self._step(job, adapter)
        elif job.kind == "load_weights":
            folder = self._snapshots.loaded(job.model_id or "", job.seq_id)
            _load(json.decode(LoadJob, job.payload), folder, adapter)
        elif job.kind == "save_weights_for_sampler":
            self._copy_again(job, adapter)
        elif job.kind == "forward_backward":
            request = proto.decode_forward_backward_request(job.payload)
            if not request.forward_only:
                graph = self._graph(job, request)
                self._engine.forward_backward(
                    [_row(job, request, datum, adapter, graph) for datum in request.input.data]
                )

    def _copy_again(self, job: Job, adapter: Adapter) -> None:
        """A sampler's copy that was lost with its worker: after the model's next snapshot it cannot be made."""
        request = json.decode(SaveWeightsForSamplerRequest, job.payload)
        if request.path is not None:
            return
        sampler_id = ids.sampler_id(job.session_id, request.sampling_session_seq_id or 0)
        sampler = self._store.samplers.get(sampler_id, job.owner)
        if sampler is None or sampler.removed is not None or sampler_id in self._weights:
            return
        if self._store.samplers.source(sampler).sampler_id == sampler_id:
            self._weights.keep(sampler_id, adapter.frozen_copy())

    def _new_adapter(self, model: Model) -> Adapter:
        return self._engine.create_adapter(_spec(model))

    def _adapter_bytes(self, model: Model) -> int:
        return FLOATS_PER_WEIGHT * 4 * layout_of(self._engine.model.shape, _spec(model)).size

    def _model(self, job: Job) -> Model:
        model = self._store.models.get(job.model_id or "", job.owner)
        if model is None:
            raise InvalidInputError(f"There is no model {job.model_id!r}.", field="model_id", value=job.model_id)
        return model


def _published(job: Job, result: WireModel) -> str | None:
    """The sampler of an inflight save."""
    if not isinstance(result, SaveWeightsForSamplerResponseInternal):
        return None
    request = json.decode(SaveWeightsForSamplerRequest, job.payload)
    return result.sampling_session_id if request.kind == "inflight" else None


def _row(job: Job, request: TrainingRequest, datum: Datum, adapter: Adapter, graph: CustomLossGraph | None) -> TrainRow:
    return TrainRow(
        adapter=adapter,
        tokens=np.array(datum.model_input.to_ints(), dtype=np.int64),
        loss=request.input.loss_fn,
        inputs={name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()},
        config=request.input.loss_fn_config or {},
        backward=not request.forward_only,
        graph=graph,
        job=job.request_id,
    )


def _spec(model: Model) -> AdapterSpec:
    lora = model.lora
    return AdapterSpec(lora.rank, lora.seed or 0, lora.train_attn, lora.train_mlp, lora.train_unembed)


def _load(request: LoadWeightsRequest, folder: Path, adapter: Adapter) -> None:
    try:
        adapter_files.read_adapter(folder, adapter, with_optimizer=request.optimizer)
    except DamagedError as error:
        raise _damaged(request.path, error) from error


def _damaged(path: str, error: DamagedError) -> InvalidInputError:
    return InvalidInputError(
        f"The files of {path} are damaged ({error}), so it was not loaded and nothing was changed. Load another "
        "checkpoint, or ask who runs the server for a backup.",
        field="path",
        value=path,
    )


def refused(job: Job, error: InvalidInputError) -> Failed:
    """The outcome of a job that cannot be done. The text is for its client: it may quote what was sent."""
    category: ErrorCategory = "server" if isinstance(error, LostError) else "user"
    log.warning("%s failed (%s)", job.kind, category, extra={**of_job(job), "reason": reason(error)})
    return Failed(error=error.message, category=category, reason=reason(error))


def _data_outcome(ready: _Ready, outputs: Sequence[RowOutput]) -> Outcome:
    for output in outputs:
        if output.error is not None:
            return refused(ready.job, output.error)
    result = ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[
            {"logprobs": TensorData.from_numpy(output.logprobs)} for output in outputs if output.logprobs is not None
        ],
        metrics={"loss:sum": sum(output.loss for output in outputs), **_custom_metrics(outputs)},
    )
    encoded = proto.encode_forward_backward_output(result)
    shown = trained_on(ready.rows, outputs) if ready.is_replayed else None
    return Done(result=encoded, content_type=PROTOBUF, is_replayed=ready.is_replayed, shown=shown)


def _custom_metrics(outputs: Sequence[RowOutput]) -> dict[str, float]:
    """What a custom loss reported for each datum, added up, or averaged where its name ends in `:mean`."""
    names = dict.fromkeys(name for output in outputs for name in output.metrics)
    totals = {name: sum(output.metrics.get(name, 0.0) for output in outputs) for name in names}
    return {name: total / len(outputs) if name.endswith(":mean") else total for name, total in totals.items()}


def _disk_failure(job: Job, error: Exception) -> Failed:
    log.error("%s %s failed: %s", job.kind, job.request_id, error, extra=of_job(job))
    return Failed(
        error=f"The server could not write or read the files of this operation: {error}. It changed nothing; free or "
        "mend the server's disk, and send it again.",
        category="server",
    )


def server_failure(job: Job, error: Exception, engine: Engine) -> Failed:
    """The outcome of a job that met an error of ours; if the engine is lost with it, there is none."""
    log.error("%s %s failed", job.kind, job.request_id, exc_info=error, extra=of_job(job))
    check_engine(engine)
    return Failed(
        error=f"The server failed on this operation ({type(error).__name__}); see its log.", category="server"
    )
