"""Tinsmith on 8 to 1,000 GPUs and with up to 10,000 tenants, on paper: what is busy, who waits, and what breaks first.

Discrete events, reproducible from the seed. The real `schedule` and the real router decide; what things cost was
measured on one GPU and one server (`_measured.py` names the source of every figure, and what is assumed). The trace is
in `_tenants.py`, the machinery in `_cluster.py`. docs/explain/scale.md tells what came of it.

    python bench/simulate.py                          the table of sizes, and the routing policies: a minute or two
    python bench/simulate.py --gpus 64 --load 1.2     one size, with more work than the GPUs can do
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from _cluster import MAX_CLAIMED_SAMPLES, Clock, Database, Group, Replica, Request, Segment, Station
from _measured import API, LARGE, NETWORK_BYTES_PER_SECOND, POSTGRES, SMALL, SQLITE, BaseModel, RowCosts, StoreCosts
from _policies import POLICIES, Policy
from _tenants import (
    QUESTION_TOKENS,
    REPLY_TOKENS,
    SYSTEM_TOKENS,
    TENANTS_PER_GPU,
    Tenant,
    alone_seconds,
    demand,
    draw_output,
    draw_tenants,
)

from tinsmith.server.schedule import TrainingJob

SIZES = (8, 64, 256, 1000)
LOAD = 0.8
WARM_UP = 40.0
HORIZON = 100.0
COMPARED_AT = 64
ABLATED_AT = 256
FULL = 0.9
"""What is busy for more of its time than this has broken: whoever comes waits for long."""


class Setup(NamedTuple):
    name: str
    store: StoreCosts
    gpus_per_api: int | None
    """An API process for every so many GPUs; None: one for all."""
    group_gpus: int | None
    """How many GPUs train as one group; None: all of a base model."""
    policy: str = "prefix, then load"
    routers: Literal["one", "by tenant", "by request"] = "by tenant"
    """One for all samples, or one in each API process, which knows only of its own samples: those of its tenants, where
    a load balancer deals out connections, or any, where it deals out requests."""


ONE_SERVER = Setup("one server", SQLITE, gpus_per_api=None, group_gpus=None)
SPREAD = Setup("spread", POSTGRES, gpus_per_api=64, group_gpus=8)
LESS_SPREAD = (
    SPREAD._replace(name="one group", group_gpus=None),
    SPREAD._replace(name="one API", gpus_per_api=None),
    SPREAD._replace(name="SQLite", store=SQLITE),
)
"""Each without one thing, to tell what breaks from what is only near it."""
SEVERAL_APIS = SPREAD._replace(gpus_per_api=16)
ROUTED = (
    *(SEVERAL_APIS._replace(name=policy, policy=policy, routers="one") for policy in POLICIES),
    SEVERAL_APIS._replace(name="prefix, then load; in each API, by tenant", routers="by tenant"),
    SEVERAL_APIS._replace(name="in each API, by request", routers="by request"),
)


# --- the cluster, put together ---------------------------------------------------------------------------------------


class Pool:
    """All GPUs of one base model."""

    def __init__(
        self,
        clock: Clock,
        database: Database,
        model: BaseModel,
        setup: Setup,
        train: int,
        sample: int,
        num_routers: int,
        seed: int,
    ) -> None:
        sizes = _dealt(train, setup.group_gpus or train)
        self.groups = [Group(clock, database, model, gpus) for gpus in sizes]
        self.replicas = {name: Replica(clock, model, name) for name in (f"{model.name}/{n}" for n in range(sample))}
        self.routers: list[Policy] = [POLICIES[setup.policy](seed + number) for number in range(num_routers)]
        for router, name in itertools.product(self.routers, self.replicas):
            router.came(name)
        self.max_underway = MAX_CLAIMED_SAMPLES * sample
        self.underway = 0
        self.held_back: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        """Samples that no worker has claimed, by owner."""


def _dealt(gpus: int, size: int) -> list[int]:
    """Groups of at most that size, as equal as possible."""
    count = -(-gpus // size)
    return [gpus // count + (number < gpus % count) for number in range(count)]


class Simulation:
    def __init__(self, gpus: int, tenants: Sequence[Tenant], setup: Setup, seed: int, load: float = LOAD) -> None:
        self.gpus, self.setup, self.tenants = gpus, setup, tenants
        self.clock = Clock(WARM_UP, HORIZON)
        self.database = Database(self.clock, setup.store)
        self.api = Station(self.clock, max(1, gpus // setup.gpus_per_api) if setup.gpus_per_api else 1)
        self.pools = self._pools(seed)
        self.dice = random.Random(f"work {seed}")
        self.submitted = self.ended = 0
        self.open: set[str] = set()
        """What was submitted and has not ended."""
        self.acknowledged: list[float] = []
        self.steps: dict[int, list[float]] = defaultdict(list)
        self.routing = 0.0
        self.routed = 0
        self._numbers = itertools.count(1)
        self._versions: dict[int, int] = defaultdict(int)
        self._groups: dict[int, Group] = {}
        costs = setup.store
        self._claim_and_begin = RowCosts(costs.claim.one + costs.begin.one, costs.claim.many + costs.begin.many)
        self.period = sum(demand(tenants)) / (load * gpus)
        """From one step of a tenant to the next, if it never had to wait."""
        for tenant in tenants:
            self.clock.at(self.dice.expovariate(1 / self.period), self._begin_step, tenant)

    def _pools(self, seed: int) -> dict[str, Pool]:
        """GPUs by demand, and one at least of each kind."""
        needs: dict[tuple[str, str], float] = {}
        for model in (SMALL, LARGE):
            need = demand([tenant for tenant in self.tenants if tenant.model is model])
            needs |= {(model.name, "train"): need.train, (model.name, "sample"): need.sample}
        parts = _parts(self.gpus, needs)
        return {
            model.name: Pool(
                self.clock,
                self.database,
                model,
                self.setup,
                parts[model.name, "train"],
                parts[model.name, "sample"],
                1 if self.setup.routers == "one" else self.api.servers,
                seed,
            )
            for model in (SMALL, LARGE)
        }

    def run(self) -> None:
        self.clock.run(self.clock.horizon)
        for pool in self.pools.values():
            for replica in pool.replicas.values():
                replica.look()

    def drain(self) -> None:
        """Go on until all that was submitted has ended; nobody begins a step any more."""
        while not self.clock.is_idle:
            self.clock.run(self.clock.next_event)

    # --- what tenants do ---

    def _begin_step(self, tenant: Tenant) -> None:
        if self.clock.now >= self.clock.horizon:
            return
        began = self.clock.now
        if tenant.kind == "supervised":
            self._train(tenant, began, tenant.train_tokens)
        else:
            Rollout(self, tenant, partial(self._train, tenant, began))

    def _train(self, tenant: Tenant, began: float, tokens: int) -> None:
        kinds = ["forward_backward", "optim_step"]
        if tenant.kind != "supervised":
            kinds.append("save_weights_for_sampler")
        left = len(kinds)

        def finished() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._end_step(tenant, began)

        self._submit_training(tenant, kinds, tokens, finished)

    def _end_step(self, tenant: Tenant, began: float) -> None:
        self._versions[tenant.number] += 1
        if began >= self.clock.warm_up or self.clock.counts:
            self.steps[tenant.number].append(self.clock.now - began)
        pause = self.dice.expovariate(1) * max(0.0, self.period - alone_seconds(tenant))
        self.clock.at(self.clock.now + pause, self._begin_step, tenant)

    # --- the way of a request ---

    def _submit_training(self, tenant: Tenant, kinds: Sequence[str], tokens: int, finished: Callable[[], None]) -> None:
        sent = self.clock.now
        keys = [self._submitted() for _ in kinds]
        group = self._group(tenant)

        def write() -> None:
            self.clock.at(self.database.write((self.database.costs.submit, len(kinds))), enqueue)

        def enqueue() -> None:
            self._acknowledge(sent)
            for key, kind in zip(keys, kinds, strict=True):
                size = tokens if kind == "forward_backward" else 1
                job = TrainingJob(key, kind, tenant.owner, f"{tenant.owner}:0", int(key), size, self.clock.now)
                group.submit(job, partial(self._answer, key, API.train / 2, finished))

        self.clock.at(self.api.visit(len(kinds) * API.train / 2), write)

    def _group(self, tenant: Tenant) -> Group:
        """A model stays with the group that had fewest for its size when it came: its weights are there."""
        if tenant.number not in self._groups:
            group = min(self.pools[tenant.model.name].groups, key=lambda group: group.models / group.gpus)
            group.models += 1
            self._groups[tenant.number] = group
        return self._groups[tenant.number]

    def group_of(self, number: int) -> Group:
        return self._group(self.tenants[number])

    def sample(
        self,
        tenant: Tenant,
        segments: tuple[Segment, ...],
        outputs: tuple[int, ...],
        answers: tuple[Segment, ...],
        finished: Callable[[], None],
    ) -> None:
        sent = self.clock.now
        key = self._submitted()
        pool = self.pools[tenant.model.name]
        router = pool.routers[(int(key) if self.setup.routers == "by request" else tenant.number) % len(pool.routers)]
        adapter = f"{tenant.owner}/{self._versions[tenant.number]}"

        def write() -> None:
            self.clock.at(self.database.write_one(self.database.costs.submit), enqueue)

        def enqueue() -> None:
            self._acknowledge(sent)
            if pool.underway < pool.max_underway:
                claim()
            else:
                pool.held_back.setdefault(tenant.owner, deque()).append(claim)

        def claim() -> None:
            pool.underway += 1
            self.clock.at(self.database.write_one(self._claim_and_begin), route)

        def route() -> None:
            prompt = np.repeat([segment.number for segment in segments], [segment.tokens for segment in segments])
            began = time.process_time()
            replica = router.choose(key, tenant.owner, adapter, prompt, len(outputs))
            self.routing += time.process_time() - began
            self.routed += 1
            assert replica is not None
            pool.replicas[replica].submit(Request(key, adapter, segments, outputs, answers, sent, drawn))

        def drawn() -> None:
            router.done(key)
            pool.underway -= 1
            if pool.held_back:
                owner, waiting = pool.held_back.popitem(last=False)
                waiting.popleft()()
                if waiting:
                    pool.held_back[owner] = waiting
            written = self.database.write_one(self.database.costs.complete)
            self.clock.at(written, self._answer, key, API.sample / 2, finished)

        self.clock.at(self.api.visit(API.sample / 2), write)

    def _acknowledge(self, sent: float) -> None:
        if self.clock.counts:
            self.acknowledged.append(self.clock.now - sent)

    def _submitted(self) -> str:
        key = str(next(self._numbers))
        self.submitted += 1
        self.open.add(key)
        return key

    def _answer(self, key: str, seconds: float, finished: Callable[[], None]) -> None:
        self.clock.at(self.api.visit(seconds), self._finish, key, finished)

    def _finish(self, key: str, finished: Callable[[], None]) -> None:
        self.open.remove(key)  # nothing ends twice
        self.ended += 1
        finished()

    def segment(self, tokens: int) -> Segment:
        return Segment(next(self._numbers), tokens)


class Rollout:
    """The samples of one step: all prompts at once, each with its group, and every sample a conversation of its own."""

    def __init__(self, simulation: Simulation, tenant: Tenant, finished: Callable[[int], None]) -> None:
        self._simulation, self._tenant, self._finished = simulation, tenant, finished
        self._open = tenant.samples_of_a_step
        self._tokens = 0
        system = simulation.segment(SYSTEM_TOKENS)  # with the weights of this step: nobody else's keys and values
        for _ in range(tenant.prompts):
            self._ask((system, simulation.segment(QUESTION_TOKENS)), tenant.samples, tenant.turns)

    def _ask(self, segments: tuple[Segment, ...], samples: int, turns_left: int) -> None:
        simulation = self._simulation
        outputs = tuple(draw_output(self._tenant, simulation.dice) for _ in range(samples))
        answers = tuple(simulation.segment(tokens) for tokens in outputs) if turns_left > 1 else ()
        heard = partial(self._heard, segments, outputs, answers, turns_left)
        simulation.sample(self._tenant, segments, outputs, answers, heard)

    def _heard(
        self, segments: tuple[Segment, ...], outputs: tuple[int, ...], answers: tuple[Segment, ...], turns_left: int
    ) -> None:
        if turns_left > 1:
            for answer in answers:
                self._ask((*segments, answer, self._simulation.segment(REPLY_TOKENS)), 1, turns_left - 1)
            return
        self._tokens += len(outputs) * sum(segment.tokens for segment in segments) + sum(outputs)
        self._open -= len(outputs)
        if not self._open:
            self._finished(self._tokens)


def _parts(gpus: int, needs: dict[tuple[str, str], float]) -> dict[tuple[str, str], int]:
    """Whole GPUs in proportion to the needs: one each, then each to whoever has least for what it needs."""
    parts = dict.fromkeys(needs, 1)
    for _ in range(gpus - len(parts)):
        neediest = max(needs, key=lambda key: needs[key] / parts[key])
        parts[neediest] += 1
    return parts


# --- what came of it -------------------------------------------------------------------------------------------------


class Figures(NamedTuple):
    gpus: int
    tenants: int
    setup: str
    trainers: float
    """Share of their time in which they trained."""
    summing: float
    """Share of it in which they added up the gradients of a group."""
    filled: float
    """Share of their GPUs' time that the data alone need."""
    samplers: float
    """Share of their time in which they had anything to draw; what they have at once decides how much that gives."""
    batch: float
    cache: float
    """Share of their caches that is promised to what they draw."""
    train_wait: tuple[float, float]
    sample_wait: tuple[float, float]
    acknowledged: tuple[float, float]
    fairness: float
    slowdown: float
    worst_slowdown: float
    steps_per_minute: float
    found: float
    transfers: float
    """A second."""
    transfer_share: float
    """Of the network of a replica, at the mean of all."""
    broadcast_share: float
    """The same if every new adapter went to every replica."""
    store: float
    store_writes: float
    api: float
    loop: float
    """Share of the time of a trainer group in which it waits for the store."""

    @property
    def breaks(self) -> str:
        shares = {
            "API": self.api,
            "store": self.store,
            "network to replicas": self.transfer_share,
            "trainers, by sums of gradients" if self.summing > self.filled else "trainers": self.trainers,
            "samplers' caches": self.cache,
        }
        return "; ".join(name for name, share in shares.items() if share > FULL) or "nothing"


def figures(simulation: Simulation) -> Figures:
    span = simulation.clock.horizon - simulation.clock.warm_up
    groups = [group for pool in simulation.pools.values() for group in pool.groups]
    replicas = [replica for pool in simulation.pools.values() for replica in pool.replicas.values()]
    train_gpus = sum(group.gpus for group in groups)
    now = simulation.clock.horizon
    train_waits = [wait for group in groups for wait in group.waits]
    train_waits += [now - job.created for group in groups for job in group.waiting]
    sample_waits = [wait for replica in replicas for wait in replica.waits]
    sample_waits += [now - request.created for replica in replicas for request in replica.waiting]
    slowdowns = [
        statistics.fmean(times) / alone_seconds(simulation.tenants[number], simulation.group_of(number).gpus)
        for number, times in simulation.steps.items()
    ]
    moved = sum(replica.transfers * replica.model.adapter_bytes for replica in replicas)
    rollouts = sum(
        len(times) * simulation.tenants[number].model.adapter_bytes * len(_pool(simulation, number).replicas)
        for number, times in simulation.steps.items()
        if simulation.tenants[number].kind != "supervised"
    )
    network = NETWORK_BYTES_PER_SECOND * span * len(replicas)
    return Figures(
        gpus=simulation.gpus,
        tenants=len(simulation.tenants),
        setup=simulation.setup.name,
        trainers=sum(group.computing * group.gpus for group in groups) / (train_gpus * span),
        summing=sum(group.summing * group.gpus for group in groups) / (train_gpus * span),
        filled=sum(group.useful for group in groups) / (train_gpus * span),
        samplers=sum(replica.busy for replica in replicas) / (len(replicas) * span),
        batch=sum(r.sample_seconds for r in replicas) / max(1e-9, sum(r.busy for r in replicas)),
        cache=sum(r.reserved_seconds / r.model.kv_tokens for r in replicas) / (len(replicas) * span),
        train_wait=_quantiles(train_waits),
        sample_wait=_quantiles(sample_waits),
        acknowledged=_quantiles(simulation.acknowledged),
        fairness=jain([1 / slowdown for slowdown in slowdowns]),
        slowdown=statistics.median(slowdowns) if slowdowns else float("inf"),
        worst_slowdown=max(slowdowns, default=float("inf")),
        steps_per_minute=60 * sum(map(len, simulation.steps.values())) / span,
        found=sum(r.found_tokens for r in replicas) / max(1, sum(r.prompt_tokens for r in replicas)),
        transfers=sum(replica.transfers for replica in replicas) / span,
        transfer_share=moved / network,
        broadcast_share=rollouts / network,
        store=simulation.database.station.busy / (simulation.database.station.servers * span),
        store_writes=simulation.database.station.visits / span,
        api=simulation.api.busy / (simulation.api.servers * span),
        loop=statistics.fmean(group.asking for group in groups) / span,
    )


def _pool(simulation: Simulation, number: int) -> Pool:
    return simulation.pools[simulation.tenants[number].model.name]


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and p99."""
    if not values:
        return 0.0, 0.0
    middle, late = np.quantile(values, [0.5, 0.99])
    return float(middle), float(late)


def jain(shares: Sequence[float]) -> float:
    """1 if all have the same, 1/n if one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def simulated(gpus: int, tenants: int, setup: Setup, seed: int, load: float = LOAD) -> Figures:
    simulation = Simulation(gpus, draw_tenants(tenants, seed), setup, seed, load)
    simulation.run()
    print(f"{gpus:,} GPUs, {setup.name}: {decisions(simulation)}", file=sys.stderr, flush=True)
    return figures(simulation)


def decisions(simulation: Simulation) -> str:
    """What the real functions took on this machine."""
    groups = [group for pool in simulation.pools.values() for group in pool.groups]
    scheduling = 1e6 * sum(group.scheduling for group in groups) / max(1, sum(group.turns for group in groups))
    routing = 1e6 * simulation.routing / max(1, simulation.routed)
    return f"a call of `schedule` took {scheduling:.0f} us, a choice of the router {routing:.0f} us"


def _both(pair: tuple[float, float], digits: int = 1) -> str:
    return f"{pair[0]:,.{digits}f}, {pair[1]:,.{digits}f}"


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "GPUs": lambda f: f"{f.gpus:,}",
    "tenants": lambda f: f"{f.tenants:,}",
    "setup": lambda f: f.setup,
    "trainers busy": lambda f: f"{f.trainers:.0%}",
    "with sums of gradients": lambda f: f"{f.summing:.0%}",
    "with data": lambda f: f"{f.filled:.0%}",
    "samplers busy": lambda f: f"{f.samplers:.0%}",
    "their batch, cache": lambda f: f"{f.batch:.0f}, {f.cache:.0%}",
    "steps/min": lambda f: f"{f.steps_per_minute:,.0f}",
    "training waits (s)": lambda f: _both(f.train_wait),
    "samples wait (s)": lambda f: _both(f.sample_wait),
    "acknowledged (ms)": lambda f: _both((1e3 * f.acknowledged[0], 1e3 * f.acknowledged[1]), 0),
    "slowdown: median, worst": lambda f: _both((f.slowdown, f.worst_slowdown)),
    "Jain": lambda f: f"{f.fairness:.2f}",
    "prompt in cache": lambda f: f"{f.found:.0%}",
    "adapters moved/s": lambda f: f"{f.transfers:,.0f}",
    "network: so, to all": lambda f: f"{f.transfer_share:.1%}, {f.broadcast_share:.0%}",
    "store writes/s": lambda f: f"{f.store_writes:,.0f}",
    "store busy": lambda f: f"{f.store:.0%}",
    "API busy": lambda f: f"{f.api:.0%}",
    "loop waits for store": lambda f: f"{f.loop:.0%}",
    "breaks": lambda f: f.breaks,
}


def print_table(rows: Sequence[Figures]) -> None:
    """A column for each run: there are more figures than runs."""
    cells = [[name, *(show(row) for row in rows)] for name, show in COLUMNS.items()]
    print(f"| {' | '.join(cells[0])} |\n| --- |{' ---: |' * len(rows)}")
    for line in cells[1:]:
        print(f"| {' | '.join(line)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="one size instead of the table")
    parser.add_argument("--tenants", type=int, help=f"{TENANTS_PER_GPU} for each GPU unless given")
    parser.add_argument("--load", type=float, default=LOAD, help="work over what all GPUs can do (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.gpus is not None and options.gpus < 4:
        parser.error(f"--gpus {options.gpus}: two base models need a trainer and a sampler each; give 4 or more")
    if options.tenants is not None and options.tenants < 1:
        parser.error(f"--tenants {options.tenants}: give 1 or more")
    if not 0 < options.load < math.inf:
        parser.error(f"--load {options.load}: give a number above 0, such as {LOAD}")
    began = time.perf_counter()
    sizes = SIZES if options.gpus is None else (options.gpus,)
    work = [(gpus, options.tenants or gpus * TENANTS_PER_GPU) for gpus in sizes]
    simulate_one = partial(simulated, seed=options.seed, load=options.load)
    large, small = _size(options, ABLATED_AT), _size(options, COMPARED_AT)
    tables = {
        "Sizes. Waits are median and p99.": [(*size, setup) for size in work for setup in (ONE_SERVER, SPREAD)],
        f"Spread over {large[0]} GPUs, without one thing.": [(*large, setup) for setup in LESS_SPREAD],
        f"Routing on {small[0]} GPUs, spread.": [(*small, setup) for setup in ROUTED],
    }
    with ProcessPoolExecutor() as processes:  # the longest first
        runs = sorted({run for table in tables.values() for run in table}, key=lambda run: -run[0])
        done = dict(zip(runs, processes.map(simulate_one, *zip(*runs, strict=True)), strict=True))
    for title, table in tables.items():
        print(f"{title}\n")
        print_table([done[each] for each in table])
        print()
    print(f"{time.perf_counter() - began:.0f} seconds in all.", file=sys.stderr)


def _size(options: argparse.Namespace, usual: int) -> tuple[int, int]:
    gpus = options.gpus or usual
    return gpus, options.tenants or gpus * TENANTS_PER_GPU


if __name__ == "__main__":
    main()
