"""Other ways to pick a sampler, to compare the real router with: they have its calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from tinsmith.server.routing import Router


class Policy(Protocol):
    def came(self, replica: str) -> None: ...
    def choose(
        self, request_id: str, owner: str, adapter: str | None, prompt: Sequence[int], samples: int = 1
    ) -> str | None: ...
    def done(self, request_id: str) -> None: ...


class LeastLoaded:
    def __init__(self) -> None:
        self.loads: dict[str, int] = {}
        self._underway: dict[str, tuple[str, int]] = {}

    def came(self, replica: str) -> None:
        self.loads[replica] = 0

    def choose(
        self, request_id: str, owner: str, adapter: str | None, prompt: Sequence[int], samples: int = 1
    ) -> str | None:
        replica = self.pick()
        self.loads[replica] += samples
        self._underway[request_id] = replica, samples
        return replica

    def pick(self) -> str:
        return min(self.loads, key=self.loads.__getitem__)

    def done(self, request_id: str) -> None:
        replica, samples = self._underway.pop(request_id)
        self.loads[replica] -= samples


class AtRandom(LeastLoaded):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._dice = random.Random(f"routes {seed}")
        self._names: list[str] = []

    def came(self, replica: str) -> None:
        super().came(replica)
        self._names.append(replica)

    def pick(self) -> str:
        return self._dice.choice(self._names)


POLICIES: dict[str, Callable[[int], Policy]] = {
    "prefix, then load": lambda seed: Router(),
    "least loaded": lambda seed: LeastLoaded(),
    "random": AtRandom,
}
