"""How the weights of samplers that were made from a model come from its trainer to the sampler replicas.

The trainer puts a copy where all replicas can read it, once, and sends what stands for it there to all of them: when
the first sample comes, the weights are at hand. A replica that lacks them, because it came later or had let them go,
asks, and gets the same. What the trainer lacks as well, because it is a new one, or because somebody wants a model as
it is just now, it makes between two of its steps.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:  # who only passes parcels on does not load torch
    from tinsmith.server.engine.adapter_files import PackedAdapter
    from tinsmith.server.engine.adapters import FrozenAdapter

log = logging.getLogger(__name__)

MAX_PUBLISHED = 64
"""How many copies the trainer keeps where replicas can read them."""
MAX_UNUSED = 32
MAX_UNUSED_BYTES = 2**30
"""What a replica keeps of weights that it was sent and has not used yet; of more, the oldest go."""


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
    """`weights` stands for a `PackedAdapter`, as `put` has made it; with a replica, it is one."""

    name: str
    weights: Any
    seq_id: int = -1
    """Of those of a model as it was: the last operation that is in them."""


class Refusal(NamedTuple):
    """There will be none. The message is for the client of the sampler; `is_lost` if it is no fault of theirs."""

    message: str
    is_lost: bool


class NotYet(NamedTuple):
    """They have to wait for something; whoever wants them asks again, and tells the reason meanwhile."""

    reason: str


Answer: TypeAlias = Parcel | Refusal | NotYet


class _Published(NamedTuple):
    parcel: Parcel
    frozen: weakref.ref[FrozenAdapter]
    """What it was made from, which may be gone: who trains has no room for all of them."""


class PublishedWeights:
    """The trainer's end. `put` packs weights, puts them where replicas can read them and gives back what stands for
    them; `send` brings such a parcel to all replicas. Both are called in a thread of their own: training goes on.

    `ask` may be called from any thread; `ring` is called there if the trainer has something to make.
    """

    def __init__(
        self, put: Callable[[FrozenAdapter], Any], send: Callable[[Parcel], None], ring: Callable[[], None]
    ) -> None:
        self._put = put
        self._send = send
        self._ring = ring
        self._published: OrderedDict[str, _Published] = OrderedDict()
        self._wanted: dict[WeightsWanted, list[Future[Answer]]] = {}
        self._lock = threading.Lock()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="weights")

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
        """Those of a sampler, or of a model after this operation. They leave at once, before who waits is told."""
        with self._lock:
            content = [wanted for wanted in self._wanted if wanted.name == name and wanted.at_least <= seq_id]
            answers = [answer for wanted in content for answer in self._wanted.pop(wanted)]
        self._sender.submit(self._put_and_send, name, frozen, seq_id, answers)

    def refuse(self, wanted: WeightsWanted, refusal: Refusal | NotYet) -> None:
        """`NotYet` answers at once, too: of the questions that a replica can have open, these must not take all."""
        with self._lock:
            answers = self._wanted.pop(wanted, [])
        for answer in answers:
            answer.set_result(refusal)

    # In the thread that sends

    def _put_and_send(self, name: str, frozen: FrozenAdapter, seq_id: int, answers: list[Future[Answer]]) -> None:
        """What was put before is neither put nor sent again."""
        before = self._published.get(name)
        is_new = before is None or before.frozen() is not frozen
        try:
            parcel = Parcel(name, self._put(frozen) if before is None or is_new else before.parcel.weights, seq_id)
            if is_new:
                self._send(parcel)
        except Exception as error:  # noqa: BLE001 - whoever needs them asks again
            log.warning("The weights of %s could not be sent to the replicas: %s", name, error)
            for answer in answers:
                answer.set_exception(error)
            return
        with self._lock:
            self._published[name] = _Published(parcel, weakref.ref(frozen))
            self._published.move_to_end(name)
            while len(self._published) > MAX_PUBLISHED:
                self._published.popitem(last=False)
        for answer in answers:
            answer.set_result(parcel)


class _Awaited(NamedTuple):
    wanted: WeightsWanted
    answer: Future[Answer]


class ReceivedWeights:
    """A replica's end. `ask` asks the trainer; an error in place of an answer means that it is away.

    `take` may be called from any thread; so may `ring`, when something has come that had to be waited for.
    """

    def __init__(self, ask: Callable[[WeightsWanted], Future[Answer]], ring: Callable[[], None]) -> None:
        self._ask = ask
        self.ring = ring
        self._unused: OrderedDict[str, Parcel] = OrderedDict()
        self._awaited: dict[str, _Awaited] = {}
        self._is_sent_to = False
        self._lock = threading.Lock()

    def take(self, parcel: Parcel) -> None:
        """Sent by the trainer, with its weights."""
        self._is_sent_to = True
        self._take(parcel)

    def _take(self, parcel: Parcel) -> None:
        """The weights are copied: they lie in memory that is shared, and needed for others."""
        packed: PackedAdapter = parcel.weights
        parcel = parcel._replace(weights=packed._replace(flat=packed.flat.copy()))
        with self._lock:
            awaited = self._awaited.get(parcel.name)
            if awaited is None or parcel.seq_id < awaited.wanted.at_least:
                self._keep(parcel)
                return
            del self._awaited[parcel.name]
        awaited.answer.set_result(parcel)

    def _keep(self, parcel: Parcel) -> None:
        before = self._unused.pop(parcel.name, parcel)
        self._unused[parcel.name] = max(parcel, before, key=lambda each: each.seq_id)
        size = sum(each.weights.flat.nbytes for each in self._unused.values())
        while len(self._unused) > MAX_UNUSED or (size > MAX_UNUSED_BYTES and len(self._unused) > 1):
            size -= self._unused.popitem(last=False)[1].weights.flat.nbytes

    def get(self, wanted: WeightsWanted, patience_seconds: float = 0.0) -> Future[Answer]:
        """What was sent, or is sent within this time, or else what is asked for; a parcel is handed out once.

        Nobody waits where nothing was ever sent: the trainer may have too many replicas for that.
        """
        answer: Future[Answer] = Future()
        with self._lock:
            sent = self._unused.get(wanted.name)
            if sent is not None and sent.seq_id >= wanted.at_least:
                answer.set_result(self._unused.pop(wanted.name))
                return answer
            before = self._awaited.get(wanted.name)
            awaited = self._awaited[wanted.name] = _Awaited(wanted, answer)
        if before is not None:
            before.answer.set_result(NotYet("the weights of this sampler were asked for once more"))
        if not self._is_sent_to or not wait([answer], patience_seconds).done:
            self._ask(wanted).add_done_callback(partial(self._answered, awaited))
        return answer

    def _answered(self, awaited: _Awaited, asked: Future[Answer]) -> None:
        name = awaited.wanted.name
        error = asked.exception()
        if error is None and isinstance(parcel := asked.result(), Parcel):
            if self._awaited.get(name) is not awaited:  # it was sent meanwhile
                return
            try:
                self._take(parcel)
            except Exception as failed:  # noqa: BLE001 - there may be no memory for a copy; whoever waits asks again
                error = failed
            else:
                return
        with self._lock:
            if self._awaited.get(name) is not awaited:
                return
            del self._awaited[name]
        if error is not None:
            awaited.answer.set_exception(error)
        else:
            awaited.answer.set_result(asked.result())
