"""How long a training batch is on its way: from the caller's lists to the server's last byte, and to the result.

The stub server answers every chunk at once and makes up the results, so that what is left is the client's part.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import harness
from harness import Numbers, Row

RUNS = 5
BATCHES = 5
DATA = 128
TOKENS = 2_048


def measure(sdk: ModuleType, url: str) -> Numbers:
    """All times are of the monotonic clock, which is the same in all processes of a machine."""
    client = harness.service(sdk, url).create_lora_training_client("tiny/model-1", rank=8)
    submit(sdk, client, 2)  # connections, flags and lazy imports are not what is measured
    runs = [submit(sdk, client, DATA) for _ in range(BATCHES)]
    return harness.median(runs)


def submit(sdk: ModuleType, client: Any, count: int) -> Numbers:
    tokens = [list(range(i, i + TOKENS)) for i in range(count)]
    weights = [1.0] * TOKENS
    start, cpu = time.monotonic(), time.process_time()
    data = [
        sdk.types.Datum(
            model_input=sdk.types.ModelInput.from_ints(each),
            loss_fn_inputs={"target_tokens": each, "weights": weights},
        )
        for each in tokens
    ]
    built = time.monotonic()
    step = client.forward_backward(data, "cross_entropy")
    # Operations of a model leave in order: once this one has arrived, so has the whole batch.
    client.save_state("marker", overwrite=True).result()
    arrived = time.monotonic()
    step.result()
    done = time.monotonic()
    return {
        "build": 1e3 * (built - start),
        "submit": 1e3 * (arrived - built),
        "whole": 1e3 * (arrived - start),
        "result": 1e3 * (done - start),
        "cpu": 1e3 * (time.process_time() - cpu),
    }
