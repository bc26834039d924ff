"""Tokens on their way from the workers to those who watch samples being drawn.

A sample that is drawn again, because its worker died, has the same seed and so the same tokens: those that are known
are not passed on twice. Nobody waits for a reader: one that falls far behind is told so, and given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tinsmith.server.messages import Drawn

MOST_UNREAD = 4096
"""Tokens of one request that may wait for their reader, besides those that are in the buffers of the network."""
MOST_STEPS = 256
"""Of a request for many samples, each step makes so many tokens: it may be behind by so many steps at least."""


class RedrawnError(Exception):
    """A sample was drawn again, and came out differently: it followed a model that has changed meanwhile."""


class Watch:
    """Of one request, what was drawn and not taken yet.

    `news` is set when there is some, and `too_slow` when it has become too much.
    """

    def __init__(self, num_samples: int, news: asyncio.Event, too_slow: asyncio.Event) -> None:
        self._news = news
        self._too_slow = too_slow
        self._most_unread = max(MOST_UNREAD, MOST_STEPS * num_samples)
        self._known: list[list[int]] = [[] for _ in range(num_samples)]
        self._drawn: list[Drawn] = []
        self._num_unread = 0
        self._has_changed = False

    def hear(self, drawn: Drawn) -> None:
        known = self._known[drawn.index]
        num_known = len(known) - drawn.start
        if num_known < 0:
            return  # something was lost on the way; the result will have it
        if drawn.tokens[:num_known] != known[drawn.start : drawn.start + len(drawn.tokens)]:
            self._has_changed = True
        new = Drawn(
            drawn.request_id,
            drawn.index,
            len(known),
            drawn.tokens[num_known:],
            drawn.logprobs[num_known:],
            drawn.topk[num_known:],
        )
        known += new.tokens
        self._drawn.append(new)
        self._num_unread += len(new.tokens)
        self._news.set()

    def take(self) -> list[Drawn]:
        """What is new since this was last called."""
        if self._has_changed:
            raise RedrawnError
        drawn, self._drawn, self._num_unread = self._drawn, [], 0
        return drawn

    def look_at_reader(self) -> None:
        if self._num_unread > self._most_unread:
            self._too_slow.set()

    def wake(self) -> None:
        self._news.set()


class Streams:
    """The requests that are watched."""

    def __init__(self) -> None:
        self._watches: dict[str, Watch] = {}
        self.is_draining = False
        """Whether the server is about to stop, and whoever watches has to be told."""

    def __len__(self) -> int:
        return len(self._watches)

    @contextmanager
    def watching(self, request_id: str, watch: Watch) -> Iterator[None]:
        self._watches[request_id] = watch
        try:
            yield
        finally:
            del self._watches[request_id]

    def hear(self, drawn: Sequence[Drawn]) -> None:
        for each in drawn:
            if (watch := self._watches.get(each.request_id)) is not None:
                watch.hear(each)
                watch.look_at_reader()

    def drain(self) -> None:
        self.is_draining = True
        for watch in self._watches.values():
            watch.wake()
