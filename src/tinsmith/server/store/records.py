"""What goes into the store and what comes out: frozen records, never rows."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar, dataclass_transform, get_args

import msgspec

from tinsmith.server.store import ids
from tinsmith.types import ParsedCheckpointTinkerPath

JobKind: TypeAlias = Literal[
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
    "unload_model",
    "sample",
    "create_custom_loss",
]
Lane: TypeAlias = Literal["train", "sample"]
"""Training jobs of a model run in the order of their numbers, samples in any order; a worker claims them apart."""

JobState: TypeAlias = Literal["queued", "running", "done", "failed", "cancelled"]
ErrorCategory: TypeAlias = Literal["unknown", "server", "user"]
CheckpointKind: TypeAlias = Literal["weights", "sampler_weights", "external_weights"]
AccessScope: TypeAlias = Literal["owned", "accessible"]
FinishReason: TypeAlias = Literal["success", "errored", "interrupted"]
SessionState: TypeAlias = Literal["active", "client_finished", "cancelled"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, kw_only=True):
    def __repr__(self) -> str:
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(f'{name}={_shown(value)}' for name, value in fields)})"


def _shown(value: object) -> str:
    """Payloads and results hold prompts, which belong in no log."""
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else repr(value)


class Page(Record, Generic[T]):
    """A part of a list, and the length of the whole."""

    items: list[T]
    total: int


# Jobs


class Heartbeat(NamedTuple):
    """A sign of life from the client of a session, with the key that it showed."""

    session_id: str
    owner: str


SESSION_STREAMS = {"create_custom_loss": "loss", "unload_model": "unload"}


class NewJob(Record):
    """A submission. At most one of `model_id` and `sampler_id` is set; a job with neither belongs to its session."""

    kind: JobKind
    owner: str
    payload: bytes
    session_id: str
    base_model: str | None = None
    """Whose worker runs it. `None` only for a job that is settled on arrival."""

    model_id: str | None = None
    sampler_id: str | None = None
    seq_id: int | None = None
    """`None` for what clients do not number: the one after the highest so far."""

    size: int = 1
    """Tokens; streams of one owner share the worker in proportion to it."""

    samples: int = 1
    """How many it asks for, each of which takes a place in its worker; one for training."""

    key_id: int | None = None
    """The key that it came with, for the audit trail."""

    replica: str = ""
    """Where there are sampler replicas: the one that draws this sample."""

    @property
    def lane(self) -> Lane:
        return "sample" if self.kind == "sample" else "train"

    @property
    def stream(self) -> str:
        """The thing whose numbers `seq_id` counts."""
        return self.model_id or self.sampler_id or f"{self.session_id}:{SESSION_STREAMS[self.kind]}"


class Job(Record):
    """A submission as the worker receives it."""

    request_id: str
    kind: JobKind
    owner: str
    session_id: str
    base_model: str
    model_id: str | None
    sampler_id: str | None
    seq_id: int
    size: int
    payload: bytes
    created: datetime
    attempts: int
    """How often it was begun before; it was running each time when its worker died."""

    samples: int = 1
    key_id: int | None = None

    @property
    def lane(self) -> Lane:
        return "sample" if self.kind == "sample" else "train"


class Stray(Record):
    """A sample without a replica that could draw it."""

    request_id: str
    owner: str
    sampler_id: str
    samples: int


class Enqueued(Record):
    """The answer to a submission."""

    request_id: str
    is_new: bool
    """False if this number was submitted before: nothing was written, and the first submission stands."""


class TrainedOn(Record, kw_only=True, tag="data"):
    """What the data of an operation came to, for the curves of its model."""

    loss: float
    """A sum; divided by `weight` it is the mean."""

    weight: float
    tokens: int


class Stepped(Record, kw_only=True, tag="step"):
    """What an optimizer step says about itself, by name."""

    metrics: dict[str, float]


class ShownCompletion(Record):
    tokens: list[int]
    stop_reason: str


class Sampled(Record):
    """A prompt and what was sampled for it, cut where they are long."""

    owner: str
    base_model: str
    prompt: list[int]
    completions: list[ShownCompletion]
    reward: float | None = None

    def __repr__(self) -> str:
        return f"Sampled(owner={self.owner!r}, base_model={self.base_model!r}, prompt=<{len(self.prompt)} tokens>)"


Shown: TypeAlias = TrainedOn | Stepped | Sampled
"""What of an operation is kept for people to look at."""


class Done(Record):
    result: bytes
    content_type: str
    is_replayed: bool = True
    """Whether it is done once more when its model is built again, so that its data have to be kept."""

    shown: Shown | None = None
    publishes: str | None = None
    """The sampler whose weights all inflight samplers of its model draw with from now on."""


class Failed(Record):
    error: str
    category: ErrorCategory
    reason: str = ""
    """What kind of error it was, for the operator (`reasons.py`); not stored with the result, and empty where the log
    has the whole of it."""


class Cancelled(Record):
    pass


Outcome: TypeAlias = Done | Failed | Cancelled


class Submission(Record):
    """A job to be written down, with what belongs to it in the same moment."""

    job: NewJob
    outcome: Outcome | None = None
    """Known on arrival: a refused job, or one that needs no worker."""

    model: NewModel | None = None
    """The model that this job creates."""

    most_models: int | None = None
    """With it, its owner has so many at most; else it is refused."""

    event: NewEvent | None = None
    """For the audit trail."""


class Expired(Record):
    """The job had an outcome, and it was kept for as long as promised."""


class Status(Record):
    """How far a job is, without its payload."""

    request_id: str
    kind: JobKind
    owner: str
    base_model: str | None
    state: JobState
    outcome: Outcome | Expired | None
    """`None` while it is queued or running."""

    is_held_up: bool
    """Whether it waits for a lower number of its model that has not arrived."""

    key_id: int | None = None


class Completion(Record):
    request_id: str
    state: Literal["finished", "failed"]
    size: int
    """Bytes of the result."""


class Completions(Record):
    items: list[Completion]
    cursor: int
    """Ask with this one next time."""


class Abandoned(Record):
    """What became of samples whose clients are gone."""

    cancelled: list[str]
    asked: list[str]
    """The base models whose workers have to stop some that run."""


class Queued(Record):
    """What of an owner waits or runs."""

    owner: str
    requests: int
    size_bytes: int


class QueueDepth(Record):
    """The jobs of one kind that wait or run for one base model."""

    base_model: str
    kind: JobKind
    state: Literal["queued", "running"]
    count: int
    oldest: datetime
    """When the first of them was submitted."""


# Sessions


class NewSession(Record):
    owner: str
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] = {}
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None


class Session(Record):
    session_id: str
    owner: str
    tags: tuple[str, ...]
    user_metadata: dict[str, Any]
    sdk_version: str | None
    project_id: str | None
    display_name: str | None
    created: datetime
    heartbeat: datetime
    """When its client was last heard of."""

    state: SessionState
    finish_reason: FinishReason | None
    finish_detail: str | None


class SessionMembers(Record):
    model_ids: list[str]
    sampler_ids: list[str]


class SessionSummary(Record):
    session: Session
    checkpoints_count: int
    checkpoint_bytes: int


class StatusFilter(Record):
    state: SessionState
    reasons: tuple[FinishReason, ...] = ()
    """Only for `client_finished`; empty means any."""


class SessionCursor(Record):
    last_created_at: datetime
    last_session_id: str


class SessionQuery(Record):
    """What to look for, among what the reader may see; a field left alone does not narrow the search."""

    reader: str
    scope: AccessScope = "owned"
    owners: tuple[str, ...] | None = None
    session_id: str | None = None
    project_ids: tuple[str, ...] | None = None
    user_metadata: dict[str, str] = {}
    """Pairs that a session must have, all of them. Names and metadata of others are not looked at."""

    display_name: str | None = None
    """Every word must occur in the name, in any case. Together with `session_id`, either is enough."""

    statuses: tuple[StatusFilter, ...] | None = None
    limit: int = 50
    cursor: SessionCursor | None = None


class SessionsFound(Record):
    sessions: list[SessionSummary]
    next_cursor: SessionCursor | None


# Models, samplers, losses


class Lora(Record):
    """What an adapter is made of."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class NewModel(Record):
    model_id: str
    owner: str
    base_model: str
    lora: Lora
    optimizer_config: dict[str, Any]
    session_id: str | None = None
    """`None` for a run that only holds copied checkpoints."""

    project_id: str | None = None
    """`None` for the project of its session."""

    user_metadata: dict[str, str] | None = None
    trainable: bool = True


class Snapshots(Record):
    """Which snapshots of a model are kept, by the last operation that is in them."""

    last: int | None = None
    previous: int | None = None
    """For when the last is damaged; without one, the operations since the model's beginning are kept."""


class Model(Record):
    """A model in training, which is a training run."""

    model_id: str
    owner: str
    base_model: str
    lora: Lora
    optimizer_config: dict[str, Any]
    session_id: str | None
    user_metadata: dict[str, str] | None
    trainable: bool
    created: datetime
    last_request: datetime
    corrupted: str | None
    """Why it cannot go on, if so."""

    snapshots: Snapshots

    removed: datetime | None
    """Since when it is not kept any more, except for its checkpoints."""


class SnapshotChange(Record):
    is_newest: bool
    """False if a later one is known already, as whoever wrote this one was replaced by another worker, or if the model
    was removed meanwhile."""

    kept: Snapshots


class NewSampler(Record):
    """Weights to sample from: those of the base model, of a checkpoint, or of a model as it was after an operation."""

    session_id: str
    sampling_session_seq_id: int
    owner: str
    base_model: str
    model_path: str | None = None
    saved_by: str | None = None
    """The job that wrote the checkpoint: another one may be saved under its name later."""

    model_id: str | None = None
    model_seq_id: int | None = None
    """The operation of `model_id` after which the weights were copied; `None` for a sampler that follows the model."""


class Sampler(Record):
    """A sampling session."""

    sampler_id: str
    session_id: str
    owner: str
    base_model: str
    model_path: str | None
    saved_by: str | None
    model_id: str | None
    model_seq_id: int | None
    inflight: bool
    """Whether it draws with the newest weights that were published for such samplers of the model."""

    created: datetime
    removed: datetime | None
    """Since when its weights are not kept any more; only for those copied from a model."""

    session_state: SessionState | None


class NewLoss(Record):
    session_id: str
    custom_loss_seq_id: int
    owner: str
    name: str
    definition: bytes
    """The inputs and the graph, in the caller's encoding."""


class Loss(Record):
    loss_id: str
    session_id: str
    owner: str
    name: str
    definition: bytes
    created: datetime


# What people look at


class Curve(Record):
    """A part of a curve, in the order of its points.

    They are many, and so plain: the step, seconds since 1970, and the value if that is a finite number.
    """

    points: list[tuple[int, float, float | None]]
    cursor: int
    """Ask with this one for what comes later."""


class RunProgress(Record):
    steps: int = 0
    last: dict[str, float | None] = {}
    """The last value of each curve, by name."""


class RecentSample(Record):
    request_id: str
    base_model: str
    model_path: str | None
    run_id: str | None
    """The training run whose weights were sampled from, if it was not the base model."""

    time: datetime
    prompt: list[int]
    completions: list[ShownCompletion]
    reward: float | None = None

    def __repr__(self) -> str:
        return f"RecentSample(request_id={self.request_id!r}, prompt=<{len(self.prompt)} tokens>)"


# Checkpoints


class CheckpointKey(Record):
    run_id: str
    kind: CheckpointKind
    name: str

    @classmethod
    def of(cls, tinker_path: str) -> Self:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        segment, _, name = parsed.checkpoint_id.partition("/")
        kind: CheckpointKind = next(kind for kind in get_args(CheckpointKind) if kind == segment)
        return cls(run_id=parsed.training_run_id, kind=kind, name=name)

    @property
    def tinker_path(self) -> str:
        return ids.tinker_path(self.run_id, self.kind, self.name)


class NewCheckpoint(Record):
    key: CheckpointKey
    owner: str
    base_model: str
    lora: Lora
    optimizer_config: dict[str, Any]
    size_bytes: int
    request_id: str
    """The job that wrote it: the same job may write it twice (after a crash), another one only with `overwrite`."""

    user_metadata: dict[str, str] | None = None
    expires: datetime | None = None


class Checkpoint(Record):
    key: CheckpointKey
    owner: str
    base_model: str
    lora: Lora
    optimizer_config: dict[str, Any]
    size_bytes: int
    request_id: str
    user_metadata: dict[str, str] | None
    public: bool
    created: datetime
    expires: datetime | None


class Storage(Record):
    """What an owner keeps in one project."""

    project_id: str | None
    count: int
    size_bytes: int


# Keys and the audit trail


class ApiKey(Record):
    """A key as it is shown: the key itself is known only to whoever made it."""

    key_id: int
    owner: str
    name: str
    note: str
    hint: str
    """Its last four characters."""

    created: datetime
    revoked: datetime | None


class NewKey(Record):
    key: ApiKey
    plain: str
    """Shown once; the store keeps a hash."""

    def __repr__(self) -> str:
        return f"NewKey(key={self.key!r}, plain=<secret>)"


EventOutcome: TypeAlias = Literal["accepted", "done", "refused", "failed"]
"""Operations on models are accepted or refused when they come, and done or failed when their turn has come."""


class NewEvent(Record):
    """Who did what, or tried to. No secrets and no prompts in `details`."""

    owner: str
    event: str
    """A thing and an action, as in `checkpoint_publish`."""

    outcome: EventOutcome = "done"
    key_id: int | None = None
    """The key that was used; in what was done to a key, that one."""

    address: str | None = None
    """Where it was done from; `None` for what the server did by itself."""

    model_id: str | None = None
    tinker_path: str | None = None
    details: dict[str, Any] = msgspec.field(default_factory=dict)


class AuditEvent(NewEvent, kw_only=True):
    time: datetime
