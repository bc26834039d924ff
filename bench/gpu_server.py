"""The whole server on one GPU: training and sampling through HTTP, store and worker, against the bare engine.

Bar: nine tenths of the tokens/s that the engine reaches by itself in the same run, on the same weights and work.

    PYTHONPATH=FOLDER python3 bench/gpu_server.py             # FOLDER: what the server imports and is not installed
    python3 bench/gpu_server.py --shape tiny --rounds 3       # a try on the CPU
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _gpu import CONFIGS, RANK

import tinsmith
from tinsmith.server.engine.adapters import AdapterSpec
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.running import SampleWork

SHARE_OF_ENGINE = 0.9
START_SECONDS = 300
KEY = "tml-bench"
STEP = tinsmith.AdamParams(learning_rate=1e-4)


class Work(NamedTuple):
    """What both sides do."""

    config: dict[str, Any]
    rows: int
    length: int
    samples: int
    of_prompt: int
    """Samples of one prompt, where a prompt has several."""
    prompt: int
    new: int
    rounds: int

    def tokens(self, *size: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng().integers(0, self.config["vocab_size"], size)

    @property
    def trained_tokens(self) -> int:
        return self.rows * self.length

    @property
    def params(self) -> tinsmith.SamplingParams:
        return tinsmith.SamplingParams(max_tokens=self.new, stop=[])


TINY = {**CONFIGS["1.7B"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SHAPES = {
    "tiny": Work(TINY, rows=4, length=64, samples=16, of_prompt=4, prompt=16, new=16, rounds=5),
    "1.7B": Work(CONFIGS["1.7B"], rows=8, length=2048, samples=1024, of_prompt=16, prompt=128, new=128, rounds=20),
    "8B": Work(CONFIGS["8B"], rows=4, length=2048, samples=1024, of_prompt=16, prompt=128, new=128, rounds=10),
}


def save_random_model(folder: Path, config: dict[str, Any]) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # the server looks how much is free
    return folder


# --- the two sides ---------------------------------------------------------------------------------------------------


class Bare:
    """The engine's own calls, one after the other."""

    def __init__(self, folder: Path, work: Work) -> None:
        self._work = work
        self._engine = Engine.open(folder)
        self._adapter = self._engine.create_adapter(AdapterSpec(RANK, seed=1))

    def train(self, steps: int) -> None:
        work = self._work
        for _ in range(steps):
            rows = [
                TrainRow(self._adapter, tokens, "cross_entropy", {"target_tokens": targets, "weights": weights})
                for tokens, targets in zip(*work.tokens(2, work.rows, work.length), strict=True)
                for weights in [np.ones(work.length, np.float32)]
            ]
            assert all(output.error is None for output in self._engine.forward_backward(rows))
            self._engine.optim_step(self._adapter, STEP)

    def sample(self, prompts: int, params: tinsmith.SamplingParams, of_prompt: int = 1) -> None:
        frozen, running = self._adapter.frozen_copy(), self._engine.generator
        for index, prompt in enumerate(self._work.tokens(prompts, self._work.prompt).tolist()):
            running.add(SampleWork(index, prompt, params, of_prompt, frozen))
        while running.has_work():
            assert all(done.error is None for done in running.step())


class Served:
    """The same through a client, as a program would do it: one step is on its way while the last is waited for."""

    def __init__(self, client: tinsmith.ServiceClient, work: Work) -> None:
        self._work = work
        self._model = client.create_lora_training_client("bench", rank=RANK, seed=1).result()

    def train(self, steps: int) -> None:
        ahead: list[tinsmith.APIFuture[Any]] = []
        for _ in range(steps):
            sent = [self._model.forward_backward(self._data(), "cross_entropy"), self._model.optim_step(STEP)]
            for future in ahead:
                future.result()
            ahead = sent
        for future in ahead:
            future.result()

    def sample(self, prompts: int, params: tinsmith.SamplingParams, of_prompt: int = 1) -> None:
        """From the weights as they are now."""
        sampler = self._model.save_weights_and_get_sampling_client().result()
        all_tokens = self._work.tokens(prompts, self._work.prompt).tolist()
        inputs = [tinsmith.ModelInput.from_ints(tokens) for tokens in all_tokens]
        for future in [sampler.sample(each, of_prompt, params) for each in inputs]:
            future.result()

    def _data(self) -> list[tinsmith.Datum]:
        work = self._work
        return [
            tinsmith.Datum(
                tinsmith.ModelInput.from_ints(tokens.tolist()),
                {"target_tokens": targets, "weights": np.ones(work.length, np.float32)},
            )
            for tokens, targets in zip(*work.tokens(2, work.rows, work.length), strict=True)
        ]


@contextmanager
def served(folder: Path, state: Path, work: Work) -> Iterator[Served]:
    """`tinsmith serve` on a free port, with all of the GPU; its log is shown if it does not start."""
    command = [sys.executable, "-c", "from tinsmith.cli import main; main()", "serve"]
    options = [f"--model=bench={folder}", f"--state={state}", "--port=0"]
    source = Path(__file__).parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    with (
        (state.parent / "server.log").open("w+") as log,
        subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        ready = re.match(r"Tinsmith is ready at (\S+)", process.stdout.readline())
        try:
            if not ready:
                process.wait(START_SECONDS)
                raise RuntimeError(f"The server did not start:\n{Path(log.name).read_text()[-4000:]}")
            with tinsmith.ServiceClient(base_url=ready[1], api_key=KEY) as client:
                yield Served(client, work)
        finally:
            process.terminate()


# --- figures ---------------------------------------------------------------------------------------------------------


class Figures(NamedTuple):
    train: float
    """Tokens a second."""
    sample: float
    """New tokens a second, from the first request to the last result, of requests for one sample each."""
    group: float
    """The same of requests for several samples of a prompt."""
    fresh: float
    """Seconds from the end of a training step to a token of its weights."""


def figures(side: Bare | Served, work: Work) -> Figures:
    one_token = tinsmith.SamplingParams(max_tokens=1, stop=[])
    train = median_seconds(lambda: side.train(work.rounds)) / work.rounds
    sample = median_seconds(lambda: side.sample(work.samples, work.params))
    group = median_seconds(lambda: side.sample(work.samples // work.of_prompt, work.params, work.of_prompt))
    fresh = median_seconds(lambda: side.sample(1, one_token), before=lambda: side.train(1))
    new_tokens = work.samples * work.new
    return Figures(work.trained_tokens / train, new_tokens / sample, new_tokens / group, fresh)


def median_seconds(measured: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Of three, after one that fills caches and compiles kernels."""
    times = []
    for _ in range(4):
        before()
        begin = time.perf_counter()
        measured()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def print_table(shape: str, ours: Figures, bare: Figures, start: float) -> None:
    print(f"\nThe server was ready after {start:.1f} s.\n")
    print("| work | through the server | bare engine | ratio | bar |\n| --- | --- | --- | --- | --- |")
    work = SHAPES[shape]
    requests = {
        "train": f"train {shape}, steps of {work.rows} x {work.length:,}",
        "sample": f"sample {shape}, {work.samples:,} requests",
        "group": f"sample {shape}, {work.samples // work.of_prompt} requests for {work.of_prompt} samples each",
    }
    for name, title in requests.items():
        served, alone = getattr(ours, name), getattr(bare, name)
        mark = "" if served / alone >= SHARE_OF_ENGINE else " MISSED"
        print(
            f"| {title} | {served:,.0f} tok/s | {alone:,.0f} tok/s | {served / alone:.2f} | {SHARE_OF_ENGINE}{mark} |"
        )
    print(f"| a token of fresh weights, {shape} | {ours.fresh * 1e3:.1f} ms | {bare.fresh * 1e3:.1f} ms | | - |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.7B")
    parser.add_argument("--rounds", type=int, help="training steps in one measurement")
    options = parser.parse_args()
    work = SHAPES[options.shape]
    work = work._replace(rounds=options.rounds or work.rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = save_random_model(Path(name) / "model", work.config)
        begin = time.perf_counter()
        with served(folder, Path(name) / "state", work) as side:
            start = time.perf_counter() - begin
            ours = figures(side, work)
        bare = figures(Bare(folder, work), work)
    print_table(options.shape, ours, bare, start)


if __name__ == "__main__":
    main()
