"""An export on its way: a tar file of which nothing exists before it is read, so that it takes up no room."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from tinsmith.errors import InvalidInputError
from tinsmith.export import NewFile
from tinsmith.wire import tar


class BrokenExportError(Exception):
    """It cannot be finished, although some of it was sent. The message says why."""


class ExportArchive:
    """All files in one folder. The size is known before; each block is made by whoever asks for it, in a thread."""

    def __init__(self, folder: str, files: Sequence[NewFile]) -> None:
        now = int(time.time())
        self._files = [(tar.head(f"{folder}/{file.name}", file.size, now), file) for file in files]
        sizes = (len(head) + file.size + len(tar.padding(file.size)) for head, file in self._files)
        self.size_bytes = sum(sizes) + len(tar.END)

    def __iter__(self) -> Iterator[bytes]:
        try:
            for head, file in self._files:
                yield head
                yield from file.blocks()
                yield tar.padding(file.size)
            yield tar.END
        except (OSError, InvalidInputError) as error:  # deleted in this moment, or a sum that does not fit its format
            raise BrokenExportError(f"it cannot be made: {error}") from error
