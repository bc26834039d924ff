"""One zstd frame whose first few bytes are known later than the rest.

The compressor's own way would be to wait with all the work until they are known. So they go into a first block of their
own, stored as it is, and the head is written last (RFC 8878, section 3.1.1). What was compressed refers to what it
repeats by the distance, so it means the same wherever it stands.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from tinsmith.errors import MissingExtraError

_CONTENT_SIZE_OF_8_BYTES = 0b11 << 6
_EMPTY_LAST_BLOCK = (1).to_bytes(3, "little")


def can_compress() -> bool:
    """Whether the optional package for this is installed."""
    return find_spec("zstandard") is not None


@dataclass(frozen=True, slots=True)
class OpenFrame:
    """A frame without its first block."""

    compressed: bytes
    content_bytes: int

    def closed(self, beginning: bytes) -> bytes:
        """The whole frame, with `beginning` as the first part of its content."""
        magic, window, blocks = self.compressed[:4], self.compressed[5:6], self.compressed[6:]
        length = struct.pack("<Q", self.content_bytes + len(beginning))
        first_block = (len(beginning) << 3).to_bytes(3, "little")
        head = (magic, bytes([_CONTENT_SIZE_OF_8_BYTES]), window, length)
        return b"".join((*head, first_block, beginning, blocks, _EMPTY_LAST_BLOCK))


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
