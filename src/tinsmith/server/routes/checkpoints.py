"""Checkpoints after they were saved: listed, published, given a time to live, deleted, downloaded."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial

from starlette.responses import FileResponse, Response, StreamingResponse

from tinsmith.errors import APIStatusError
from tinsmith.server import audit
from tinsmith.server.checks import check_ttl, refuse
from tinsmith.server.routes._call import Call, Endpoint, nothing, reply, reply_plain, status_error
from tinsmith.server.routes._download import Download
from tinsmith.server.routes._found import CHECKPOINT, checkpoint_at, key_in_path
from tinsmith.server.routes._paging import page_of
from tinsmith.server.routes._shown import shown_checkpoint
from tinsmith.server.routes._signed import expiry_of_urls, owner_of_key, reader_of, signed_url
from tinsmith.server.routes.weights import expiry
from tinsmith.server.store.records import CheckpointKey
from tinsmith.types import CheckpointsListResponse, ExternalWeightsUrlsResponse, SetCheckpointTTLRequest

_ARCHIVE = "archive.tar"
_PLACES = r"(\d{1,18})-(\d{0,18})|-[1-9]\d{0,17}"
_RANGE = re.compile(rf"bytes=(?:{_PLACES})(?:, *(?:{_PLACES}))*")


async def list_checkpoints(call: Call) -> Response:
    """All checkpoints of the caller, newest first."""
    asked = page_of(call, limit=100)
    page = await call.stored(call.store.checkpoints.page, call.owner, limit=asked.limit, offset=asked.offset)
    return reply(CheckpointsListResponse(checkpoints=[*map(shown_checkpoint, page.items)], cursor=asked.cursor(page)))


async def delete_checkpoint(call: Call) -> Response:
    """Delete a checkpoint and its files. Samplers made from it keep working as long as they are loaded."""
    key = key_in_path(call)
    forget = partial(call.store.checkpoints.delete, key, call.owner, audit.done(call, "checkpoint_delete", key))
    if not await call.filed(call.services.folders.delete, key.tinker_path, forget):
        raise _missing(key)
    return nothing()


async def publish(call: Call) -> Response:
    """Let everybody with a key read a checkpoint."""
    return await _set_public(call, True)


async def unpublish(call: Call) -> Response:
    """Keep a checkpoint to oneself again."""
    return await _set_public(call, False)


async def _set_public(call: Call, public: bool) -> Response:
    """Asking for what is so already is no error: clients would repeat the request for minutes."""
    key = key_in_path(call)
    call.services.paperwork.charge(call.owner, 0)
    event = audit.done(call, "checkpoint_publish" if public else "checkpoint_unpublish", key)
    if not await call.stored(call.store.checkpoints.set_public, key, call.owner, public, event):
        raise _missing(key)
    return nothing()


async def set_ttl(call: Call) -> Response:
    """Keep a checkpoint for so many seconds from now, or for ever."""
    request = await call.read(SetCheckpointTTLRequest)
    key = key_in_path(call)
    expires = expiry(check_ttl(request.ttl_seconds))
    call.services.paperwork.charge(call.owner, 0)
    event = audit.done(call, "checkpoint_set_ttl", key, ttl_seconds=request.ttl_seconds)
    if not await call.stored(call.store.checkpoints.set_expiry, key, call.owner, expires, event):
        raise _missing(key)
    return nothing()


# --- downloads -------------------------------------------------------------------------------------------------------


async def external_weights_urls(call: Call) -> Response:
    """A signed URL for every file of an export."""
    key = key_in_path(call)
    await checkpoint_at(call, key.tinker_path)
    if key.kind != "external_weights":
        raise refuse("checkpoint", f"{key.tinker_path} is not an export; make one with save_weights_external")
    files = await call.filed(call.services.folders.files, key.tinker_path)
    expires = expiry_of_urls(call)
    call.services.paperwork.charge(call.owner, 0)
    urls = {file: signed_url(call, _file_path(key, file), expires) for file in files}
    await call.stored(call.store.audit.record, audit.done(call, "checkpoint_download", key))
    return reply(ExternalWeightsUrlsResponse(urls=urls, expires=expires))


async def archive_url(call: Call) -> Response:
    """A signed URL for all files of a checkpoint in one tar file. Only old clients ask for this."""
    key = key_in_path(call)
    await checkpoint_at(call, key.tinker_path)
    expires = expiry_of_urls(call)
    call.services.paperwork.charge(call.owner, 0)
    await call.stored(call.store.audit.record, audit.done(call, "checkpoint_download", key))
    return reply_plain({"url": signed_url(call, _file_path(key, _ARCHIVE), expires), "expires": expires})


async def download(call: Call) -> Response:
    """A file by its signed URL, as a whole or in ranges."""
    key, file = key_in_path(call), call.part("file")
    reader = await reader_of(call, _file_path(key, file))
    found = await call.stored(call.store.checkpoints.get, key, reader)
    if found is None:
        raise _missing(key)

    async def may_read() -> bool:
        return await owner_of_key(call) is not None

    with ExitStack() as held:
        held.enter_context(call.services.open_requests.one_more(reader))
        answer = await (_archive(call, key, held) if file == _ARCHIVE else _file(call, key, file))
        if not await call.stored(call.store.checkpoints.is_still, found, reader):
            raise _missing(key)  # its files may have been waited for
        return Download(answer, may_read, held.pop_all(), reader)


async def _file(call: Call, key: CheckpointKey, name: str) -> Response:
    files = await call.filed(call.services.folders.files, key.tinker_path)
    if name not in files:
        raise _missing(key)
    if (asked := call.request.headers.get("range")) is not None:
        _check_range(asked, files[name].stat().st_size)
    return FileResponse(files[name], media_type="application/octet-stream")


def _check_range(asked: str, size: int) -> None:
    if not _RANGE.fullmatch(asked):
        raise status_error(400, f"The header Range is {asked!r}; it must be such as bytes=0-1023.")
    for first, last in re.findall(_PLACES, asked):
        if first and int(first) >= size:
            raise status_error(416, f"The header Range is {asked!r}, but the file ends at {size}.")
        if first and last and int(last) < int(first):
            raise status_error(400, f"The header Range is {asked!r}, which ends before it begins.")


async def _archive(call: Call, key: CheckpointKey, held: ExitStack) -> Response:
    """With its length: a download without one can neither show progress nor be checked."""
    try:
        archive = await call.filed(call.services.folders.archive, key.tinker_path)
    except FileNotFoundError:  # deleted in this moment
        raise _missing(key) from None
    held.callback(archive.close)  # also if it is broken off, or never begins
    length = {"content-length": str(archive.size_bytes)}
    return StreamingResponse(archive, headers=length, media_type="application/x-tar")


def _file_path(key: CheckpointKey, file: str) -> str:
    return f"api/v1/files/{key.run_id}/{key.kind}/{key.name}/{file}"


def _missing(key: CheckpointKey) -> APIStatusError:
    return status_error(404, f"There is no checkpoint {key.tinker_path}.")


ENDPOINTS = (
    Endpoint("GET", "/api/v1/checkpoints", list_checkpoints, gives=CheckpointsListResponse),
    Endpoint("DELETE", CHECKPOINT, delete_checkpoint),
    Endpoint("POST", f"{CHECKPOINT}/publish", publish),
    Endpoint("DELETE", f"{CHECKPOINT}/publish", unpublish),
    Endpoint("PUT", f"{CHECKPOINT}/ttl", set_ttl, SetCheckpointTTLRequest),
    Endpoint("GET", f"{CHECKPOINT}/external_weights_urls", external_weights_urls, gives=ExternalWeightsUrlsResponse),
    Endpoint("GET", f"{CHECKPOINT}/archive", archive_url),
    Endpoint("GET", "/api/v1/files/{run_id}/{kind}/{name}/{file:path}", download, is_open=True),
)
