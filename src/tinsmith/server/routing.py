"""Which sampler replica draws a sample: the one that has most of its prompt in its cache, unless it is far busier.

A replica that has drawn a sample holds its adapter, and keys and values of its prompt. Nobody asks the replicas what
they hold: the router remembers what it sent where, so it may be wrong, and a wrong guess costs a transfer or a prefill.
What it remembers is bounded, and the longest unused goes first, as in the caches themselves.

Everything follows from the calls and their order: no clock, no random numbers. A choice looks at the load of every
replica, and at the blocks of those that hold the adapter.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

BLOCK_TOKENS = 64
"""Prompts are compared in pieces of this length, a multiple of the blocks of the cache itself."""
MAX_COMPARED_BLOCKS = 256
"""Prompts that are alike for so long are alike; a prompt of any length costs no more than this."""
MAX_KNOWN_BLOCKS = 4096
"""How many pieces the router remembers of each replica, about 130 bytes each; a prompt has one more for its adapter."""

SLACK_SAMPLES = 32
SLACK_SHARE = 0.25
"""How much busier than the least busy replica one may be and still get a sample for what it holds of its prompt, in
samples that are not done yet: whichever of the two is more. A decode step of 32 samples more takes hardly longer, as it
reads the same weights; a prefill that is done twice takes as long as some hundred tokens."""
ADAPTER_SLACK_SAMPLES = 4
"""The same for the adapter alone, which most replicas were sent: enough to keep few samples of one adapter together."""


class Candidate(NamedTuple):
    replica: str
    held: int
    """Pieces of this prompt that it is known to hold, from the first one on; the adapter counts as one."""
    load: int
    """Samples it was given that are not done."""


def pick(candidates: Iterable[Candidate]) -> str:
    """Of those not much busier than the least busy one: who holds most, then who has least to do, then the first."""
    candidates = tuple(candidates)
    least = min(each.load for each in candidates)
    able = (each for each in candidates if each.load <= most_load(least, each.held))
    return min(able, key=lambda each: (-each.held, each.load)).replica


def most_load(least: int, held: int) -> float:
    """Up to here a replica gets samples for what it holds, where the least busy one has `least`."""
    if held < 2:
        return least + ADAPTER_SLACK_SAMPLES * held
    return least + max(SLACK_SAMPLES, SLACK_SHARE * least)


def prefix_keys(owner: str, adapter: str | None, prompt: Sequence[int]) -> list[int]:
    """One for the adapter, then one for each full piece of the prompt: a hash of everything up to its end.

    Caches are not shared between owners, who could learn from a fast answer what another one asked.
    """
    whose = f"{owner}\0{adapter or ''}".encode()
    state = hashlib.blake2b(whose, digest_size=8)
    tokens = np.asarray(prompt[: BLOCK_TOKENS * MAX_COMPARED_BLOCKS], np.int64)
    keys = [int.from_bytes(state.digest(), "big")]
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        state.update(tokens[start : start + BLOCK_TOKENS].tobytes())
        keys.append(int.from_bytes(state.digest(), "big"))
    return keys


class Router:
    """Keeps count of what the replicas of one base model hold and have to do. Not thread-safe: one loop calls it.

    came(replica)       it can be chosen from now on, and holds nothing yet
    choose(request...)  the replica for a request, which counts as its load until
    part_of(replica...) which requests a replica that has less to do than others takes over from them
    move(request...)    it was given to another replica
    done(request)       the request ended there, however it ended
    gone(replica)       it is not chosen any more; gives back the requests that must be chosen for again
    """

    def __init__(self, max_known_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        self._max_known_blocks = max_known_blocks
        self._known: dict[str, OrderedDict[int, None]] = {}
        """Of each living replica the keys it holds, the longest unused first."""
        self._holders: dict[int, dict[str, None]] = {}
        """Who holds an adapter, by its key: all others hold nothing of a prompt."""
        self._loads: dict[str, int] = {}
        self._underway: dict[str, tuple[str, int]] = {}
        """Where each request is, with how many samples."""
        self._underway_before = set[str]()

    @property
    def loads(self) -> Mapping[str, int]:
        """Samples that are not done, by living replica."""
        return self._loads

    def long_underway(self) -> set[str]:
        """The requests that were underway at the last call, too: somebody should look whether they are."""
        before, self._underway_before = self._underway_before, {*self._underway}
        return before & self._underway_before

    @property
    def num_known_blocks(self) -> int:
        return sum(map(len, self._known.values()))

    def came(self, replica: str) -> None:
        """One that is there already stays as it is. One that restarted holds nothing: it is gone, and comes again."""
        self._known.setdefault(replica, OrderedDict())
        self._loads.setdefault(replica, 0)

    def gone(self, replica: str) -> list[str]:
        """The requests that were underway there, in the order in which they were sent."""
        for key in self._known.pop(replica, ()):
            self._forget_holder(key, replica)
        self._loads.pop(replica, None)
        lost = [request_id for request_id, (where, _) in self._underway.items() if where == replica]
        for request_id in lost:
            del self._underway[request_id]
        return lost

    def choose(
        self, request_id: str, owner: str, adapter: str | None, prompt: Sequence[int], samples: int = 1
    ) -> str | None:
        """The replica for this request, which it is now underway to; None if there is no replica.

        `adapter` names weights that never change: new weights have a new name. None is the base model. A request that
        is chosen for again, to be tried elsewhere, has left the replica where it was.
        """
        self.done(request_id)
        if not self._known:
            return None
        keys = prefix_keys(owner, adapter, prompt)[: self._max_known_blocks]
        replicas = {**self._holders.get(keys[0], {}), self._least_busy(keys[0]): None}
        replica = pick(Candidate(name, _num_held(keys, self._known[name]), self._loads[name]) for name in replicas)
        self._remember(replica, keys)
        self._loads[replica] += samples
        self._underway[request_id] = replica, samples
        return replica

    def where(self, request_id: str) -> str | None:
        """The replica that this request is underway to."""
        return self._underway[request_id][0] if request_id in self._underway else None

    def busier(self, replica: str) -> list[str]:
        """Who has more than this one should have, if it has less; nobody if it is not there."""
        if replica not in self._loads or self._loads[replica] >= self._part:
            return []
        return [other for other, load in self._loads.items() if load > self._part]

    def part_of(self, replica: str, requests: Iterable[str]) -> list[str]:
        """Which of these it takes over, so that nobody has more than another because of it."""
        loads, part, taken = Counter(self._loads), self._part, []
        for request_id in requests:
            where, samples = self._underway.get(request_id, (replica, 0))
            if where == replica or loads[where] - samples < part or loads[replica] + samples > part:
                continue
            taken.append(request_id)
            loads.update({where: -samples, replica: samples})
        return taken

    @property
    def _part(self) -> int:
        return sum(self._loads.values()) // len(self._loads)

    def move(self, request_id: str, replica: str) -> None:
        """It is underway to this replica from now on; nothing happens if either is gone."""
        if request_id in self._underway and replica in self._loads:
            _, samples = self._underway[request_id]
            self.done(request_id)
            self._loads[replica] += samples
            self._underway[request_id] = replica, samples

    def done(self, request_id: str) -> None:
        """Nothing happens if it is not underway: a lost replica may still answer."""
        if (underway := self._underway.pop(request_id, None)) is not None:
            replica, samples = underway
            self._loads[replica] -= samples

    def _least_busy(self, adapter_key: int) -> str:
        """Of several, another one for another adapter: routers that do not know of each other then choose apart."""
        least = min(self._loads.values())
        replicas = [replica for replica, load in self._loads.items() if load == least]
        return replicas[adapter_key % len(replicas)]

    def _remember(self, replica: str, keys: Sequence[int]) -> None:
        """The end of a prefix is older than its beginning and forgotten before it, so what is known has no holes."""
        known = self._known[replica]
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        self._holders.setdefault(keys[0], {})[replica] = None
        while len(known) > self._max_known_blocks:
            key, _ = known.popitem(last=False)
            self._forget_holder(key, replica)

    def _forget_holder(self, key: int, replica: str) -> None:
        if (holders := self._holders.get(key)) is not None:
            del holders[replica]
            if not holders:
                del self._holders[key]


def _num_held(keys: Sequence[int], known: Mapping[int, None]) -> int:
    """How many keys are known from the first one on. There are no holes, so halving finds the first unknown one."""
    return bisect_left(keys, True, key=lambda key: key not in known)
