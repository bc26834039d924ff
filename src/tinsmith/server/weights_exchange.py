"""How the weights of samplers that were made from a model come from its trainer to the sampler replicas.

The trainer publishes a copy once: it is put where all replicas can read it (`put`), and what stands for it there is
handed to whoever asks. What is not there, because it was let go, because the trainer is a new one, or because somebody
wants a model as it is just now, is made by the trainer between two of its steps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

from tinsmith.server.engine.adapter_files import PackedAdapter, pack
from tinsmith.server.engine.adapters import FrozenAdapter

MAX_PUBLISHED = 64
"""How many copies the trainer keeps where replicas can read them."""


class WeightsWanted(NamedTuple):
    """The weights of a sampler; or, with `model_id`, those of this model after the operation `at_least` or later."""

    sampler_id: str
    owner: str
    model_id: str | None = None
    at_least: int = -1

    @property
    def name(self) -> str:
        return self.model_id or self.sampler_id


class Parcel(NamedTuple):
    """`weights` stands for a `PackedAdapter`, as `put` has made it."""

    weights: Any
    seq_id: int = -1
    """Of those of a model as it was: the last operation that is in them."""


class Refusal(NamedTuple):
    """There will be none. The message is for the client of the sampler; `is_lost` if it is no fault of theirs."""

    message: str
    is_lost: bool


Answer: TypeAlias = Parcel | Refusal


class AskedTrainer(NamedTuple):
    """For a replica: how it asks, and what is to be called, from any thread, when an answer comes late.

    A parcel has the weights themselves; an error in place of an answer means that the trainer is away.
    """

    ask: Callable[[WeightsWanted], Future[Answer]]
    ring: Callable[[], None]


class _Published(NamedTuple):
    parcel: Parcel
    frozen: FrozenAdapter


class PublishedWeights:
    """`ask` may be called from any thread; `ring` is called there if the trainer has something to make."""

    def __init__(self, put: Callable[[PackedAdapter], Any], ring: Callable[[], None]) -> None:
        self._put = put
        self._ring = ring
        self._published: OrderedDict[str, _Published] = OrderedDict()
        self._wanted: dict[WeightsWanted, list[Future[Answer]]] = {}
        self._lock = threading.Lock()

    def ask(self, wanted: WeightsWanted) -> Future[Answer]:
        answer: Future[Answer] = Future()
        with self._lock:
            found = self._published.get(wanted.name)
            if found is None or found.parcel.seq_id < wanted.at_least:
                self._wanted.setdefault(wanted, []).append(answer)
            else:
                self._published.move_to_end(wanted.name)
                answer.set_result(found.parcel)
        if not answer.done():
            self._ring()
        return answer

    # For the trainer, on its own thread

    def wanted(self) -> list[WeightsWanted]:
        with self._lock:
            return list(self._wanted)

    def publish(self, name: str, frozen: FrozenAdapter, seq_id: int = -1) -> None:
        """Those of a sampler, or of a model after this operation. What was put before is not put again."""
        before = self._published.get(name)
        same = before is not None and before.frozen is frozen
        weights = before.parcel.weights if same and before is not None else self._put(pack(frozen))
        parcel = Parcel(weights, seq_id)
        with self._lock:
            self._published[name] = _Published(parcel, frozen)
            self._published.move_to_end(name)
            while len(self._published) > MAX_PUBLISHED:
                self._published.popitem(last=False)
            content = [wanted for wanted in self._wanted if wanted.name == name and wanted.at_least <= seq_id]
            answers = [answer for wanted in content for answer in self._wanted.pop(wanted)]
        for answer in answers:
            answer.set_result(parcel)

    def refuse(self, wanted: WeightsWanted, refusal: Refusal) -> None:
        with self._lock:
            answers = self._wanted.pop(wanted, [])
        for answer in answers:
            answer.set_result(refusal)
