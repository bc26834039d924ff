"""One zstd frame whose last few bytes are known later than the rest.

The compressor's own way to do this keeps its state, over a megabyte, until the end is known, and leaves the length of
the content out of the frame's head, where the usual one-shot decompressors look for it. So the end goes into a last
block of its own, stored as it is, and the head is written last (RFC 8878, section 3.1.1).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from tinsmith.errors import MissingExtraError

_CONTENT_SIZE_OF_8_BYTES = 0b11 << 6
_LAST_BLOCK = 1


def can_compress() -> bool:
    """Whether the optional package for this is installed."""
    return find_spec("zstandard") is not None


@dataclass(frozen=True, slots=True)
class OpenFrame:
    """A frame without its last block."""

    compressed: bytes
    content_bytes: int

    def closed(self, end: bytes) -> bytes:
        """The whole frame, with `end` as the last part of its content."""
        magic, window, blocks = self.compressed[:4], self.compressed[5:6], self.compressed[6:]
        length = struct.pack("<Q", self.content_bytes + len(end))
        last_block = (len(end) << 3 | _LAST_BLOCK).to_bytes(3, "little")
        return b"".join((magic, bytes([_CONTENT_SIZE_OF_8_BYTES]), window, length, blocks, last_block, end))


def open_frame(pieces: Iterable[bytes | memoryview]) -> OpenFrame:
    """Compress at the default level, piece by piece."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtraError("zstandard", "zstd", "Compressing requests") from None
    # So a frame begins with four bytes of magic, a descriptor that is zero, and one byte for the window.
    bare = zstandard.ZstdCompressor(write_content_size=False, write_checksum=False, write_dict_id=False)
    compressor = bare.compressobj()
    compressed, content_bytes = [], 0
    for piece in pieces:
        compressed.append(compressor.compress(piece))
        content_bytes += len(piece)
    compressed.append(compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    return OpenFrame(b"".join(compressed), content_bytes)
