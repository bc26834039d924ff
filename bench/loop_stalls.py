"""How long event loops stand still: the package's own while it encodes, and the caller's in async methods.

The package's loop carries heartbeats, polls and every other call. It is found among the running loops of the process,
so that no package has to be known from inside. A busy machine stalls loops too; the first row is the measure of that.
"""

from __future__ import annotations

import asyncio
import gc
import time
from types import ModuleType
from typing import Any

import harness
from harness import Numbers, Peer, Row

RUNS = 5
REPEATS = 9
DATA = 150
TOKENS = 2_048
"""16 bytes per token on the wire (input, target, weight): a chunk of 4.9 MB, just below the limit of a request."""
LONG_PROMPT = 131_072
SAVE_SECONDS = 1.0


def measure(sdk: ModuleType, url: str) -> Numbers:
    service = harness.service(sdk, url)
    trainer = service.create_lora_training_client("tiny/model-1", rank=8)
    sampler = service.create_sampling_client(base_model="tiny/model-1")
    loop = loop_of_the_package()
    data = training_data(sdk)
    prompt = sdk.types.ModelInput.from_ints(list(range(LONG_PROMPT)))
    params = sdk.types.SamplingParams(max_tokens=1)
    return {
        "idle": worst_stall(loop, lambda: time.sleep(0.1)),
        "chunk": worst_stall(loop, lambda: trainer.forward_backward(data, "cross_entropy").result()),
        "prompt": worst_stall(loop, lambda: sampler.sample(prompt, 1, params).result()),
        "save": asyncio.run(stall_of(trainer.save_weights_and_get_sampling_client_async)),
    }


def training_data(sdk: ModuleType) -> list[Any]:
    tokens = list(range(TOKENS))
    inputs = {"target_tokens": tokens, "weights": [1.0] * TOKENS}
    return [sdk.types.Datum(model_input=sdk.types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)] * DATA


def loop_of_the_package() -> asyncio.AbstractEventLoop:
    (loop,) = (each for each in gc.get_objects() if isinstance(each, asyncio.BaseEventLoop) and each.is_running())
    return loop


def worst_stall(loop: asyncio.AbstractEventLoop, work: Any) -> float:
    """The longest stall of a loop in another thread while some work goes on: the median of several times, in ms."""
    from tests.support.probes import loop_lag

    stalls = []
    for _ in range(REPEATS):
        gc.collect()  # its pauses belong to what was made before
        with loop_lag(loop) as lag:
            work()
            time.sleep(0.02)  # a stall is seen when it ends
        stalls.append({"worst": 1e3 * lag.worst})
    return harness.median(stalls[1:])["worst"]


async def stall_of(method: Any) -> float:
    """The longest stall of the caller's loop while it awaits a method, in milliseconds."""
    from tests.support.probes import loop_lag

    with loop_lag(asyncio.get_running_loop()) as lag:
        await asyncio.sleep(0.02)
        await method()
        await asyncio.sleep(0.02)
    return 1e3 * lag.worst


def measure_first_call(sdk: ModuleType, url: str) -> Numbers:
    """The first async call has to open a session; the server is not well and answers 503 twice."""
    service = harness.service(sdk, url)
    create = lambda: service.create_lora_training_client_async("tiny/model-1", rank=8)  # noqa: E731
    return {"first": asyncio.run(stall_of(create))}


def one_run(peer: Peer) -> Numbers:
    from tests.support.server import FakeServer, Reply

    with FakeServer() as server:
        server.script("save_weights_for_sampler", Reply(503, delay=SAVE_SECONDS))
        numbers = harness.measured(peer, url=server.url)
    return dict(numbers)


def conduct() -> None:
    official, ours = harness.in_turns(RUNS, one_run)
    limit = 5.0
    harness.print_table(
        [
            Row("the package's loop, idle (ms)", official["idle"], ours["idle"]),
            Row("the package's loop, a chunk of 5 MB (ms)", official["chunk"], ours["chunk"], "5", ours["chunk"] <= limit),
            Row(f"the package's loop, a prompt of {LONG_PROMPT:,} tokens (ms)", official["prompt"], ours["prompt"], "5",
                ours["prompt"] <= limit),
            Row("the caller's loop, save_weights_and_get_sampling_client_async (ms)", official["save"], ours["save"],
                "10", ours["save"] <= 10),
        ]
    )


if __name__ == "__main__":
    harness.play(conduct, measure)
