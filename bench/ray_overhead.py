"""What workers on a Ray cluster add to a request, and what a second sampler replica brings, all on this machine.

Bars: routing and the transfer of weights add at most 5 ms to a request; two replicas with one thread each draw at least
1.6 times the tokens/s of one.

The peer is the same server without Ray, one process for everything. Both are up together and take turns of a few
rounds on a model so small that the way is most of it; the best round of a turn counts, and figures are medians over the
turns. New weights reach a replica with the first sample of a new sampling client. The replicas draw with
the 135M model, from servers that are up one after the other's round.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import _engine
import harness

import tinsmith
from tests.support.ray_head import RayHead

TURNS = 15
ROUNDS_PER_TURN = 10
DRAWING_TURNS = 2
BAR_MS = 5.0
BAR_RATIO = 1.6
RANK = 32
PROMPT = tinsmith.ModelInput.from_ints(list(range(1, 9)))
ONE_TOKEN = tinsmith.SamplingParams(max_tokens=1, seed=1, stop=[])
MANY_TOKENS = tinsmith.SamplingParams(max_tokens=16, seed=1, stop=[])
NUM_SAMPLES = 192
"""Many: a replica that has few draws them all in the time of one, as each step reads the weights once."""

Round = Callable[[], float]
"""Gives the seconds it took."""


@contextmanager
def client_of(folder: str, *options: str) -> Iterator[tinsmith.ServiceClient]:
    """A client of `tinsmith serve` on a free port, as a user starts it."""
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
                    yield client
            finally:
                process.terminate()


def sampling(client: tinsmith.ServiceClient) -> Round:
    sampler = client.create_sampling_client(base_model="bench")

    return lambda: seconds(lambda: sampler.sample(PROMPT, 1, ONE_TOKEN).result())


def new_weights(client: tinsmith.ServiceClient) -> Round:
    model = client.create_lora_training_client("bench", rank=RANK, seed=1)
    return lambda: seconds(model.save_weights_and_get_sampling_client)


def first_token(client: tinsmith.ServiceClient) -> Round:
    model = client.create_lora_training_client("bench", rank=RANK, seed=1)

    def one_round() -> float:
        sampler = model.save_weights_and_get_sampling_client()
        return seconds(lambda: sampler.sample(PROMPT, 1, ONE_TOKEN).result())

    return one_round


def drawing(client: tinsmith.ServiceClient) -> Round:
    sampler = client.create_sampling_client(base_model="bench")

    def draw() -> None:
        prompts = [tinsmith.ModelInput.from_ints([number, *range(1, 9)]) for number in range(NUM_SAMPLES)]
        for future in [sampler.sample(prompt, 1, MANY_TOKENS) for prompt in prompts]:
            future.result()

    return lambda: seconds(draw)


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
    from tests.server.tiny_models import save_model

    print("| figure | one process (ms) | on Ray (ms) | added (ms) | bar |")
    print("| --- | ---: | ---: | ---: | --- |")
    with ExitStack() as stack:
        folder = str(save_model(Path(stack.enter_context(tempfile.TemporaryDirectory())), "qwen3"))
        plain = stack.enter_context(client_of(folder))
        on_ray = stack.enter_context(client_of(folder, f"--ray={cluster.address}", "--sample-workers=2"))
        for figure, make in (
            ("a sample of one token", sampling),
            ("a sampling client of a model's weights", new_weights),
            ("its first sample of one token", first_token),
        ):
            sides = {"plain": make(plain), "ray": make(on_ray)}
            times = best_of_turns(sides, TURNS, ROUNDS_PER_TURN)
            added = 1e3 * (times["ray"] - times["plain"])
            bar = f"{BAR_MS:.0f}{'' if added <= BAR_MS else ' MISSED'}"
            print(
                f"| {figure} | {1e3 * times['plain']:.1f} | {1e3 * times['ray']:.1f} | {added:.1f} | {bar} |",
                flush=True,
            )


def print_replicas(cluster: RayHead) -> None:
    print("\n| figure | 1 replica (tokens/s) | 2 replicas (tokens/s) | ratio | bar |")
    print("| --- | ---: | ---: | ---: | --- |")
    folder = _engine.model_folder()
    with ExitStack() as stack:
        sides = {}
        for number in (1, 2):
            options = f"--ray={cluster.address}", f"--sample-workers={number}"
            sides[str(number)] = drawing(stack.enter_context(client_of(folder, *options)))
        times = best_of_turns(sides, DRAWING_TURNS, 1)
    one, two = (NUM_SAMPLES * (MANY_TOKENS.max_tokens or 0) / times[name] for name in sides)
    bar = f"{BAR_RATIO}{'' if two / one >= BAR_RATIO else ' MISSED'}"
    print(
        f"| {NUM_SAMPLES} samples, 135M, 1 thread each | {one:.0f} | {two:.0f} | {two / one:.2f} | {bar} |", flush=True
    )


def main() -> None:
    with RayHead() as cluster:
        os.environ.update(cluster.environment)
        print_ways(cluster)
        print_replicas(cluster)


if __name__ == "__main__":
    main()
