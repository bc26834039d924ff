"""Training on one GPU: tokens/s of a forward and backward pass with an optimizer step, against transformers with peft.

Bars (H200): 2.1 times peft for 8B at 4 x 2,048 with at most half its memory, and 65 % of the rate of a large matrix
product, counting 4 FLOP for each parameter and token; 2.7 times for 1.7B at 8 x 2,048; 3 times for lengths drawn from
64 to 2,048, which the peer pads; eight adapters in a batch take at most 1.15 times the time of one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from _gpu import (
    DEVICE,
    GIB,
    Row,
    alone,
    matrix_parameters,
    matrix_rate,
    median_seconds,
    our_adapter,
    our_engine,
    peer_model,
    print_table,
)

from tinsmith.server.engine.adapters import Adapter
from tinsmith.server.engine.batch import TrainRow
from tinsmith.types import AdamParams

VOCAB = 151936


def varied_lengths() -> list[int]:
    return [int(length) for length in np.random.default_rng(0).integers(64, 2049, 16)]


def our_step(name: str, lengths: Sequence[int], num_adapters: int = 1) -> tuple[float, float]:
    """Seconds of a step, and the GiB it took at most."""
    with alone():
        engine = our_engine(name)
        adapters = [our_adapter(engine, seed) for seed in range(num_adapters)]
        rng = np.random.default_rng(1)
        rows = [_row(adapters[index % num_adapters], length, rng) for index, length in enumerate(lengths)]

        def step() -> None:
            assert all(output.error is None for output in engine.forward_backward(rows))
            for adapter in adapters:
                engine.optim_step(adapter, AdamParams(learning_rate=1e-4))

        return median_seconds(step), torch.cuda.max_memory_allocated() / GIB


def _row(adapter: Adapter, length: int, rng: np.random.Generator) -> TrainRow:
    tokens, targets = rng.integers(0, VOCAB, (2, length))
    inputs = {"target_tokens": targets, "weights": np.ones(length, np.float32)}
    return TrainRow(adapter, tokens, "cross_entropy", inputs)


def peer_step(name: str, lengths: Sequence[int]) -> tuple[float, float]:
    """The same with peft, rows padded to the longest, in as few batches as memory allows (16,384 tokens)."""
    with alone():
        model = peer_model(name, adapter=True).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        per_batch = max(1, 16384 // max(lengths))

        def step() -> None:
            for first in range(0, len(lengths), per_batch):
                part = lengths[first : first + per_batch]
                tokens = torch.randint(0, VOCAB, (len(part), max(part)), device=DEVICE)
                is_there = torch.arange(max(part), device=DEVICE) < torch.tensor(part, device=DEVICE)[:, None]
                labels = tokens.masked_fill(~is_there, -100)
                mask = None if bool(is_there.all()) else is_there
                model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return median_seconds(step), torch.cuda.max_memory_allocated() / GIB


def against_peft(name: str, lengths: Sequence[int], bar: float, work: str, rate: float) -> list[Row]:
    (ours, our_memory), (peer, peer_memory) = our_step(name, lengths), peer_step(name, lengths)
    num_tokens = sum(lengths)
    share = 4 * matrix_parameters(name) * num_tokens / ours / rate
    figures = [f"{num_tokens / time:,.0f} tok/s, {memory:.0f} GiB"
               for time, memory in ((ours, our_memory), (peer, peer_memory))]  # fmt: skip
    rows = [Row(f"train {name}, {work}", *figures, peer / ours, bar, f"{share:.0%} of the matrix rate")]
    if name == "8B":
        lasting = matrix_rate(2000)
        note = f"{share * rate / lasting:.2f} of {lasting / 1e12:.0f} TFLOP/s, the rate over seconds"
        rows.append(Row("its share of the matrix rate", f"{share:.2f}", "", share, 0.65, note))
        rows.append(Row("half the peer's memory over ours", f"{our_memory:.0f} GiB", f"{peer_memory:.0f} GiB",
                        peer_memory / 2 / our_memory, 1))  # fmt: skip
    return rows


def many_adapters(name: str, lengths: Sequence[int]) -> Row:
    (many, _), (one, _) = our_step(name, lengths, 8), our_step(name, lengths)
    return Row(f"train {name}, 8 adapters mixed", f"{many * 1000:.0f} ms", f"one adapter {one * 1000:.0f} ms",
               one / many, 1 / 1.15)  # fmt: skip


def main() -> None:
    rate = matrix_rate()
    cases = {
        "8b": lambda: against_peft("8B", [2048] * 4, 2.1, "4 x 2,048", rate),
        "1.7b": lambda: against_peft("1.7B", [2048] * 8, 2.7, "8 x 2,048", rate),
        "varied": lambda: against_peft("1.7B", varied_lengths(), 3, "16 lengths of 64 to 2,048", rate),
        "adapters": lambda: [many_adapters("8B", [1024] * 8)],
    }
    rows = [row for name, case in cases.items() if name in (sys.argv[1:] or cases) for row in case()]
    print_table(rows, f"matrix products {rate / 1e12:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
