"""Training the 135M model with a LoRA adapter on the CPU: tokens/s and peak memory against transformers with peft.

Bars: tokens/s at least 1.0 times the peer's in float32, 1.25 times in the mixed bfloat16 mode, 1.5 times when lengths
vary; peak memory at most 0.75 times; eight adapters in one batch at most 1.3 times the time of one adapter.

A round is a forward and backward pass over a batch and an optimizer step. There are two ways to use bfloat16 with peft:
autocast over bfloat16 weights, which like our mode keeps adapters in float32, and bfloat16 for everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import _engine
from _engine import DTYPES, OURS, RANK, Round, Row

ROUNDS = 5
ADAPTERS = 8
OURS_WITH_ONE_ADAPTER = "one adapter"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class Case(NamedTuple):
    dtype: str
    lengths: list[int]
    bar: float

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


EQUAL = [256] * 8
VARYING = [512, 32, 374, 237, 100, 443, 169, 306]
CASES = {
    "equal-fp32": Case("fp32", EQUAL, 1.0),
    "equal-bf16": Case("bf16", EQUAL, 1.25),
    "varying-fp32": Case("fp32", VARYING, 1.5),
    "varying-bf16": Case("bf16", VARYING, 1.5),
    "adapters-fp32": Case("fp32", EQUAL, 1.3),
    "adapters-bf16": Case("bf16", EQUAL, 1.3),
}
PEERS = {"fp32": ["peft"], "bf16": ["peft + autocast", "peft, all bf16"]}
MEMORY_BAR = 0.75


def token_rows(case: Case) -> list[Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.integers(0, 49_152, length + 1) for length in case.lengths]


# --- ours ------------------------------------------------------------------------------------------------------------


def ours(num_adapters: int, case: Case) -> Round:
    import numpy as np
    import torch

    from tinsmith.server.engine.adapters import AdapterSpec
    from tinsmith.server.engine.batch import TrainRow
    from tinsmith.server.engine.engine import Engine
    from tinsmith.types import AdamParams

    torch.set_num_threads(_engine.THREADS)
    engine = Engine.open(_engine.model_folder(), "cpu", DTYPES[case.dtype])
    adapters = [engine.create_adapter(AdapterSpec(RANK, seed)) for seed in range(num_adapters)]
    rows = [
        TrainRow(
            adapters[index % num_adapters],
            tokens[:-1],
            "cross_entropy",
            {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)},
        )
        for index, tokens in enumerate(token_rows(case))
    ]

    def one_round(number: int) -> float:
        start = time.perf_counter()
        outputs = engine.forward_backward(rows)
        for adapter in adapters:
            engine.optim_step(adapter, AdamParams(learning_rate=1e-4))
        spent = time.perf_counter() - start
        assert not any(output.error for output in outputs)
        return spent

    return one_round


# --- the peer --------------------------------------------------------------------------------------------------------


def peft_model(dtype: str, *, adapter_in_float32: bool) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(_engine.THREADS)
    model = AutoModelForCausalLM.from_pretrained(_engine.model_folder(), dtype=getattr(torch, DTYPES[dtype]))
    model.config.tie_word_embeddings = False  # only silences a warning about merging
    config = LoraConfig(r=RANK, lora_alpha=32, target_modules=MODULES)
    return get_peft_model(model, config, autocast_adapter_dtype=adapter_in_float32)


def padded(case: Case) -> dict[str, Any]:
    """The batch as transformers takes it: inputs and labels of one length, and a mask where that is needed."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.from_numpy(tokens) for tokens in token_rows(case)]
    batch = {
        "input_ids": pad_sequence([row[:-1] for row in rows], batch_first=True),
        "shift_labels": pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100),
    }
    if len(set(case.lengths)) > 1:
        batch["attention_mask"] = (batch["shift_labels"] != -100).long()
    return batch | {"labels": batch["shift_labels"]}


def peft(case: Case, *, adapter_in_float32: bool = True, autocast: bool = False) -> Round:
    import torch

    model = peft_model(case.dtype, adapter_in_float32=adapter_in_float32)
    batch = padded(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def one_round(number: int) -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return one_round


SIDES: dict[str, Callable[[Case], Round]] = {
    OURS: partial(ours, 1),
    f"{ADAPTERS} adapters": partial(ours, ADAPTERS),
    OURS_WITH_ONE_ADAPTER: partial(ours, 1),
    "peft": peft,
    "peft + autocast": partial(peft, autocast=True),
    "peft, all bf16": partial(peft, adapter_in_float32=False),
}


# --- the table -------------------------------------------------------------------------------------------------------


def conduct(name: str, case: Case, rounds: int) -> Iterator[Row]:
    return many_adapters(name, case, rounds) if name.startswith("adapters") else against_peft(name, case, rounds)


def against_peft(name: str, case: Case, rounds: int) -> Iterator[Row]:
    results = _engine.in_turns(name, [OURS, *PEERS[case.dtype]], rounds)
    for peer in PEERS[case.dtype]:
        theirs, mine = (case.num_tokens / _engine.seconds(results, side) for side in (peer, OURS))
        yield Row(f"{name}: tokens/s", peer, theirs, mine, _engine.time_ratio(results, peer, OURS), case.bar)
    for each in PEERS[case.dtype]:
        peaks = _engine.peak_mb(results, each), _engine.peak_mb(results, OURS)
        yield Row(f"{name}: peak memory (MB)", each, *peaks, peaks[1] / peaks[0], MEMORY_BAR, at_least=False)


def many_adapters(name: str, case: Case, rounds: int) -> Iterator[Row]:
    many, one = f"{ADAPTERS} adapters", OURS_WITH_ONE_ADAPTER
    results = _engine.in_turns(name, [many, one], rounds)
    spent = _engine.seconds(results, one), _engine.seconds(results, many)
    ratio = _engine.time_ratio(results, many, one)
    yield Row(f"{name}: {ADAPTERS} in a batch (s)", one, *spent, ratio, case.bar, at_least=False, decimals=2)


if __name__ == "__main__":
    _engine.play(CASES, SIDES, conduct, ROUNDS)
