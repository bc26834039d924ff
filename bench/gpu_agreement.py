"""One policy: what the sampler says of the tokens it drew against what the trainer says of them, in bfloat16 on a GPU.

Bar: a KL divergence below 1e-4 nats per token, over 10,000 tokens drawn at temperature 1 from a model of the 1.7B shape
with an adapter. The estimate of the divergence is the mean of r - 1 - log r with r the ratio of probabilities.

With random weights the distribution is nearly flat. The second row multiplies all logits by 4, which makes it about
as sharp as that of a trained model, and every difference 4 times as large.
"""

from __future__ import annotations

import numpy as np
from _gpu import Row, alone, our_adapter, our_engine, print_table

from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.running import SampleWork
from tinsmith.types import SamplingParams

VOCAB = 151936
PROMPTS, PROMPT, NEW = 64, 64, 160


def differences(sharpness: float) -> np.ndarray:
    """Log-probabilities by the trainer less those by the sampler."""
    with alone():
        engine = our_engine("1.7B", kv_tokens=2**17)
        engine.model.final_norm.mul_(sharpness)
        adapter = our_adapter(engine)
        frozen, running = adapter.frozen_copy(), engine.generator
        prompts = np.random.default_rng(0).integers(0, VOCAB, (PROMPTS, PROMPT))
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=NEW, stop=[], seed=index)
            running.add(SampleWork(index, prompt.tolist(), params, 1, frozen))
        drawn = {}
        while running.has_work():
            drawn |= {done.key: done.response.sequences[0] for done in running.step() if done.response is not None}
        rows = []
        for index, prompt in enumerate(prompts):
            whole = np.concatenate([prompt, drawn[index].tokens_np])
            inputs = {"target_tokens": whole[1:], "weights": np.ones(len(whole) - 1, np.float32)}
            rows.append(TrainRow(adapter, whole[:-1], "cross_entropy", inputs, backward=False))
        trained = engine.forward_backward(rows)
        return np.concatenate([trained[index].logprobs[-NEW:] - drawn[index].logprobs_np for index in range(PROMPTS)])


def row(sharpness: float) -> Row:
    difference = differences(sharpness).astype(np.float64)
    divergence = float(np.mean(np.expm1(difference) - difference))
    figures = f"mean {np.abs(difference).mean():.4f}, max {np.abs(difference).max():.3f}"
    return Row(f"{len(difference):,} tokens, logits x {sharpness:g}", figures, "", 1e-4 / divergence, 1,
               f"KL {divergence:.1e} nats per token")  # fmt: skip


def main() -> None:
    print_table([row(1), row(4)], "differences of log-probabilities, ours only")


if __name__ == "__main__":
    main()
