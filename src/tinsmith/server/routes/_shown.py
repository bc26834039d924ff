"""Checkpoints as the API shows them."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.server.store.records import Checkpoint, CheckpointKind
from tinsmith.types import Checkpoint as ShownCheckpoint
from tinsmith.types import CheckpointType

_TYPES: Mapping[CheckpointKind, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


def shown_checkpoint(checkpoint: Checkpoint) -> ShownCheckpoint:
    key = checkpoint.key
    return ShownCheckpoint(
        checkpoint_id=f"{key.kind}/{key.name}",
        checkpoint_type=_TYPES[key.kind],
        time=checkpoint.created,
        tinker_path=key.tinker_path,
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        user_metadata=checkpoint.user_metadata,
        expires_at=checkpoint.expires,
    )
