"""Files on their way from a client to the disk, however large: in pieces, within limits, at a pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from pathlib import Path, PurePosixPath
from typing import IO

from tinsmith.errors import InvalidInputError
from tinsmith.server.full_disk import Disk, is_full
from tinsmith.server.routes._call import Call, TooLargeError, paced, status_error
from tinsmith.wire import tar

_PIECE_BYTES = 2**20
"""Written at a time, in a thread."""


async def receive_files(call: Call, folder: Path, wanted: Collection[str], limit: int) -> None:
    """Of the files in a tar body those that are wanted, by the last part of their names."""
    call.expect_type(tar.CONTENT_TYPE)
    declared = call.request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    try:
        async with paced() as have_passed:

            async def pieces() -> AsyncIterator[bytes]:
                received = 0
                async for piece in call.request.stream():
                    received += len(piece)
                    if received > limit:
                        raise _too_large(limit)
                    have_passed(len(piece))
                    yield piece

            async for entry in tar.entries(pieces()):
                name = PurePosixPath(entry.name).name
                await _save(entry, folder / name if name in wanted else None)
    except TimeoutError:
        raise status_error(408, "The body stopped, or came too slowly. Send the request again.") from None
    if missing := [name for name in wanted if not (folder / name).exists()]:
        raise InvalidInputError(f"The tar lacks {' and '.join(missing)}. Send a tar of them.", field="body")
    await call.check_again()


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"The body has more than {limit:,} bytes; no adapter for this base has.", b"")


async def _save(entry: tar.Entry, path: Path | None) -> None:
    if path is None:
        async for _ in entry.content():
            pass
        return
    disk = Disk(path.parent)
    if not disk.fits(entry.size):
        raise no_room(entry.size)
    with await asyncio.to_thread(path.open, "wb") as file:
        held = bytearray()
        async for piece in entry.content():
            held += piece
            if len(held) >= _PIECE_BYTES:
                await asyncio.to_thread(_write, file, bytes(held))
                held.clear()
        await asyncio.to_thread(_write, file, bytes(held))


def _write(file: IO[bytes], data: bytes) -> None:
    try:
        file.write(data)
        file.flush()
    except OSError as error:
        if is_full(error):
            raise no_room(len(data)) from error
        raise


def no_room(size: int) -> InvalidInputError:
    """Not an answer to come again: all would be sent once more, only to be told the same."""
    return InvalidInputError(
        f"The server's disk has no room for {size:,} bytes more. Ask whoever runs it to make some, and try again.",
        field="body",
    )
