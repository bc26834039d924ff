"""Several files in one body: tar, without compression, piece by piece.

Files are written in the form that every tar reads, with sizes and names of any length. What is read may come from
anybody, so nothing is believed, and nothing but the name of a file is held in memory.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterable, AsyncIterator

from tinsmith.errors import InvalidInputError

CONTENT_TYPE = "application/x-tar"
END = bytes(2 * tarfile.BLOCKSIZE)

_LONGEST_NAME = 4096
_LONG_NAME = tarfile.GNUTYPE_LONGNAME
_ATTRIBUTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


def head(name: str, size: int, modified: int = 0) -> bytes:
    """What is written before the content of a file."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = size, modified
    return entry.tobuf(tarfile.GNU_FORMAT)


def padding(size: int) -> bytes:
    """What is written after it."""
    return bytes(-size % tarfile.BLOCKSIZE)


class Entry:
    """A file in a body that is being read. Its content must be read before the next one is asked for."""

    def __init__(self, name: str, size: int, source: _Source) -> None:
        self.name = name
        self.size = size
        self._source = source

    async def content(self) -> AsyncIterator[bytes]:
        async for piece in self._source.take(self.size):
            yield piece
        await self._source.skip(-self.size % tarfile.BLOCKSIZE)


async def entries(pieces: AsyncIterable[bytes]) -> AsyncIterator[Entry]:
    """The files of a body, in the order in which they come."""
    source, long_name = _Source(pieces), None
    while any(block := await source.exactly(tarfile.BLOCKSIZE)):
        info = _parsed(block)
        padded = info.size + -info.size % tarfile.BLOCKSIZE
        if info.type == _LONG_NAME and info.size <= _LONGEST_NAME:
            long_name = (await source.exactly(padded))[: info.size].rstrip(b"\0").decode("utf-8", "replace")
        elif info.type in _ATTRIBUTES:
            await source.skip(padded)
        elif info.isreg():
            yield Entry(long_name or info.name, info.size, source)
            long_name = None
        elif info.isdir():
            long_name = None
        else:
            raise InvalidInputError(
                f"The tar holds {info.name[:100]!r}, which is no plain file. Send files only.", field="body"
            )


def _parsed(block: bytes) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError as error:
        raise InvalidInputError(f"The body is no tar: {error}. Send it without compression.", field="body") from None
    if info.size < 0:
        raise InvalidInputError(f"The tar holds a file of {info.size} bytes.", field="body")
    return info


class _Source:
    """Pieces of any length, taken in lengths that are asked for."""

    def __init__(self, pieces: AsyncIterable[bytes]) -> None:
        self._pieces = aiter(pieces)
        self._rest = b""

    async def take(self, size: int) -> AsyncIterator[bytes]:
        while size:
            if not self._rest:
                self._rest = await self._next()
            piece, self._rest = self._rest[:size], self._rest[size:]
            size -= len(piece)
            if piece:
                yield piece

    async def _next(self) -> bytes:
        piece = await anext(self._pieces, None)
        if piece is None:
            raise InvalidInputError("The tar ends too early. Send it again.", field="body")
        return piece

    async def exactly(self, size: int) -> bytes:
        return b"".join([piece async for piece in self.take(size)])

    async def skip(self, size: int) -> None:
        async for _ in self.take(size):
            pass
