"""Looking up what a request names. What belongs to somebody else does not exist."""

from __future__ import annotations

from tinsmith.server import logs
from tinsmith.server.routes._call import Call, status_error
from tinsmith.server.store import ids
from tinsmith.server.store.records import (
    AccessScope,
    Checkpoint,
    CheckpointKey,
    Model,
    Sampler,
    Session,
)

CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"


async def session_named(call: Call, session_id: str, scope: AccessScope = "owned") -> Session:
    logs.about(session_id=session_id)
    session = await call.stored(call.store.sessions.get, session_id, call.owner, scope)
    if session is None:
        raise status_error(404, f"There is no session {session_id!r}.")
    return session


async def open_session(call: Call, session_id: str) -> Session:
    session = await session_named(call, session_id)
    if session.state != "active":
        raise status_error(410, f"The session {session_id!r} has ended. Create a new ServiceClient.")
    return session


async def model_named(call: Call, model_id: str) -> Model:
    logs.about(model_id=model_id)
    in_use, key = call.services.models_in_use, (call.owner, model_id)
    if (known := in_use.get(key)) is not None:
        return known
    model = await call.stored(call.store.models.get, model_id, call.owner)
    if model is None:
        raise status_error(404, f"There is no model {model_id!r}.")
    in_use.put(key, model)
    return model


async def sampler_named(call: Call, sampler_id: str) -> Sampler:
    in_use, key = call.services.samplers_in_use, (call.owner, sampler_id)
    if (known := in_use.get(key)) is not None:
        return known
    sampler = await call.stored(call.store.samplers.get, sampler_id, call.owner)
    if sampler is None:
        raise status_error(404, f"There is no sampling session {sampler_id!r}.")
    in_use.put(key, sampler)
    return sampler


def key_in_path(call: Call) -> CheckpointKey:
    """Which checkpoint the address of an endpoint under `CHECKPOINT` names."""
    return CheckpointKey.of(ids.tinker_path(call.part("run_id"), call.part("kind"), call.part("name")))


async def find_checkpoint(call: Call, key: CheckpointKey, access_token: str | None = None) -> Checkpoint | None:
    """A checkpoint that the caller, or the owner of the access token, may read."""
    found = await call.stored(call.store.checkpoints.get, key, call.owner)
    if found is None and access_token:
        other = await call.stored(call.services.authority.identify, access_token)
        if other is not None:
            return await call.stored(call.store.checkpoints.get, key, other.owner)
    return found


async def checkpoint_at(call: Call, tinker_path: str, access_token: str | None = None) -> Checkpoint:
    found = await find_checkpoint(call, CheckpointKey.of(tinker_path), access_token)
    if found is None:
        raise status_error(404, f"There is no checkpoint {tinker_path}.")
    return found
