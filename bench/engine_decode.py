"""Sampling from the 135M model with a LoRA adapter on the CPU: tokens/s against transformers with peft.

Bars: at least 1.3 times the peer's tokens/s at batch 1 and 8, and 1.5 times at batch 32; 3 times for eight samples of
one long prompt; and from the start of the process to the first token at most half the time.

A round is whole requests, from prompts to the last token. Prompts are new in every round, so that nothing is found in
a cache; the peer's adapter has the dtype of its model, with which it is fastest.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import _engine
from _engine import DTYPES, OURS, RANK, Round, Row
from engine_training import peft_model

ROUNDS = 7
PEER = "peft"
PEER_WITHOUT_ADAPTER = "transformers"
VOCAB = 49_152


class Case(NamedTuple):
    dtype: str
    bar: float
    prompts: int = 1
    samples: int = 1
    """Of each prompt."""
    prompt_tokens: int = 64
    new_tokens: int = 64

    @property
    def num_tokens(self) -> int:
        return self.prompts * self.samples * self.new_tokens


CASES = {
    f"{name}-{dtype}": case._replace(dtype=dtype)
    for dtype in DTYPES
    for name, case in {
        "decode-b1": Case("", 1.3, prompts=1),
        "decode-b8": Case("", 1.3, prompts=8),
        "decode-b32": Case("", 1.5, prompts=32),
        "samples-8": Case("", 3.0, samples=8, prompt_tokens=512, new_tokens=32),
        "start": Case("", 0.5, new_tokens=1),
    }.items()
}


def prompts(case: Case, number: int) -> list[list[int]]:
    import numpy as np

    rows: list[list[int]] = (
        np.random.default_rng(number).integers(0, VOCAB, (case.prompts, case.prompt_tokens)).tolist()
    )
    return rows


# --- whole requests --------------------------------------------------------------------------------------------------


def ours(case: Case) -> Round:
    import torch

    from tinsmith.server.engine.adapters import AdapterSpec
    from tinsmith.server.engine.engine import Engine
    from tinsmith.server.engine.running import SampleWork
    from tinsmith.types import SamplingParams

    torch.set_num_threads(_engine.THREADS)
    engine = Engine.open(_engine.model_folder(), "cpu", DTYPES[case.dtype])
    adapter = engine.create_adapter(AdapterSpec(RANK, 0)).frozen_copy()
    params = SamplingParams(max_tokens=case.new_tokens, stop=[])

    def one_round(number: int) -> float:
        asked = prompts(case, number)
        start = time.perf_counter()
        for key, prompt in enumerate(asked):
            engine.generator.add(SampleWork(key, prompt, params, case.samples, adapter))
        done = []
        while engine.generator.has_work():
            done += engine.generator.step()
        spent = time.perf_counter() - start
        sampled = [sequence.tokens for each in done if each.response for sequence in each.response.sequences]
        assert sum(map(len, sampled)) == case.num_tokens
        return spent

    return one_round


def peft(case: Case) -> Round:
    import torch

    model = peft_model(case.dtype, adapter_in_float32=False).eval()

    def one_round(number: int) -> float:
        asked = torch.tensor(prompts(case, number))
        start = time.perf_counter()
        tokens = model.generate(
            input_ids=asked,
            attention_mask=torch.ones_like(asked),
            num_return_sequences=case.samples,
            max_new_tokens=case.new_tokens,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
        )
        spent = time.perf_counter() - start
        assert (tokens.shape[1] - case.prompt_tokens) * len(tokens) == case.num_tokens
        return spent

    return one_round


# --- from the start to the first token -------------------------------------------------------------------------------

# Run as `python -c`, because a bench file would bring imports of its own. Neither side has an adapter.
OUR_START = """
import torch
torch.set_num_threads({threads})
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.running import SampleWork
from tinsmith.types import SamplingParams
generator = Engine.open({folder!r}, "cpu", {dtype!r}).generator
generator.add(SampleWork(0, list(range({prompt_tokens})), SamplingParams(max_tokens=1)))
done = generator.step()
print(done[0].response.sequences[0].tokens, flush=True)
"""

THEIR_START = """
import torch
torch.set_num_threads({threads})
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({folder!r}, dtype=torch.{dtype})
prompt = torch.arange({prompt_tokens})[None]
print(model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1)[0, -1], flush=True)
"""


def started(text: str, case: Case) -> Round:
    facts = {"threads": _engine.THREADS, "folder": _engine.model_folder(), "prompt_tokens": case.prompt_tokens}
    command = [sys.executable, "-c", text.format(dtype=DTYPES[case.dtype], **facts)]

    def one_round(number: int) -> float:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first_token = process.stdout.readline()
            spent = time.perf_counter() - start
        assert first_token
        return spent

    return one_round


SIDES: dict[str, Callable[[Case], Round]] = {
    OURS: ours,
    PEER: peft,
    "start of tinsmith": partial(started, OUR_START),
    PEER_WITHOUT_ADAPTER: partial(started, THEIR_START),
}


# --- the table -------------------------------------------------------------------------------------------------------


def conduct(name: str, case: Case, rounds: int) -> Iterator[Row]:
    if name.startswith("start"):
        sides = "start of tinsmith", PEER_WITHOUT_ADAPTER
        results = _engine.in_turns(name, sides, rounds)
        mine, theirs = (_engine.seconds(results, side) for side in sides)
        ratio = _engine.time_ratio(results, *sides)
        yield Row(f"{name}: to the first token (s)", sides[1], theirs, mine, ratio, case.bar, False, decimals=2)
        return
    results = _engine.in_turns(name, [OURS, PEER], rounds)
    theirs, mine = (case.num_tokens / _engine.seconds(results, side) for side in (PEER, OURS))
    yield Row(f"{name}: tokens/s", PEER, theirs, mine, _engine.time_ratio(results, PEER, OURS), case.bar)


if __name__ == "__main__":
    _engine.play(CASES, SIDES, conduct, ROUNDS)
