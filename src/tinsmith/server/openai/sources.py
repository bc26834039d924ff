"""Which weights the name of a model stands for: a base model, a checkpoint, or a training run as it is now."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tinsmith.errors import InvalidInputError
from tinsmith.server.models import ModelFacts
from tinsmith.server.openai.errors import Refused
from tinsmith.server.routes._call import Call
from tinsmith.server.routes._found import find_checkpoint
from tinsmith.server.store.records import Checkpoint, CheckpointKey, Model

_SAMPLED_KINDS = ("weights", "sampler_weights")
_MOST_LISTED = 1000
_PATH = "tinker://"


@dataclass(frozen=True)
class Source:
    """Where a sampler's weights come from; with neither a path nor a model they are those of the base model."""

    base_model: str
    model_path: str | None = None
    saved_by: str | None = None
    """The job that wrote the checkpoint: another one may be saved under its name later."""
    model_id: str | None = None
    """The training run that is followed."""


async def find(call: Call, name: str) -> tuple[Source, ModelFacts]:
    """What belongs to somebody else, and was not published, does not exist."""
    source = await _find(call, name)
    facts = call.services.models.get(source.base_model) if source else None
    if source is None or facts is None:
        served = ", ".join(sorted(call.services.models))
        raise Refused(
            404,
            f"There is no model {name!r}. Name a base model ({served}), a checkpoint by its tinker:// path, or a "
            "training run by its id.",
            "model",
            "model_not_found",
        )
    return source, facts


async def _find(call: Call, name: str) -> Source | None:
    if name in call.services.models:
        return Source(name)
    if not name.startswith(_PATH):
        model = await call.stored(call.store.models.get, name, call.owner)
        return Source(model.base_model, model_id=name) if model is not None and _is_live(model) else None
    try:
        key = CheckpointKey.of(name)
    except InvalidInputError as error:
        raise Refused(400, error.message, "model") from None
    checkpoint = await find_checkpoint(call, key)
    if checkpoint is None or key.kind not in _SAMPLED_KINDS:
        return None
    return Source(checkpoint.base_model, key.tinker_path, saved_by=checkpoint.request_id)


def _is_live(model: Model) -> bool:
    return model.trainable and model.removed is None


def _is_sampled(checkpoint: Checkpoint) -> bool:
    return checkpoint.key.kind in _SAMPLED_KINDS


async def listed(call: Call) -> list[dict[str, Any]]:
    """The base models, and what the caller has trained, newest first."""
    checkpoints = await call.stored(call.store.checkpoints.page, call.owner, limit=_MOST_LISTED)
    runs = await call.stored(call.store.models.page, call.owner, limit=_MOST_LISTED)
    models = call.services.models
    return [
        *map(_base, models.values()),
        *(_run(each) for each in runs.items if _is_live(each) and each.base_model in models),
        *(_checkpoint(each) for each in checkpoints.items if _is_sampled(each) and each.base_model in models),
    ]


async def described(call: Call, name: str) -> dict[str, Any]:
    source, facts = await find(call, name)
    if source.model_id is not None:
        model = await call.stored(call.store.models.get, source.model_id, call.owner)
        return _run(model) if model is not None else _base(facts)
    if source.model_path is not None:
        checkpoint = await find_checkpoint(call, CheckpointKey.of(source.model_path))
        return _checkpoint(checkpoint) if checkpoint is not None else _base(facts)
    return _base(facts)


def _base(facts: ModelFacts) -> dict[str, Any]:
    return {**_entry(facts.name, facts.name, "base"), "max_model_len": facts.max_context}


def _run(model: Model) -> dict[str, Any]:
    return _entry(model.model_id, model.base_model, "training_run", model.created)


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return _entry(checkpoint.key.tinker_path, checkpoint.base_model, "checkpoint", checkpoint.created)


def _entry(name: str, base_model: str, kind: str, created: datetime | None = None) -> dict[str, Any]:
    """With two fields of our own: what it is, and which base model it belongs to."""
    return {
        "id": name,
        "object": "model",
        "created": int(created.timestamp()) if created else 0,
        "owned_by": "tinsmith",
        "kind": kind,
        "base_model": base_model,
    }
