"""Checkpoints on their way to other tools, and adapters on their way from them: both as tar, in constant memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path, PurePosixPath

from tinsmith.client.connection import Call, Connection
from tinsmith.client.download import safe_path
from tinsmith.errors import APIConnectionError, InvalidInputError, NotFoundError, UnsupportedByServerError
from tinsmith.wire import tar

OnBytes = Callable[[str, int, int | None], None]
"""Hears which file is being written, how many bytes have arrived, and how many there will be."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
SLOWEST_BYTES_PER_SECOND = 256 * 1024
"""How fast an upload must be at least to be in time."""

_PIECE_BYTES = 2**20
_MISSING = "There is no checkpoint"
"""How our server's answer begins; one that has no such endpoint says something else."""


async def receive_export(
    connection: Connection, call: Call, folder: Path, on_bytes: OnBytes | None = None
) -> list[Path]:
    """Fills the folder with the files of an export that the server makes."""
    try:
        async with connection.read(call) as (response, pieces):
            length = response.headers.get("content-length") or ""
            total = int(length) if length.isdigit() else None

            def report(name: str, done: int) -> None:
                if on_bytes is not None:
                    on_bytes(name, done, total)

            return [path async for path in _unpack(pieces, folder, report)]
    except NotFoundError as error:
        if _MISSING in str(error):
            raise
        raise UnsupportedByServerError(f"The server at {connection.config.base_url} makes no exports.") from error


async def _unpack(
    pieces: AsyncIterator[bytes], folder: Path, report: Callable[[str, int], None]
) -> AsyncIterator[Path]:
    done = 0
    try:
        async for entry in tar.entries(pieces):
            name = "/".join(PurePosixPath(entry.name).parts[1:])  # all files are in one folder
            path = safe_path(folder, name)
            await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
            with await asyncio.to_thread(path.open, "wb") as file:
                async for piece in entry.content():
                    done += len(piece)
                    await asyncio.to_thread(file.write, piece)
                    report(name, done)
            yield path
    except InvalidInputError as error:
        raise APIConnectionError(message=f"The export broke off: {error} The server's log says why.") from error


class AdapterUpload:
    """The two files of a PEFT adapter as the body of a request, which may be sent more than once."""

    def __init__(self, folder: Path) -> None:
        self._files = [folder / name for name in ADAPTER_FILES]
        if missing := [file.name for file in self._files if not file.is_file()]:
            raise InvalidInputError(
                f"{folder} lacks {' and '.join(missing)}. Give a folder that peft's save_pretrained has written.",
                field="folder",
                value=str(folder),
            )

    @property
    def num_bytes(self) -> int:
        """Of the body."""
        sizes = [file.stat().st_size for file in self._files]
        return sum(len(tar.head("", 0)) + size + len(tar.padding(size)) for size in sizes) + len(tar.END)

    async def pieces(self) -> AsyncIterator[bytes]:
        for file in self._files:
            size = file.stat().st_size
            yield tar.head(file.name, size)
            with await asyncio.to_thread(file.open, "rb") as opened:
                while piece := await asyncio.to_thread(opened.read, _PIECE_BYTES):
                    yield piece
            yield tar.padding(size)
        yield tar.END
