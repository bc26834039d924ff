"""The server against `skyrl` 0.3.0 (`skyrl-tx`, JAX) on the same tiny random model: every line is to be better.

Both run as their users start them, on this CPU, in float32, side by side, and take turns: a busy machine is busy for
both. They get the same plain JSON over HTTP, because the official client is no common ground: from 0.25 on it sends
protobuf, which skyrl does not read, and 0.36 needs the names of the sequences to come, which skyrl does not tell.

"First" is the first request of a shape. There the peer compiles, and it tells shapes apart by the number of sequences,
their greatest length (rounded up) and the number of new tokens. "Warm" is the median of the rounds after it. Requests
that are sent together are no one shape for the peer: how many of them it finds when it next looks is chance.

The first run makes an environment of 2 GB. A run takes four minutes, or seven on a busy machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from _engine import Done, Results, Row, print_line, seconds, time_ratio
from _server import BASE_MODEL, Server, Tenant, free_port
from environments import python_of
from harness import clean_environment

ROUNDS = 5
OURS, PEER = "tinsmith", "skyrl"
CONTEXT = 1024

EQUAL = [128] * 8
ONE_EACH = [128]
VARYING = ([90, 31, 66, 52, 17, 84, 70], [20, 180, 64, 35, 192, 110])
"""Two batches that have neither their number of sequences nor their greatest length in common."""

# skyrl 0.3.0 says that it runs on Python 3.11, but pydantic refuses one of its types there.
FIT_FOR_311 = "import typing, typing_extensions\ntyping.TypedDict = typing_extensions.TypedDict\n"


# --- the two servers -------------------------------------------------------------------------------------------------


def ours(folder: Path) -> Server:
    port = free_port()
    options = ["--model", f"{BASE_MODEL}={folder / BASE_MODEL}", "--state", str(folder / OURS), "--port", str(port)]
    command = [str(Path(sys.executable).with_name("tinsmith")), "serve", *options, "--dtype", "float32"]
    return Server(OURS, folder, port, command, clean_environment())


def peer(folder: Path) -> Server:
    """It starts its engine with the `uv run` it finds its own process under."""
    port = free_port()
    environment, database = python_of("skyrl").parents[1], folder / "skyrl.db"
    (folder / "sitecustomize.py").write_text(FIT_FOR_311 if sys.version_info < (3, 12) else "")
    variables = clean_environment() | {
        "VIRTUAL_ENV": str(environment),
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "HF_HUB_OFFLINE": "1",
    }
    options = ["--base-model", BASE_MODEL, "--backend", "jax", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--database-url", f"sqlite:///{database}", "--checkpoints-base", str(folder / "checkpoints")]
    command = [str(environment / "bin" / "uv"), "run", "--no-project", "-m", "skyrl.tinker.api", *options]
    return Server(PEER, folder, port, command, variables)


def write_model(folder: Path) -> None:
    import transformers

    from tests.server.tiny_models import save_model
    from tests.support.tiny_tokenizer import byte_level_bpe

    transformers.utils.logging.disable_progress_bar()
    tokenizer = byte_level_bpe()
    save_model(folder, "qwen3", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=CONTEXT)
    tokenizer.save(str(folder / "tokenizer.json"))


class Side:
    """A server, and what its one tenant has there."""

    def __init__(self, server: Server, started: float) -> None:
        self.server = server
        server.wait_until_open()
        tenant = Tenant(server)
        self.model = tenant.create_model()
        self.seconds_to_first_model = time.perf_counter() - started
        self.eight_models = [tenant.create_model() for _ in range(8)]
        self.sampler = self.model.create_sampler()


@contextmanager
def both_sides() -> Iterator[dict[str, Side]]:
    """The peer has the machine to itself while it starts; we have the peer beside us."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / BASE_MODEL)
        python_of("skyrl")
        started = time.perf_counter()
        with peer(folder) as theirs:
            sides = {PEER: Side(theirs, started)}
            started = time.perf_counter()
            with ours(folder) as mine:
                yield sides | {OURS: Side(mine, started)}


# --- the work --------------------------------------------------------------------------------------------------------


def timed(work: Callable[[Side], object]) -> Callable[[Side], float]:
    def spent(side: Side) -> float:
        start = time.perf_counter()
        work(side)
        return time.perf_counter() - start

    return spent


def train_varying(side: Side) -> None:
    for lengths in VARYING:
        side.model.step(lengths)


def train_one_model(side: Side) -> None:
    side.model.forward_backward(EQUAL).result()


def train_eight_models(side: Side) -> None:
    for accepted in [model.forward_backward(ONE_EACH) for model in side.eight_models]:
        accepted.result()


def sample_for_many(side: Side) -> None:
    for accepted in [side.sampler.sample(64, 64) for _ in range(32)]:
        accepted.result()


def step_behind_samples(side: Side) -> float:
    """Only the step counts, which is sent when the samples are under way."""
    samples = side.sampler.sample(64, 512, samples=32)
    time.sleep(0.2)
    spent = timed(lambda side: side.model.step([1]))(side)
    samples.result()
    return spent


def sampling(prompt_tokens: int, new_tokens: int, samples: int) -> Callable[[Side], float]:
    return timed(lambda side: side.sampler.sample(prompt_tokens, new_tokens, samples).result())


class Case(NamedTuple):
    figure: str
    spent: Callable[[Side], float]
    """The seconds of one round."""
    tokens: int = 0
    """Of one round; if there are none, the figure is the time."""
    brings_shape: bool = True
    """Whether the first round has a shape that no case before it had."""
    rounds: int = ROUNDS


CASES = [
    Case("smallest training step (ms)", timed(lambda side: side.model.step([1]))),
    Case("forward of one token (ms)", timed(lambda side: side.model.forward([1]).result())),
    Case("new sampler (ms)", timed(lambda side: side.model.create_sampler()), brings_shape=False),
    Case("train, 8 x 128 (tokens/s)", timed(lambda side: side.model.step(EQUAL)), sum(EQUAL)),
    Case("train, varying lengths (tokens/s)", timed(train_varying), sum(map(sum, VARYING))),
    Case("one model, gradients of 8 x 128 (ms)", timed(train_one_model), brings_shape=False),
    Case("eight models, gradients of 128 each (ms)", timed(train_eight_models), brings_shape=False),
    Case("sample, batch 1 (tokens/s)", sampling(64, 64, 1), 64),
    Case("sample, batch 8 (tokens/s)", sampling(64, 64, 8), 8 * 64),
    Case("sample, batch 32 (tokens/s)", sampling(64, 64, 32), 32 * 64),
    Case("sample, batch 1, 512 new (tokens/s)", sampling(64, 512, 1), 512),
    Case("sample, batch 8, 512 new (tokens/s)", sampling(64, 512, 8), 8 * 512),
    Case("sample, batch 8, 512 prompt (tokens/s)", sampling(512, 32, 8), 8 * 32),
    Case("sample, 32 requests at once (tokens/s)", timed(sample_for_many), 32 * 64, brings_shape=False, rounds=3),
    Case("smallest step behind 32 x 512 new (ms)", step_behind_samples, rounds=3),
]


# --- the table -------------------------------------------------------------------------------------------------------


def in_turns(case: Case, sides: Mapping[str, Side]) -> Results:
    results: dict[str, list[Done]] = {name: [] for name in sides}
    for number in range(case.rounds):
        for name, side in list(sides.items())[:: 1 if number % 2 else -1]:
            results[name].append(Done(case.spent(side), side.server.peak_mb()))
    return results


def rows_of(case: Case, results: Results) -> Iterator[Row]:
    if case.brings_shape:
        yield row_of(case, f"{PEER}, first", {name: rounds[:1] for name, rounds in results.items()})
        results = {name: rounds[1:] for name, rounds in results.items()}
    yield row_of(case, f"{PEER}, warm", results)


def row_of(case: Case, peer: str, results: Results) -> Row:
    theirs, mine = seconds(results, PEER), seconds(results, OURS)
    if case.tokens:
        ratio = time_ratio(results, PEER, OURS)
        return Row(case.figure, peer, case.tokens / theirs, case.tokens / mine, ratio, 1.0)
    ratio = time_ratio(results, OURS, PEER)
    return Row(case.figure, peer, 1e3 * theirs, 1e3 * mine, ratio, 1.0, at_least=False, decimals=1)


def compared(figure: str, values: Mapping[str, float], decimals: int) -> Row:
    theirs, mine = values[PEER], values[OURS]
    return Row(figure, PEER, theirs, mine, mine / theirs, 1.0, at_least=False, decimals=decimals)


def rows(sides: Mapping[str, Side]) -> Iterator[Row]:
    starts = {name: side.seconds_to_first_model for name, side in sides.items()}
    yield compared("start to the first model (s)", starts, decimals=1)
    for case in CASES:
        yield from rows_of(case, in_turns(case, sides))
    peaks = {name: side.server.peak_mb() for name, side in sides.items()}
    yield compared("peak memory (MB)", peaks, decimals=0)


def conduct() -> None:
    with both_sides() as sides:
        print_line("figure", "peer", "peer's", "tinsmith", "ratio", "bar")
        for row in rows(sides):
            print_line(*row.cells)


if __name__ == "__main__":
    conduct()
