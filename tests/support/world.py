"""What the server knows: sessions, models, samplers and checkpoints, under a clock that only ticks when used."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.engine import BadInput, Policy
from tests.support.promises import Promise

ADAM = {"type": "adamw"}
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


@dataclass
class Session:
    session_id: str
    created_at: str
    user_metadata: dict[str, Any]
    display_name: str | None = None
    project_id: str = "project-default"
    finished: dict[str, Any] | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass
class Model:
    """A training run. Operations wait in `early` until those with smaller numbers have been executed."""

    model_id: str
    session: Session
    base_model: str
    lora: dict[str, Any]
    optimizer_config: dict[str, Any]
    user_metadata: dict[str, str] | None
    last_request_time: str
    policy: Policy = field(default_factory=Policy)
    next_seq: int = 1
    early: dict[int, Promise | None] = field(default_factory=dict)


@dataclass
class Checkpoint:
    run_id: str
    kind: str
    name: str
    time: str
    policy: Policy
    base_model: str
    lora: dict[str, Any]
    optimizer_config: dict[str, Any]
    user_metadata: dict[str, str] | None
    expires_at: str | None
    files: dict[str, bytes] = field(default_factory=dict)
    public: bool = False

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.checkpoint_id}"

    @property
    def size(self) -> int:
        return sum(map(len, self.files.values())) or 100 * int(self.lora["rank"])

    def shown(self) -> dict[str, Any]:
        return {
            "checkpoint_id": self.checkpoint_id,
            "checkpoint_type": KINDS[self.kind],
            "time": self.time,
            "tinker_path": self.path,
            "size_bytes": self.size,
            "public": self.public,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires_at,
        }


@dataclass
class Sampler:
    sampler_id: str
    base_model: str
    model_path: str | None
    policy: Policy
    clones: int = 0


class World:
    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.copies: dict[str, str] = {}
        self._ticks = 0

    def now(self, ahead: int = 0) -> str:
        """The next second of a made-up day: two runs of one script see the same times."""
        self._ticks += 1
        moment = datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=self._ticks + ahead)
        return moment.isoformat().replace("+00:00", "Z")

    def save(self, model: Model, kind: str, request: dict[str, Any], files: dict[str, bytes]) -> Checkpoint:
        ttl = request.get("ttl_seconds")
        checkpoint = Checkpoint(
            run_id=model.model_id,
            kind=kind,
            name=request["path"],
            time=self.now(),
            policy=model.policy,
            base_model=model.base_model,
            lora=model.lora,
            optimizer_config=model.optimizer_config,
            user_metadata=request.get("user_metadata"),
            expires_at=None if ttl is None else self.now(ttl),
            files=files,
        )
        if checkpoint.path in self.checkpoints and not request.get("overwrite", False):
            raise BadInput(f"checkpoint {checkpoint.path} exists; pass overwrite=True to replace it")
        self.checkpoints[checkpoint.path] = checkpoint
        return checkpoint

    def of_run(self, run_id: str) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self.checkpoints.values() if checkpoint.run_id == run_id]
