"""Training runs, checkpoints and how to page through them."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, Self, TypeAlias

from tinsmith.errors import InvalidInputError, InvalidTypeError
from tinsmith.types._brief import brief
from tinsmith.types._model import Request, Response, SendNull

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]

_TYPE_OF_SEGMENT: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class Checkpoint(Response):
    checkpoint_id: str
    """Kind and name, as in `weights/step-10`."""

    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    """`None` if it is kept for ever."""


class ParsedCheckpointTinkerPath(Response):
    """A path `tinker://<run>/<weights | sampler_weights | external_weights>/<name>` in its parts."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        if not isinstance(tinker_path, str):
            raise InvalidTypeError(
                f"tinker_path must be a text such as tinker://<run>/weights/<name>, not {brief(tinker_path)}",
                field="tinker_path",
                value=tinker_path,
            )
        scheme, _, rest = tinker_path.partition("://")
        parts = rest.split("/")
        if scheme != "tinker" or len(parts) != 3 or parts[1] not in _TYPE_OF_SEGMENT:
            raise InvalidInputError(
                f"{tinker_path!r} is not a checkpoint path. One looks like tinker://<run>/<kind>/<name>, "
                f"where kind is {', '.join(_TYPE_OF_SEGMENT)}",
                field="tinker_path",
                value=tinker_path,
            )
        return cls(
            tinker_path=tinker_path,
            training_run_id=parts[0],
            checkpoint_type=_TYPE_OF_SEGMENT[parts[1]],
            checkpoint_id=f"{parts[1]}/{parts[2]}",
        )


class Cursor(Response):
    """Where a page stands in the whole list."""

    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(Response):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None
    """`None` if the list is not paged."""


class TrainingRun(Response):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunsResponse(Response):
    training_runs: list[TrainingRun]
    cursor: Cursor


class ExternalWeightsUrlsResponse(Response):
    urls: dict[str, str]
    """A signed URL for every file, by its path within the checkpoint."""

    expires: datetime


class SetCheckpointTTLRequest(Request):
    ttl_seconds: SendNull[int | None]
    """Seconds from now; `None` keeps the checkpoint for ever and is sent as null."""
