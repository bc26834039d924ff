"""A cluster in simulated time: API processes, a database, trainer groups and sampler replicas, each as a queue.

    Clock      what happens next
    Station    servers that take what comes in the order in which it comes: the API, the database
    Group      a trainer group: the worker's loop of claim, `schedule`, run, complete, with the real `schedule`
    Replica    a sampler: a batch that decodes together, prompts in between, a cache of prefixes, slots for adapters

Time before the warm-up is over, or behind the horizon, counts for nobody, so nothing is busy for more than all of it.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from _measured import (
    GPUS_PER_MACHINE,
    LINK_BYTES_PER_SECOND,
    NETWORK_BYTES_PER_SECOND,
    SMALLEST_FULL_BATCH,
    WEIGHTS_TO_SAMPLER_SECONDS,
    BaseModel,
    RowCosts,
    StoreCosts,
)
from _tenants import MAX_OUTPUT_TOKENS, ROW_TOKENS

from tinsmith.server.schedule import Served, TrainingJob, note_begun, note_served, schedule

MAX_CLAIMED_TRAINING = 64  # as in tinsmith.server.worker, which would load torch
MAX_CLAIMED_SAMPLES = 256  # as there on a CPU; on a GPU it is 1,024, and the batches here hold about a hundred
ADAPTERS_IN_MEMORY = 32  # as in tinsmith.server.sampling_weights
DEPARTURES = 4
"""The samples of a request leave the batch in so many parts, which stand for their lengths."""


class Clock:
    def __init__(self, warm_up: float, horizon: float) -> None:
        self.now = 0.0
        self.warm_up = warm_up
        self.horizon = horizon
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), call, arguments))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        self.now = max(self.now, until)

    @property
    def is_idle(self) -> bool:
        return not self._events

    @property
    def next_event(self) -> float:
        return self._events[0][0]

    @property
    def counts(self) -> bool:
        return self.warm_up <= self.now < self.horizon

    def within(self, start: float, end: float) -> float:
        """How much of a time counts."""
        return max(0.0, min(end, self.horizon) - max(start, self.warm_up))


class Station:
    def __init__(self, clock: Clock, servers: int) -> None:
        self._clock = clock
        self.servers = servers
        self._free = [0.0] * servers
        self.busy = 0.0
        self.visits = 0

    @property
    def has_queue(self) -> bool:
        return self._free[0] > self._clock.now

    def visit(self, seconds: float) -> float:
        """When a visit that begins to wait now is over."""
        start = max(self._clock.now, self._free[0])
        heapq.heapreplace(self._free, start + seconds)
        self.busy += self._clock.within(start, start + seconds)
        self.visits += self._clock.counts
        return start + seconds


class Database:
    def __init__(self, clock: Clock, costs: StoreCosts) -> None:
        self.costs = costs
        self.station = Station(clock, costs.cores)

    def write_one(self, costs: RowCosts) -> float:
        """A row of its own, or one more of the next transaction, if others are waiting."""
        return self.station.visit(costs.each if self.station.has_queue else costs.one)

    def write(self, *parts: tuple[RowCosts, int]) -> float:
        return self.station.visit(sum(costs.of(rows) for costs, rows in parts if rows))


# --- training --------------------------------------------------------------------------------------------------------


class Group:
    """Serves the models that are dealt to it, with all its GPUs at once."""

    def __init__(self, clock: Clock, database: Database, model: BaseModel, gpus: int) -> None:
        self._clock, self._database, self.model, self.gpus = clock, database, model, gpus
        self._queued: OrderedDict[str, deque[TrainingJob]] = OrderedDict()
        self._claimed: dict[str, TrainingJob] = {}
        self._done: dict[str, Callable[[], None]] = {}
        self._by_owner: dict[str, float] = {}
        self._by_model: dict[str, float] = {}
        self._to_finish: dict[str, int] = {}
        self._is_running = False
        self.models = 0
        self.waits: list[float] = []
        self.computing = 0.0
        """Seconds in which it trained on data, steps of the optimizer included."""
        self.summing = 0.0
        """Seconds of those in which it added up gradients."""
        self.useful = 0.0
        """GPU seconds that the data alone need."""
        self.asking = 0.0
        """Seconds in which it waited for the database."""
        self.turns = 0
        self.scheduling = 0.0
        """Seconds of this machine, not of the simulated one."""

    def submit(self, job: TrainingJob, done: Callable[[], None]) -> None:
        self._queued.setdefault(job.owner, deque()).append(job)
        self._done[job.request_id] = done
        if not self._is_running:
            self._is_running = True
            self._turn()

    @property
    def waiting(self) -> list[TrainingJob]:
        return [*itertools.chain(*self._queued.values()), *self._claimed.values()]

    def _claim(self) -> int:
        """Equal parts for the owners who are next in turn, as the store gives them."""
        room = MAX_CLAIMED_TRAINING - len(self._claimed)
        taken = 0
        while self._queued and taken < room:
            share = -(-(room - taken) // len(self._queued))
            for owner in list(itertools.islice(self._queued, room - taken)):
                queue = self._queued.pop(owner)
                for _ in range(min(share, len(queue), room - taken)):
                    job = queue.popleft()
                    self._claimed[job.request_id] = job
                    taken += 1
                if queue:
                    self._queued[owner] = queue
        return taken

    def _turn(self) -> None:
        claimed = self._claim()
        if not self._claimed:
            self._is_running = False
            return
        self.turns += 1
        began = time.process_time()
        served = Served(self._by_owner, self._by_model, self._to_finish)
        batch = schedule(self._claimed.values(), served, self.gpus * self.model.train_token_budget)
        self.scheduling += time.process_time() - began
        costs = self._database.costs
        ready = self._database.write((costs.claim, claimed), (costs.begin, len(batch))) + costs.asking
        self.asking += self._clock.within(self._clock.now, ready)
        self._clock.at(ready, self._run, batch)

    def _run(self, batch: Sequence[TrainingJob]) -> None:
        now = self._clock.now
        if self._clock.counts:
            self.waits += [now - job.created for job in batch]
        seconds = self._seconds(batch)
        self.computing += self._clock.within(now, now + seconds)
        if not batch[0].is_barrier:
            tokens = sum(job.tokens for job in batch)
            share = self._clock.within(now, now + seconds) / seconds
            self.useful += share * tokens / self.model.train_tokens_per_second
            self.summing += share * self._sum_seconds(batch)
        self._clock.at(now + seconds, self._complete, batch)

    def _seconds(self, batch: Sequence[TrainingJob]) -> float:
        kind = batch[0].kind
        if kind == "optim_step":
            return self.model.optimizer_seconds
        if kind == "save_weights_for_sampler":
            return WEIGHTS_TO_SAMPLER_SECONDS
        tokens = sum(job.tokens for job in batch)
        # Rows are dealt whole, so somebody has up to a row more than an equal part.
        share = tokens if self.gpus == 1 else max(tokens / self.gpus + ROW_TOKENS / 2, ROW_TOKENS)
        return max(share, SMALLEST_FULL_BATCH) / self.model.train_tokens_per_second + self._sum_seconds(batch)

    def _sum_seconds(self, batch: Sequence[TrainingJob]) -> float:
        """The gradients of all models of a batch, float32, once around the group."""
        if self.gpus == 1:
            return 0.0
        models = len({job.model_id for job in batch})
        rate = LINK_BYTES_PER_SECOND if self.gpus <= GPUS_PER_MACHINE else NETWORK_BYTES_PER_SECOND
        return 2 * 4 * self.model.adapter_weights * models / rate

    def _complete(self, batch: Sequence[TrainingJob]) -> None:
        for job in batch:
            del self._claimed[job.request_id]
        note_served(self._by_owner, [(job.owner, job.tokens) for job in batch])
        note_served(self._by_model, [(job.model_id, job.tokens) for job in batch])
        note_begun(self._to_finish, batch)
        written = self._database.write((self._database.costs.complete, len(batch)))
        self.asking += self._clock.within(self._clock.now, written)
        self._clock.at(written, self._tell, batch)

    def _tell(self, batch: Sequence[TrainingJob]) -> None:
        for job in batch:
            self._done.pop(job.request_id)()
        self._turn()


# --- sampling --------------------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """A piece of a prompt. The number names it and all before it, and whose keys and values it has."""

    number: int
    tokens: int


class Request(NamedTuple):
    key: str
    adapter: str
    segments: tuple[Segment, ...]
    outputs: tuple[int, ...]
    """How long each sample gets."""
    answers: tuple[Segment, ...]
    """Prompts of later turns begin with these, after those of this one."""
    created: float
    done: Callable[[], None]

    @property
    def reserved(self) -> int:
        return sum(segment.tokens for segment in self.segments) + len(self.outputs) * MAX_OUTPUT_TOKENS


class Replica:
    def __init__(self, clock: Clock, model: BaseModel, name: str) -> None:
        self._clock, self.model, self.name = clock, model, name
        self._waiting: deque[Request] = deque()
        self._running = 0
        self._reserved = 0
        self._steps = 0.0
        self._seen = 0.0
        self._prefilled_at = 0.0
        self._leaving: list[tuple[float, int, int, Request | None]] = []
        self._numbers = itertools.count()
        self._version = 0
        self._adapters: OrderedDict[str, None] = OrderedDict()
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._cached = 0
        self.waits: list[float] = []
        self.busy = self.sample_seconds = self.reserved_seconds = 0.0
        self.prompt_tokens = self.found_tokens = self.transfers = 0

    def submit(self, request: Request) -> None:
        """Its adapter is fetched first, if it is not here; others go on meanwhile."""
        if request.adapter in self._adapters:
            self._adapters.move_to_end(request.adapter)
            self._arrive(request)
            return
        self.transfers += self._clock.counts
        self._adapters[request.adapter] = None
        while len(self._adapters) > ADAPTERS_IN_MEMORY:
            self._adapters.popitem(last=False)
        self._clock.at(self._clock.now + self.model.transfer_seconds, self._arrive, request)

    @property
    def waiting(self) -> Sequence[Request]:
        return self._waiting

    def look(self) -> None:
        """Counts the time up to now."""
        self._advance()

    def _arrive(self, request: Request) -> None:
        self._waiting.append(request)
        self._advance()
        self._admit()
        self._look_ahead()

    def _advance(self) -> None:
        """As many steps as fitted in since the last look."""
        now = self._clock.now
        if self._running:
            decoding = max(0.0, now - max(self._seen, self._prefilled_at))
            self._steps += decoding / self.model.decode_step(self._running)
            spent = self._clock.within(self._seen, now)
            self.busy += spent
            self.sample_seconds += spent * self._running
            self.reserved_seconds += spent * min(self._reserved, self.model.kv_tokens)
        self._seen = now

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if self._running and self._reserved + request.reserved > self.model.kv_tokens:
                return
            self._begin(self._waiting.popleft())

    def _begin(self, request: Request) -> None:
        now = self._clock.now
        if self._clock.counts:
            self.waits.append(now - request.created)
        self._reserved += request.reserved
        missing = self._look_up(request.segments)
        start = max(now, self._prefilled_at) + self.model.prefill(missing)
        self._prefilled_at = start
        lengths = sorted(request.outputs)
        count = len(lengths)
        parts = min(DEPARTURES, count)
        for part in range(parts):
            first, last = part * count // parts, (part + 1) * count // parts
            is_end = part == parts - 1
            target = self._steps + (lengths[-1] if is_end else sum(lengths[first:last]) / (last - first))
            whole = request if is_end else None
            heapq.heappush(self._leaving, (target, next(self._numbers), last - first, whole))
        self._running += count

    def _look_up(self, segments: Sequence[Segment]) -> int:
        """How many tokens of a prompt are to be computed; after that they are in the cache."""
        total = sum(segment.tokens for segment in segments)
        found = 0
        for segment in segments:
            if segment.number not in self._cache:
                break
            found += segment.tokens
        if self._clock.counts:
            self.prompt_tokens += total
            self.found_tokens += found
        self._keep(segments)
        return total - found

    def _keep(self, segments: Sequence[Segment]) -> None:
        for segment in reversed(segments):
            if segment.number not in self._cache:
                self._cache[segment.number] = segment.tokens
                self._cached += segment.tokens
            self._cache.move_to_end(segment.number)
        while self._cached + self._reserved > self.model.kv_tokens and self._cache:
            self._cached -= self._cache.popitem(last=False)[1]

    def _look_ahead(self) -> None:
        self._version += 1
        if self._leaving:
            start = max(self._clock.now, self._prefilled_at)
            steps = max(0.0, self._leaving[0][0] - self._steps)
            self._clock.at(start + steps * self.model.decode_step(self._running), self._leave, self._version)

    def _leave(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = []
        while self._leaving and self._leaving[0][0] <= self._steps + 1e-6:
            _, _, count, request = heapq.heappop(self._leaving)
            self._running -= count
            if request is not None:
                self._reserved -= request.reserved
                self._keep((*request.segments, *request.answers))
                ended.append(request)
        self._admit()
        self._look_ahead()
        for request in ended:
            request.done()
