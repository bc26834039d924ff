"""The worker's part of streaming: after every step, what is new of the samples that somebody watches.

Whoever does not ask for it pays nothing: nobody else's samples are looked at. What is drawn in the last step of a
request is not told, for its result has all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tinsmith.server.engine.generate import Generator
from tinsmith.server.engine.running import SampleWork
from tinsmith.server.messages import Drawn


class TokenNews:
    def __init__(self, generator: Generator, tell: Callable[[Sequence[Drawn]], None]) -> None:
        self._generator = generator
        self._tell = tell
        self._told: dict[str, list[int]] = {}
        """By request, how many tokens of each sample."""

    def begin(self, request_id: str, work: SampleWork) -> None:
        if work.is_streamed:
            self._told[request_id] = [0] * work.num_samples

    def end(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._told.pop(request_id, None)

    def look(self) -> None:
        """To be called after a step."""
        drawn = [each for request_id, told in self._told.items() for each in self._new(request_id, told)]
        if drawn:
            self._tell(drawn)

    def _new(self, request_id: str, told: list[int]) -> Iterator[Drawn]:
        for sample in self._generator.samples(request_id):
            start = told[sample.index]
            if start < len(sample.tokens):
                told[sample.index] = len(sample.tokens)
                yield Drawn(
                    request_id,
                    sample.index,
                    start,
                    sample.tokens[start:],
                    sample.logprobs[start:],
                    sample.topk[start:],
                )
