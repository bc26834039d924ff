"""A training group on one machine: two processes with one thread each against one process with one thread.

Bars: at least 1.6 times the tokens/s of one process, with the 135M model and with a tiny one; at least nine tenths of
what two engines reach that compute the same shares at the same time and know nothing of each other. More than these a
group cannot reach: they have what the machine gives to two processes, and nothing to say to each other.

A round is a forward and backward pass over a batch and an optimizer step, in float32. Wall time is what users see; on a
machine that is busy with other things it says as much about them. So the same is also taken by CPU time: that of the
busiest process of the group, all waiting left out. What sending weights and gradients costs is in it, and shares that
are not equal.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import _engine
from _engine import RANK, Round, Row

ROUNDS = 7
BAR = 1.6
BAR_APART = 0.9
ONE, TWO, APART = "one process", "group of 2", "two apart"
VARYING = [512, 32, 374, 237, 100, 443, 169, 306]


class Case(NamedTuple):
    model: str
    lengths: list[int]
    num_adapters: int = 1
    by_cpu: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


MIXES = {
    "135M": Case("135M", VARYING),
    "135M, 4 adapters": Case("135M", VARYING, 4),
    "tiny": Case("tiny", VARYING * 8),
    "tiny, 4 adapters": Case("tiny", VARYING * 8, 4),
}
CASES = MIXES | {f"{name}, by CPU": case._replace(by_cpu=True) for name, case in MIXES.items()}


def group_of(size: int, case: Case) -> Round:
    return timed(case, training(case, started(size, folder_of(case.model))))


def apart(case: Case) -> Round:
    """The shares of the two in a group, computed at the same time by two engines that know nothing of each other."""
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=other_share, args=(case, there), daemon=True).start()
    train = share_of(case, 0)
    here.recv()

    def at_once() -> None:
        here.send(None)
        train()
        here.recv()

    return timed(case, at_once)


def other_share(case: Case, leader: Connection) -> None:
    train = share_of(case, 1)
    with suppress(EOFError, BrokenPipeError):  # the other has done its rounds
        while True:
            leader.send(None)
            leader.recv()
            train()


def share_of(case: Case, number: int) -> Callable[[], None]:
    from tinsmith.server.engine.engine import Engine
    from tinsmith.server.engine.shares import balanced

    prepare()
    return training(case, Engine.open(folder_of(case.model), "cpu", "float32"), balanced(case.lengths, 2)[number])


def prepare() -> None:
    """As members are: one thread, which gives way to others."""
    import torch

    from tinsmith.server.priority import give_way

    give_way("cpu")
    torch.set_num_threads(1)


def training(case: Case, engine: Any, places: Sequence[int] | None = None) -> Callable[[], None]:
    """A step of training on all rows, or on those in these places."""
    from tinsmith.server.engine.adapters import AdapterSpec
    from tinsmith.types import AdamParams

    adapters = [engine.create_adapter(AdapterSpec(RANK, seed)) for seed in range(case.num_adapters)]
    rows = rows_of(case, adapters, engine.model.shape.vocab_size)
    rows = rows if places is None else [rows[place] for place in places]

    def train() -> None:
        outputs = engine.forward_backward(rows)
        for adapter in adapters:
            engine.optim_step(adapter, AdamParams(learning_rate=1e-4))
        assert not any(output.error for output in outputs)

    return train


def timed(case: Case, train: Callable[[], None]) -> Round:
    read = cpu_seconds if case.by_cpu else wall_seconds

    def one_round(number: int) -> float:
        before = read()
        train()
        return max(seconds - before[process] for process, seconds in read().items())

    return one_round


def started(size: int, folder: str) -> Any:
    from tinsmith.server.engine.group import GroupEngine
    from tinsmith.server.member_process_life import MembersHere
    from tinsmith.server.members import Members
    from tinsmith.server.messages import WorkerSettings

    settings = WorkerSettings(
        base_model="bench", folder=folder, database="", state="", device="cpu", dtype="float32", train_workers=size
    )
    lost = lambda rank, ending: os._exit(1)  # noqa: E731
    members = Members(settings, MembersHere(), on_begun=lambda rank, begun: None, on_lost=lost)
    prepare()  # not before there are members, who would give way twice
    engine = GroupEngine.open(folder, "cpu", "float32")
    members.meet(engine)
    atexit.register(members.dismiss, engine)
    return engine


def folder_of(model: str) -> str:
    if model == "135M":
        return _engine.model_folder()
    from tests.server.tiny_models import save_model

    return str(save_model(Path(tempfile.mkdtemp()), max_position_embeddings=max(VARYING)))


def rows_of(case: Case, adapters: list[Any], vocab_size: int) -> list[Any]:
    import numpy as np

    from tinsmith.server.engine.batch import TrainRow

    rng = np.random.default_rng(0)
    rows = []
    for index, length in enumerate(case.lengths):
        tokens = rng.integers(0, vocab_size, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        rows.append(TrainRow(adapters[index % len(adapters)], tokens[:-1], "cross_entropy", inputs))
    return rows


def wall_seconds() -> dict[int, float]:
    return {os.getpid(): time.perf_counter()}


def cpu_seconds() -> dict[int, float]:
    """Of this process and of those that it started, each with all its threads."""
    own = f"/proc/{os.getpid()}/task"
    children = [int(child) for task in os.listdir(own) for child in Path(own, task, "children").read_text().split()]
    return {process: sum(map(_on_cpu, Path(f"/proc/{process}/task").iterdir())) for process in (os.getpid(), *children)}


def _on_cpu(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e9


SIDES: dict[str, Callable[[Case], Round]] = {ONE: partial(group_of, 1), TWO: partial(group_of, 2), APART: apart}


def conduct(name: str, case: Case, rounds: int) -> Iterator[Row]:
    results = _engine.in_turns(name, SIDES, rounds)
    speeds = {side: case.num_tokens / _engine.seconds(results, side) for side in SIDES}
    for peer, bar in ((ONE, BAR), (APART, BAR_APART)):
        ratio = _engine.time_ratio(results, peer, TWO)
        yield Row(f"{name}: tokens/s, {TWO}", peer, speeds[peer], speeds[TWO], ratio, bar)


if __name__ == "__main__":
    _engine.play(CASES, SIDES, conduct, ROUNDS)
