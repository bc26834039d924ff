"""Work that nobody waits for yet, on a stream of its own.

A large product leaves multiprocessors idle while its last tiles are computed, and so does every kernel as it ends. What
is not on the way to the next product can be done there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Self

import torch
from torch import Tensor


class _Round(NamedTuple):
    event: torch.cuda.Event
    tensors: list[Tensor]


class Aside:
    """Some rounds of such work; all of it is done before what comes after the `with`, whatever ends that.

    Tensors that the work reads are kept until the main stream has waited for it: memory that is given back earlier
    would be written by others while it is still read. `end_round` waits for the last round but one, so that two rounds
    of them are kept at most. Where there are no streams, work is done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device) if device.type == "cuda" else None
        self._tensors: list[Tensor] = []
        self._last: _Round | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end_round()
        self._wait()

    def do(self, work: Callable[..., None], *tensors: Tensor) -> None:
        """Call `work` with these, as they are now; nothing may change them before the end of the next round."""
        if self._stream is None:
            work(*tensors)
            return
        self._tensors += tensors
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work(*tensors)

    def end_round(self) -> None:
        if self._stream is not None:
            self._wait()
            self._last = _Round(self._stream.record_event(), self._tensors)
            self._tensors = []

    def _wait(self) -> None:
        if self._stream is not None and self._last is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._last.event)
            self._last = None


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: torch keeps the memory of each stream apart."""
    return torch.cuda.Stream(device)
