"""Adapters made elsewhere: sent as files, checked, and kept as checkpoints like those that were trained here."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from pathlib import Path

from starlette.responses import Response

from tinsmith.export import BaseModel
from tinsmith.export.adapter import CONFIG, WEIGHTS
from tinsmith.server import audit
from tinsmith.server.adoption import Adoption, largest_bytes
from tinsmith.server.checkpoints import check_name
from tinsmith.server.checks import check_base_model
from tinsmith.server.full_disk import Disk, is_full
from tinsmith.server.models import ModelFacts
from tinsmith.server.routes._call import Call, Endpoint, reply
from tinsmith.server.routes._found import find_checkpoint
from tinsmith.server.routes._upload import no_room, receive_files
from tinsmith.server.routes.sessions import DEFAULT_PROJECT
from tinsmith.server.routes.weights import check_disk
from tinsmith.server.store.records import CheckpointKey, NewCheckpoint, NewModel
from tinsmith.types import AdamOptimizerConfig, ImportWeightsResponse
from tinsmith.wire import json

_SEED_BITS = 31


async def import_weights(call: Call) -> Response:
    """Keep a PEFT adapter, a tar of its two files, as a checkpoint (`base_model`, `name`) of a new run."""
    query = call.request.query_params
    facts = check_base_model(query.get("base_model", ""), call.services.models)
    name = check_name(query.get("name", "imported"))
    key = CheckpointKey(run_id=_run_id(call, facts.name, name), kind="weights", name=name)
    if await find_checkpoint(call, key) is None:
        await check_disk(call)
        call.services.paperwork.charge(call.owner, 0)
        with call.services.conversions.one_more(call.owner):
            await _import(call, facts, key)
    return reply(ImportWeightsResponse(tinker_path=key.tinker_path))


async def _import(call: Call, facts: ModelFacts, key: CheckpointKey) -> None:
    base = await asyncio.to_thread(BaseModel, facts.folder, facts.name)
    folders = call.services.folders
    scratch = await call.filed(folders.make_scratch, key.tinker_path)
    try:
        await receive_files(call, scratch, (CONFIG, WEIGHTS), largest_bytes(base))
        await call.filed(_adopt, call, scratch, base, facts, key)
    finally:
        await asyncio.to_thread(folders.remove_scratch, scratch)


def _adopt(call: Call, sent: Path, base: BaseModel, facts: ModelFacts, key: CheckpointKey) -> None:
    adoption = Adoption(sent, base, facts.name, secrets.randbits(_SEED_BITS))
    if not Disk(sent).fits(adoption.size_bytes):
        raise no_room(adoption.size_bytes)
    try:
        with call.services.folders.writing(
            key.tinker_path, lambda size: _record(call, adoption, facts, key, size)
        ) as folder:
            adoption.write(folder)
    except OSError as error:
        if is_full(error):
            raise no_room(adoption.size_bytes) from error
        raise


def _record(call: Call, adoption: Adoption, facts: ModelFacts, key: CheckpointKey, size: int) -> None:
    optimizer = AdamOptimizerConfig().to_builtins()
    run = NewModel(
        model_id=key.run_id,
        owner=call.owner,
        base_model=facts.name,
        lora=adoption.lora,
        optimizer_config=optimizer,
        project_id=DEFAULT_PROJECT,
        trainable=False,
    )
    checkpoint = NewCheckpoint(
        key=key,
        owner=call.owner,
        base_model=facts.name,
        lora=adoption.lora,
        optimizer_config=optimizer,
        size_bytes=size,
        request_id=key.run_id,
    )
    call.store.checkpoints.save(
        checkpoint,
        most_bytes=call.services.config.max_checkpoint_bytes,
        event=audit.done(call, "checkpoint_import", key),
        run=run,
    )


def _run_id(call: Call, base_model: str, name: str) -> str:
    """The same idempotency key means the same run for the same request, so that nothing is imported twice."""
    key = call.request.headers.get("x-idempotency-key") or secrets.token_hex()
    # As JSON, in which nothing else makes the same text.
    return f"import-{hashlib.sha256(json.encode([call.owner, key, base_model, name])).hexdigest()[:24]}"


ENDPOINTS = (Endpoint("POST", "/api/v1/import_weights", import_weights, gives=ImportWeightsResponse),)
