"""Kills a server at random moments and brings it back, as whatever starts servers on a machine would."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from tests.chaos.target import Target
from tests.chaos.troubles import Trouble

EARLY_SHARE = 0.2
"""Of the kills, those that come while the server is still starting."""
EARLY_SECONDS = 2.0
TROUBLE_SECONDS = 3.0
FIRST_TROUBLE, KILLS_PER_TROUBLE = 3, 7
KILLS_PER_REPORT = 10
KILLED = "killed: "


class Killer:
    def __init__(
        self, victim: Target, random: Random, troubles: Sequence[Trouble] = (), say: Callable[[str], None] = print
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._victim = victim
        self._random = random
        self._troubles = itertools.cycle(random.sample(troubles, len(troubles)))
        self._has_troubles = bool(troubles)
        self._say = say

    def campaign(self, kills: int) -> None:
        """So many kills, with troubles in between; at the end the server is up and nothing is wrong."""
        while self.kills < kills:
            self._pause()
            if not self._kill():
                continue
            if self.kills % KILLS_PER_REPORT == 0:
                self._say(f"{self.kills} of {kills} kills")
            if self._has_troubles and self.kills % KILLS_PER_TROUBLE == FIRST_TROUBLE:
                self._trouble(next(self._troubles))
        self._victim.bring_back()

    def _pause(self) -> None:
        if self._random.random() < EARLY_SHARE:
            time.sleep(self._random.uniform(0, EARLY_SECONDS))
        else:
            self._victim.bring_back()
            time.sleep(self._random.uniform(0, self._victim.calm_seconds))

    @property
    def kills(self) -> int:
        return sum(count for fault, count in self.counts.items() if fault.startswith(KILLED))

    def _kill(self) -> bool:
        ways = self._victim.ways
        way = self._random.choice(list(ways))
        if not self._victim.is_alive or not ways[way]():
            return False
        self.counts[KILLED + way] += 1
        self._victim.revive()
        return True

    def _trouble(self, trouble: Trouble) -> None:
        """A trouble while the server is at work, and perhaps a kill in the midst of it."""
        self._victim.bring_back()
        time.sleep(self._random.uniform(0, TROUBLE_SECONDS))
        self.counts[trouble.name] += 1
        trouble.begin()
        time.sleep(self._random.uniform(0, TROUBLE_SECONDS))
        if self._random.random() < 0.5:
            self._kill()
        time.sleep(self._random.uniform(0, TROUBLE_SECONDS))
        trouble.end()
