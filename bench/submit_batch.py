"""How long a training batch is on its way: from the caller's lists to the server's last byte, and to the result."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import harness
from harness import Numbers, Peer, Row

RUNS = 5
BATCHES = 15
DATA = 128
TOKENS = 2_048


def measure(sdk: ModuleType, url: str) -> list[Numbers]:
    client = harness.service(sdk, url).create_lora_training_client("tiny/model-1", rank=8).result()
    submit(sdk, client)  # connections, flags and lazy imports are not what is measured
    return [submit(sdk, client) for _ in range(BATCHES)]


def submit(sdk: ModuleType, client: Any) -> Numbers:
    """Points on the monotonic clock, which is the same in all processes of a machine, and the CPU used."""
    tokens = [list(range(i, i + TOKENS)) for i in range(DATA)]
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
    client.forward_backward(data, "cross_entropy").result()
    return {"start": start, "built": built, "done": time.monotonic(), "cpu": time.process_time() - cpu}


def one_run(peer: Peer) -> Numbers:
    """Milliseconds per stage, each the best of a process's batches."""
    from tests.support.server import FakeServer

    with FakeServer() as server:
        batches = harness.measured(peer, url=server.url)
        arrivals = [request.arrived for request in server.received("forward_backward")]
    return harness.best([_stages(batch, arrivals) for batch in batches])


def _stages(batch: Numbers, arrivals: list[float]) -> Numbers:
    arrived = max(time for time in arrivals if batch["start"] < time < batch["done"])
    points = {
        "build": (batch["start"], batch["built"]),
        "submit": (batch["built"], arrived),
        "both": (batch["start"], arrived),
        "result": (batch["start"], batch["done"]),
    }
    return {name: 1e3 * (end - begin) for name, (begin, end) in points.items()} | {"cpu": 1e3 * batch["cpu"]}


def conduct() -> None:
    official, ours = harness.in_turns(RUNS, one_run)
    build, submit, both, result, cpu = (harness.both(official, ours, name) for name in ours)
    print(f"A batch of {DATA} x {TOKENS:,} tokens")
    harness.print_table(
        [
            Row("lists to data (ms)", build),
            Row("data to the server's last byte (ms)", submit),
            Row("lists to the server's last byte (ms)", both, "half", 2 * both[1] <= both[0]),
            Row("lists to the result, the stub's work included (ms)", result),
            Row("client CPU for all of it (ms)", cpu),
        ]
    )


if __name__ == "__main__":
    harness.play(conduct, measure)
