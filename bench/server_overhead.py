"""What the way through HTTP, store and worker adds to the work itself, on a model so small that the way is most of it.

Bar: a minimal forward_backward with its optim_step at most 15 ms over the bare engine calls.

Both sides take turns of a few rounds, with one thread for the engine: a busy machine is busy for both. The best round
of a turn counts, which is what remains when nothing else runs; the figures are medians over the turns.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads; tiny products gain nothing from threads

import harness
import numpy as np

import tinsmith
from tinsmith.server.engine.adapters import AdapterSpec
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.running import SampleWork

TURNS = 20
ROUNDS_PER_TURN = 15
BAR_MS = 15.0
RANK = 8
TOKENS = list(range(1, 9))
TARGETS = list(range(2, 10))
STEP = tinsmith.AdamParams(learning_rate=1e-4)
ONE_TOKEN = tinsmith.SamplingParams(max_tokens=1, seed=1, stop=[])

Round = Callable[[], None]


class Row(NamedTuple):
    figure: str
    bare: Round
    served: Round
    bar: float | None


# --- the two sides ---------------------------------------------------------------------------------------------------


class Bare:
    """The engine's own calls."""

    def __init__(self, folder: Path) -> None:
        self._engine = Engine.open(folder, device="cpu", dtype="float32", kv_tokens=2048)
        self._adapter = self._engine.create_adapter(AdapterSpec(RANK, seed=1))

    def train(self) -> None:
        inputs = {"target_tokens": np.array(TARGETS), "weights": np.ones(len(TARGETS), dtype=np.float32)}
        self._engine.forward_backward([TrainRow(self._adapter, np.array(TOKENS), "cross_entropy", inputs)])
        self._engine.optim_step(self._adapter, STEP)

    def sample(self) -> None:
        self._engine.generator.add(SampleWork(key=0, prompt=TOKENS, params=ONE_TOKEN))
        while not self._engine.generator.step():
            pass


class Served:
    """The same through a client, as a program would do it."""

    def __init__(self, client: tinsmith.ServiceClient) -> None:
        self._model = client.create_lora_training_client("tiny", rank=RANK, seed=1).result()
        self._sampler = client.create_sampling_client(base_model="tiny").result()
        inputs = {"target_tokens": TARGETS, "weights": [1.0] * len(TARGETS)}
        self._data = [tinsmith.Datum(tinsmith.ModelInput.from_ints(TOKENS), inputs)]

    def train_together(self) -> None:
        futures = [self._model.forward_backward(self._data, "cross_entropy"), self._model.optim_step(STEP)]
        for future in futures:
            future.result()

    def train_one_by_one(self) -> None:
        self._model.forward_backward(self._data, "cross_entropy").result()
        self._model.optim_step(STEP).result()

    def sample(self) -> None:
        self._sampler.sample(tinsmith.ModelInput.from_ints(TOKENS), 1, ONE_TOKEN).result()


class Running(NamedTuple):
    url: str
    pid: int


@contextmanager
def server(folder: Path, state: Path) -> Iterator[Running]:
    """`tinsmith serve` on a free port, as a user starts it."""
    command = [Path(sys.executable).with_name("tinsmith"), "serve", f"--model=tiny={folder}", "--port=0"]
    options = [f"--state={state}", "--device=cpu", "--dtype=float32"]
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=harness.clean_environment(),
    ) as process:
        assert process.stdout is not None
        ready = re.match(r"Tinsmith is ready at (\S+)", process.stdout.readline())
        try:
            assert ready, "the server did not start"
            yield Running(ready[1], process.pid)
        finally:
            process.terminate()


# --- the table -------------------------------------------------------------------------------------------------------


def timed(row: Row) -> tuple[float, float]:
    """Milliseconds of a bare and of a served round: the best of each turn, and of those the median."""
    times: dict[Round, list[float]] = {row.bare: [], row.served: []}
    for turn in range(TURNS + 1):
        for work, noted in times.items():
            best = min(seconds(work) for _ in range(ROUNDS_PER_TURN))
            if turn:  # the first one fills caches and opens connections
                noted.append(1e3 * best)
    return statistics.median(times[row.bare]), statistics.median(times[row.served])


def seconds(work: Round) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def print_table(rows: Sequence[Row]) -> None:
    print("| figure | bare engine (ms) | through the server (ms) | overhead (ms) | bar | ratio |")
    print("| --- | ---: | ---: | ---: | --- | ---: |")
    for row in rows:
        bare, served = timed(row)
        overhead = served - bare
        bar = "-" if row.bar is None else f"{row.bar:.0f}{'' if overhead <= row.bar else ' MISSED'}"
        print(
            f"| {row.figure} | {bare:.1f} | {served:.1f} | {overhead:.1f} | {bar} | {served / bare:.2f} |", flush=True
        )


def main() -> None:
    from tests.server.tiny_models import save_model

    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name) / "model", "qwen3")
        bare = Bare(folder)
        with (
            server(folder, Path(name) / "state") as running,
            tinsmith.ServiceClient(base_url=running.url, api_key=harness.KEY) as client,
        ):
            served = Served(client)
            print_table(
                [
                    Row("forward_backward and optim_step, sent together", bare.train, served.train_together, BAR_MS),
                    Row("the same, the second after the first's result", bare.train, served.train_one_by_one, BAR_MS),
                    Row("a sample of one token", bare.sample, served.sample, None),
                ]
            )


if __name__ == "__main__":
    main()
