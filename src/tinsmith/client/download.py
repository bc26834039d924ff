"""Downloads the files of an exported checkpoint: resumable, in constant memory, with progress.

A file is written to `NAME.part` and renamed when it is whole, so what is there under its own name is complete. A broken
download goes on where it stopped when it is called again. A note in the folder says which checkpoint it belongs to, so
that the files of two checkpoints are never mixed.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tinsmith.client.connection import Connection
from tinsmith.client.retry import Retry, with_retries
from tinsmith.client.transport import HttpResponse
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    InvalidInputError,
    PermissionDeniedError,
    ResponseSummary,
)
from tinsmith.types import ExternalWeightsUrlsResponse

RENEW_BEFORE_EXPIRY_SECONDS = 300.0
PARTIAL_CONTENT = 206
RANGE_NOT_SATISFIABLE = 416
NOTE = ".tinker_path"
PART = ".part"


class Progress(NamedTuple):
    """How far a download is; given to the progress callback after every piece."""

    file: str
    file_bytes: int
    file_total_bytes: int | None
    files_done: int
    files_total: int


ProgressCallback = Callable[[Progress], None]
Report = Callable[[int, int | None], None]
GetUrls = Callable[[], Awaitable[ExternalWeightsUrlsResponse]]


async def download_files(
    connection: Connection,
    get_urls: GetUrls,
    folder: Path,
    *,
    label: str,
    on_progress: ProgressCallback | None = None,
    keep_parts: bool = True,
) -> list[Path]:
    """Fetches every file that is not there yet. `label` names the checkpoint, `get_urls` signs links to its files.

    Without `keep_parts` a file that was begun in an earlier call is fetched anew, because the bytes may have changed.
    """
    links = _Links(get_urls)
    names = sorted((await links.signed()).urls)
    targets = [safe_path(folder, name) for name in names]
    await asyncio.to_thread(_claim, folder, label, targets, keep_parts)
    for done, (name, target) in enumerate(zip(names, targets, strict=True)):
        if not await asyncio.to_thread(target.exists):
            report = functools.partial(_report, on_progress, name, done, len(names))
            await _download(connection, links, name, target, report)
    return targets


def _report(
    on_progress: ProgressCallback | None, name: str, done: int, files: int, size: int, total: int | None
) -> None:
    if on_progress is not None:
        on_progress(Progress(name, size, total, done, files))


class _Links:
    """Signed links that are renewed before they expire, and when a server no longer takes them."""

    def __init__(self, get_urls: GetUrls) -> None:
        self._get_urls = get_urls
        self._signed: ExternalWeightsUrlsResponse | None = None

    async def signed(self) -> ExternalWeightsUrlsResponse:
        if self._signed is None or self._signed.expires.timestamp() - time.time() < RENEW_BEFORE_EXPIRY_SECONDS:
            self._signed = await self._get_urls()
        return self._signed

    async def to(self, name: str) -> str:
        url = (await self.signed()).urls.get(name)
        if url is None:
            message = f"The server no longer lists {name!r} among the files of this checkpoint."
            raise APIResponseValidationError(ResponseSummary(200, {}), None, message)
        return url

    def forget(self) -> None:
        self._signed = None


async def _download(connection: Connection, links: _Links, name: str, target: Path, report: Report) -> None:
    part = target.with_name(target.name + PART)
    refusals = 0

    async def attempt(number: int) -> None:
        nonlocal refusals
        try:
            await _continue(connection, await links.to(name), part, report)
        except PermissionDeniedError as error:
            refusals += 1
            if refusals > 1:
                raise
            links.forget()  # storage says 403 to a link that has expired by its own clock
            raise APIConnectionError(
                error.request, f"The link to {name} is no longer good; asking for another."
            ) from error

    def observe(number: int, elapsed: float, outcome: Exception | None, pause: float | None) -> None:
        if isinstance(outcome, Exception) and pause is not None:
            connection.tell_pause(outcome, pause)

    await with_retries(attempt, Retry(connection.retry_policy()), observe)
    await asyncio.to_thread(os.replace, part, target)


async def _continue(connection: Connection, url: str, part: Path, report: Report) -> None:
    have = await asyncio.to_thread(_size, part)
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        async with connection.download(url, headers) as (response, pieces):
            if response.status != PARTIAL_CONTENT:
                have = 0  # the server sends the whole file
            elif not (response.headers.get("content-range") or "").startswith(f"bytes {have}-"):
                raise await _start_again(part)
            total = _total(response, have)
            with await asyncio.to_thread(part.open, "ab" if have else "wb") as file:
                async for piece in pieces:
                    have += len(piece)
                    await asyncio.to_thread(_write, file.write, piece, report, have, total)
    except APIStatusError as error:
        if error.status_code != RANGE_NOT_SATISFIABLE:
            raise
        if error.response.headers.get("content-range") == f"bytes */{have}":
            return  # it was whole already
        raise await _start_again(part) from error
    if total is not None and have != total:
        raise APIConnectionError(message=f"{part.name} ended after {have} of {total} bytes.")


async def _start_again(part: Path) -> APIConnectionError:
    """What is there is not a beginning of this file."""
    await asyncio.to_thread(part.unlink, missing_ok=True)
    return APIConnectionError(message=f"{part.name} cannot be continued; starting it again.")


def _write(write: Callable[[bytes], object], piece: bytes, report: Report, have: int, total: int | None) -> None:
    """On a worker thread, as is the user's callback: neither may hold up the loop."""
    write(piece)
    report(have, total)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _total(response: HttpResponse, have: int) -> int | None:
    length = response.headers.get("content-length")
    return have + int(length) if length is not None and length.isdigit() else None


def _claim(folder: Path, label: str, targets: list[Path], keep_parts: bool) -> None:
    """Makes the folder and notes whose it is; refuses one that holds files of something else."""
    note = folder / NOTE
    owner = note.read_text(encoding="utf-8") if note.exists() else None
    taken = [target for target in targets if target.exists()] if owner is None else []
    if taken or owner not in (None, label):
        what = owner if owner is not None else f"a file {taken[0].name!r} of unknown origin"
        raise InvalidInputError(
            f"{folder} holds {what}, which files of {label} would mix with. Choose another folder, or empty this one.",
            field="folder",
            value=str(folder),
        )
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        if owner is None or not keep_parts:
            target.with_name(target.name + PART).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(label, encoding="utf-8")


def safe_path(folder: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name or "\\" in name or "\0" in name:
        raise InvalidInputError(
            f"The server names a file {name!r}, which would be written outside the folder. Nothing was downloaded.",
            field="urls",
            value=name,
        )
    return folder.joinpath(*path.parts)
