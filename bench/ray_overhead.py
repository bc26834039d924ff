"""What workers on a Ray cluster add to a request, and what a second sampler replica brings, all on this machine.

Bars: routing and the transfer of weights add at most 5 ms to a request, and so do the members of a training group to a
step; two replicas with one thread each draw at least 1.6 times the tokens/s of one.

The peer is the same server without Ray: one process for everything, or two that train together. Both are up together
and take turns of a few rounds on a model so small that the way is most of it; the best round of a turn counts, and
figures are medians over the turns. New weights reach the replicas while the client asks for the first sample.

The replicas draw for two servers that are up together and take turns, with more samples than a replica should have at
once, of prompts that have nothing in common: eight of each prompt, as reinforcement learning asks for them, and one of
each, where client and API have most to do for a token, on the cores that the replicas want. The tiny model draws short
samples, whose requests take a good part of the time to come in, and long ones. On a machine that is busy with other
things wall time says as much about them, so the same is also taken by the CPU time of the busiest replica.
The ceiling is what two engines without a server reach that draw half of the samples each at the same time, against one
that draws all: what splitting costs, and what this machine has for two.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import _engine
import harness

import tinsmith
from tests.support.ray_head import RayHead
from tinsmith.server.process_life import WORKER_ENVIRONMENT

TURNS = 15
ROUNDS_PER_TURN = 10
DRAWING_TURNS = 5
BAR_MS = 5.0
BAR_RATIO = 1.6
RANK = 32
PROMPT = tinsmith.ModelInput.from_ints(list(range(1, 9)))
ONE_TOKEN = tinsmith.SamplingParams(max_tokens=1, seed=1, stop=[])
NUM_ROWS = 8
AT_ONCE = 256
"""Requests that a replica takes at once."""


class Case(NamedTuple):
    model: str
    num_prompts: int
    samples: int
    """Of each prompt."""
    tokens: int
    """Of each sample."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompts * self.samples * self.tokens

    def prompts(self) -> list[list[int]]:
        return [[number % 64, number // 64, *range(1, 9)] for number in range(self.num_prompts)]

    @property
    def params(self) -> tinsmith.SamplingParams:
        return tinsmith.SamplingParams(max_tokens=self.tokens, seed=1, stop=[])


DRAWING = (
    *(Case("tiny", 64, 8, tokens) for tokens in (100, 300)),
    *(Case("tiny", 512, 1, tokens) for tokens in (100, 300)),
    Case("135M", 24, 8, 16),
    Case("135M", 192, 1, 16),
)
"""Of the large model fewer: there, each step takes longer with every sample."""

Round = Callable[[], float]
"""Gives the seconds it took."""


class Spent(NamedTuple):
    """Seconds of a round."""

    wall: float
    cpu: float
    """Of the busiest of those that draw."""


@contextmanager
def serving(folder: str, *options: str) -> Iterator[tuple[str, tinsmith.ServiceClient]]:
    """`tinsmith serve` on a free port, as a user starts it, with a client."""
    command = [Path(sys.executable).with_name("tinsmith"), "serve", f"--model=bench={folder}", "--port=0"]
    with tempfile.TemporaryDirectory() as state:
        fixed = [f"--state={state}", "--device=cpu", "--dtype=float32"]
        with subprocess.Popen(
            [*command, *fixed, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            ready = re.match(r"Tinsmith is ready at (\S+)", process.stdout.readline())
            try:
                assert ready, "the server did not start"
                with tinsmith.ServiceClient(base_url=ready[1], api_key=harness.KEY) as client:
                    yield ready[1], client
            finally:
                process.terminate()


def sampling(client: tinsmith.ServiceClient) -> Round:
    sampler = client.create_sampling_client(base_model="bench").result()

    return lambda: seconds(lambda: sampler.sample(PROMPT, 1, ONE_TOKEN).result())


def new_weights(client: tinsmith.ServiceClient) -> Round:
    model = client.create_lora_training_client("bench", rank=RANK, seed=1).result()
    return lambda: seconds(lambda: model.save_weights_and_get_sampling_client().result())


def first_token(client: tinsmith.ServiceClient) -> Round:
    model = client.create_lora_training_client("bench", rank=RANK, seed=1).result()

    def one_round() -> float:
        sampler = model.save_weights_and_get_sampling_client().result()
        return seconds(lambda: sampler.sample(PROMPT, 1, ONE_TOKEN).result())

    return one_round


def training_step(client: tinsmith.ServiceClient) -> Round:
    model = client.create_lora_training_client("bench", rank=RANK, seed=1).result()
    inputs = {"target_tokens": PROMPT.to_ints(), "weights": [1.0] * PROMPT.length}
    data = [tinsmith.Datum(model_input=PROMPT, loss_fn_inputs=inputs)] * NUM_ROWS

    def step() -> None:
        passed = model.forward_backward(data, "cross_entropy")
        model.optim_step(tinsmith.AdamParams(learning_rate=1e-4)).result()
        passed.result()

    return lambda: seconds(step)


def best_of_turns(rounds: dict[str, Round], turns: int, rounds_per_turn: int) -> dict[str, float]:
    """Seconds of a round, of each side."""
    noted: dict[str, list[float]] = {name: [] for name in rounds}
    for turn in range(turns + 1):
        for name, work in rounds.items():
            best = min(work() for _ in range(rounds_per_turn))
            if turn:  # the first one fills caches and opens connections
                noted[name].append(best)
    return {name: statistics.median(times) for name, times in noted.items()}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def print_ways(cluster: RayHead) -> None:
    print("| figure | one process (ms) | on Ray (ms) | added (ms) | bar |")
    print("| --- | ---: | ---: | ---: | --- |")
    with ExitStack() as stack:
        folder = folder_of("tiny", stack)
        ray = f"--ray={cluster.address}"
        alone = [stack.enter_context(serving(folder, *options))[1] for options in ((), (ray, "--sample-workers=2"))]
        group = [stack.enter_context(serving(folder, "--train-workers=2", *options))[1] for options in ((), (ray,))]
        for figure, make, (plain, on_ray) in (
            ("a sample of one token", sampling, alone),
            ("a sampling client of a model's weights", new_weights, alone),
            ("its first sample of one token", first_token, alone),
            ("a step of a training group of 2", training_step, group),
        ):
            sides = {"plain": make(plain), "ray": make(on_ray)}
            times = best_of_turns(sides, TURNS, ROUNDS_PER_TURN)
            added = 1e3 * (times["ray"] - times["plain"])
            bar = f"{BAR_MS:.0f}{'' if added <= BAR_MS else ' MISSED'}"
            print(
                f"| {figure} | {1e3 * times['plain']:.1f} | {1e3 * times['ray']:.1f} | {added:.1f} | {bar} |",
                flush=True,
            )


class Drawing:
    """One side of the comparison: draws all samples of a case through a server."""

    def __init__(self, url: str, client: tinsmith.ServiceClient, case: Case) -> None:
        self._url = url
        self._case = case
        self._sampler = client.create_sampling_client(base_model="bench").result()

    def round(self) -> Spent:
        before = self._cpu_seconds()
        start = time.perf_counter()
        prompts = map(tinsmith.ModelInput.from_ints, self._case.prompts())
        for future in [self._sampler.sample(prompt, self._case.samples, self._case.params) for prompt in prompts]:
            future.result()
        wall = time.perf_counter() - start
        return Spent(wall, max(spent - before[process] for process, spent in self._cpu_seconds().items()))

    def _cpu_seconds(self) -> dict[int, float]:
        """Of each replica, with all its threads."""
        request = urllib.request.Request(f"{self._url}/dashboard/api/overview", headers={"x-api-key": harness.KEY})
        with urllib.request.urlopen(request) as answer:
            (model,) = json.load(answer)["models"]
        return {
            worker["process"]: on_cpu(worker["process"]) for worker in model["workers"] if worker["role"] == "sample"
        }


def on_cpu(process: int) -> float:
    nanoseconds = 0
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


class Engines:
    """Engines in processes of their own, which draw at the same time."""

    def __init__(self, folder: str, case: Case, number: int) -> None:
        self._shares = [case.num_prompts // number] * number
        environment = {**os.environ, **WORKER_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--draw", folder, *map(str, case[1:])]
        pipe = subprocess.PIPE
        self._players = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) for _ in range(number)
        ]

    def round(self) -> Spent:
        start = time.perf_counter()
        for player, share in zip(self._players, self._shares, strict=True):
            print(share, file=player.stdin, flush=True)
        cpu = [float(player.stdout.readline()) for player in self._players if player.stdout]
        return Spent(time.perf_counter() - start, max(cpu))

    def close(self) -> None:
        for player in self._players:
            player.kill()
            player.wait()


def draw(folder: str, case: Case) -> None:
    """Such a process: for every number that it reads it draws for so many prompts, and writes its CPU time for that."""
    import torch

    from tinsmith.server.engine.engine import Engine
    from tinsmith.server.engine.running import SampleWork

    torch.set_num_threads(1)
    generator = Engine.open(folder, "cpu", "float32").generator
    for line in sys.stdin:
        before = time.process_time()
        prompts = case.prompts()[: int(line)]
        waiting = [SampleWork(key, prompt, case.params, case.samples) for key, prompt in enumerate(prompts)]
        free = AT_ONCE
        while waiting or free < AT_ONCE:
            taken, waiting = waiting[:free], waiting[free:]
            for work in taken:
                generator.add(work)
            free += len(generator.step()) - len(taken)
        print(time.process_time() - before, flush=True)


def print_replicas(cluster: RayHead) -> None:
    print("\n| two replicas with a thread each | one (tokens/s) | two (tokens/s) | ratio | ceiling | bar |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for case in DRAWING:
        with ExitStack() as stack:
            folder = folder_of(case.model, stack)
            sides: dict[str, Callable[[], Spent]] = {}
            for number in (1, 2):
                options = f"--ray={cluster.address}", f"--sample-workers={number}"
                url, client = stack.enter_context(serving(folder, *options))
                sides[f"{number} on Ray"] = Drawing(url, client, case).round
                engines = Engines(folder, case, number)
                stack.callback(engines.close)
                sides[f"{number} alone"] = engines.round
            spent = in_turns(sides, DRAWING_TURNS)
        for way in Spent._fields:
            medians = {side: statistics.median(getattr(each, way) for each in those) for side, those in spent.items()}
            ratios = {where: medians[f"1 {where}"] / medians[f"2 {where}"] for where in ("on Ray", "alone")}
            one, two = (case.num_tokens / medians[f"{number} on Ray"] for number in (1, 2))
            ratio = ratios["on Ray"]
            bar = f"{BAR_RATIO}{'' if ratio >= BAR_RATIO else ' MISSED'}"
            work = f"{case.num_prompts} prompts x {case.samples} samples of {case.tokens} tokens"
            figure = f"{case.model}, {work}, by {way} time"
            print(f"| {figure} | {one:,.0f} | {two:,.0f} | {ratio:.2f} | {ratios['alone']:.2f} | {bar} |", flush=True)


def folder_of(model: str, stack: ExitStack) -> str:
    if model == "135M":
        return _engine.model_folder()
    from tests.server.tiny_models import save_model

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return str(save_model(folder, "qwen3", max_position_embeddings=512))


def in_turns(sides: dict[str, Callable[[], Spent]], turns: int) -> dict[str, list[Spent]]:
    spent: dict[str, list[Spent]] = {side: [] for side in sides}
    for turn in range(turns + 1):
        for side, work in sides.items():
            done = work()
            if turn:  # the first one fills caches and opens connections
                spent[side].append(done)
    return spent


def main() -> None:
    with RayHead() as cluster:
        os.environ.update(cluster.environment)
        print_ways(cluster)
        print_replicas(cluster)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--draw"]:
        draw(sys.argv[2], Case("", *map(int, sys.argv[3:])))
    else:
        main()
