"""Downloads the files of an exported checkpoint: resumable, in constant memory, with progress.

A file is written to `NAME.part` and renamed when it is whole, so what is there under its own name is complete. A broken
download goes on where it stopped when it is called again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tinsmith.client.connection import Connection
from tinsmith.client.retry import Retry, with_retries
from tinsmith.client.transport import HttpResponse
from tinsmith.errors import APIConnectionError, APIStatusError, InvalidInputError
from tinsmith.types import ExternalWeightsUrlsResponse

RENEW_BEFORE_EXPIRY_SECONDS = 300.0
RANGE_NOT_SATISFIABLE = 416


class Progress(NamedTuple):
    """How far a download is; given to the progress callback after every piece."""

    file: str
    file_bytes: int
    file_total_bytes: int | None
    files_done: int
    files_total: int


ProgressCallback = Callable[[Progress], None]


async def download_files(
    connection: Connection,
    get_urls: Callable[[], Awaitable[ExternalWeightsUrlsResponse]],
    folder: Path,
    on_progress: ProgressCallback | None = None,
) -> list[Path]:
    """Fetches every file that is not there yet. `get_urls` is asked again when the links are about to expire."""
    signed = await get_urls()
    names = sorted(signed.urls)
    targets = [_safe_path(folder, name) for name in names]
    for done, (name, target) in enumerate(zip(names, targets, strict=True)):
        if target.exists():
            continue
        if signed.expires.timestamp() - time.time() < RENEW_BEFORE_EXPIRY_SECONDS:
            signed = await get_urls()

        def report(size: int, total: int | None, name: str = name, done: int = done) -> None:
            if on_progress is not None:
                on_progress(Progress(name, size, total, done, len(names)))

        await _download(connection, signed.urls[name], target, report)
    return targets


async def _download(
    connection: Connection, url: str, target: Path, report: Callable[[int, int | None], None]
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")

    async def attempt(number: int) -> None:
        await _continue(connection, url, part, report)

    def observe(number: int, elapsed: float, outcome: None | Exception, pause: float | None) -> None:
        if isinstance(outcome, Exception) and pause is not None:
            connection.tell_pause(outcome, pause)

    await with_retries(attempt, Retry(connection.retry_policy()), observe)
    os.replace(part, target)


async def _continue(
    connection: Connection, url: str, part: Path, report: Callable[[int, int | None], None]
) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        async with connection.download(url, headers) as (response, pieces):
            if have and response.status != 206:
                have = 0  # the server sends the whole file again
            total = _total(response, have)
            with part.open("ab" if have else "wb") as file:
                async for piece in pieces:
                    await asyncio.to_thread(file.write, piece)
                    have += len(piece)
                    report(have, total)
    except APIStatusError as error:
        if error.status_code != RANGE_NOT_SATISFIABLE:
            raise
        with contextlib.suppress(FileNotFoundError):  # what is there is not a beginning of this file
            part.unlink()
        raise APIConnectionError(error.request, f"{part.name} cannot be continued; starting it again.") from error
    if total is not None and have != total:
        raise APIConnectionError(message=f"{part.name} ended after {have} of {total} bytes.")


def _total(response: HttpResponse, have: int) -> int | None:
    length = response.headers.get("content-length")
    return have + int(length) if length is not None and length.isdigit() else None


def _safe_path(folder: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name or "\\" in name or "\0" in name:
        raise InvalidInputError(
            f"The server names a file {name!r}, which would be written outside the folder. Nothing was downloaded.",
            field="urls",
            value=name,
        )
    return folder.joinpath(*path.parts)
