"""Checkpoints in the forms that other tools load, made from the server's own base models while they are sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse

from tinsmith.errors import APIStatusError, MissingExtraError
from tinsmith.export import FORMS, PEFT, Adapter, BaseModel, Story, export_files
from tinsmith.server import audit
from tinsmith.server.checkpoints import link_files
from tinsmith.server.checks import check_base_of, refuse
from tinsmith.server.embedded import is_unpacked
from tinsmith.server.engine.adapter_facts import check_sound
from tinsmith.server.engine.damage import DamagedError
from tinsmith.server.exporting import ExportArchive
from tinsmith.server.routes._call import Call, Endpoint, identified, status_error
from tinsmith.server.routes._download import Download
from tinsmith.server.routes._found import CHECKPOINT, checkpoint_at, key_in_path
from tinsmith.server.store.records import Checkpoint
from tinsmith.wire import tar


async def export_checkpoint(call: Call) -> Response:
    """A checkpoint as a PEFT adapter, a merged model or GGUF (`to`: peft, merged, gguf), as a tar file."""
    checkpoint = await checkpoint_at(call, key_in_path(call).tinker_path)
    form = call.request.query_params.get("to", "")
    if form not in FORMS:
        raise refuse("to", f"is {form!r}; checkpoints are exported to {', '.join(FORMS)}", form)
    call.services.paperwork.charge(call.owner, 0)

    async def may_read() -> bool:
        try:
            await identified(call.request, call.services)
        except APIStatusError:
            return False
        return True

    with ExitStack() as held:
        held.enter_context(call.services.open_requests.one_more(call.owner))
        conversion = held.enter_context(ExitStack())
        conversion.enter_context(call.services.conversions.one_more(call.owner))
        archive = await call.filed(_archive, call, checkpoint, form, held)
        await call.stored(call.store.audit.record, audit.done(call, "checkpoint_download", checkpoint.key, to=form))
        length = {"content-length": str(archive.size_bytes)}
        answer = StreamingResponse(_blocks(archive, conversion), headers=length, media_type=tar.CONTENT_TYPE)
        return Download(answer, may_read, held.pop_all(), call.owner)


def _archive(call: Call, checkpoint: Checkpoint, form: str, held: ExitStack) -> ExportArchive:
    """Whatever is wrong with it is found here, before anything is sent."""
    path = checkpoint.key.tinker_path
    models = call.services.models
    # An adapter is exported without its base, which need not be served any more.
    facts = models.get(checkpoint.base_model) if form == PEFT else check_base_of(checkpoint, models)
    data_note = call.request.query_params.get("data_note", "")
    story = Story(checkpoint.base_model, path, data_note, facts is not None and is_unpacked(facts.folder))
    try:
        folder = _kept(call, checkpoint, held)
        check_sound(folder)
        base = None if form == PEFT or facts is None else BaseModel(facts.folder, facts.name)
        files = export_files(form, Adapter(folder), base, story)
    except FileNotFoundError:  # deleted, withdrawn or replaced in this moment
        raise status_error(404, f"There is no checkpoint {path}.") from None
    except DamagedError as error:
        raise refuse("checkpoint", f"{path} is damaged on the server's disk: {error}") from None
    except MissingExtraError as error:
        raise refuse("to", f"is {form!r}, which this server cannot write: {error}", form) from None
    return ExportArchive(checkpoint.key.name, files)


def _kept(call: Call, checkpoint: Checkpoint, held: ExitStack) -> Path:
    """The files as they are now, until all is sent: another checkpoint may be saved in their place meanwhile."""
    folders, path = call.services.folders, checkpoint.key.tinker_path
    files = folders.files(path)
    if not files:
        raise FileNotFoundError(path)
    scratch = folders.make_scratch(path)
    held.callback(call.services.filing.submit, folders.remove_scratch, scratch)
    link_files(files, scratch)
    if not call.store.checkpoints.is_still(checkpoint, call.owner):
        raise FileNotFoundError(path)
    return scratch


async def _blocks(archive: ExportArchive, conversion: ExitStack) -> AsyncIterator[bytes]:
    """The conversion is over when the last block is made: whoever has read that may ask for another one at once."""
    left = archive.size_bytes
    async for block in iterate_in_threadpool(archive):
        left -= len(block)
        if not left:
            conversion.close()
        yield block


ENDPOINTS = (Endpoint("GET", f"{CHECKPOINT}/export", export_checkpoint),)
