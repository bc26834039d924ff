"""How long event loops stand still: the caller's in async methods, and the package's own while it encodes.

The package's loop carries heartbeats, polls and every other call. It is found among the running loops of the process,
so that neither package has to be known from inside. A busy machine stalls loops too: the idle rows say how much.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
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


def measure(sdk: ModuleType, url: str) -> Numbers:
    service = harness.service(sdk, url)
    first, trainer = asyncio.run(stall_of(lambda: service.create_lora_training_client("tiny/model-1", rank=8)))
    calm, _ = asyncio.run(stall_of(lambda: asyncio.sleep(1.0)))
    save, sampler = asyncio.run(stall_of(trainer.save_weights_and_get_sampling_client))
    loop = loop_of_the_package()
    data = training_data(sdk)
    prompt = sdk.types.ModelInput.from_ints(list(range(LONG_PROMPT)))
    params = sdk.types.SamplingParams(max_tokens=1)
    return {
        "calm": calm,
        "first": first,
        "save": save,
        "idle": worst_stall(loop, lambda: time.sleep(0.1)),
        "chunk": worst_stall(loop, lambda: trainer.forward_backward(data, "cross_entropy").result()),
        "prompt": worst_stall(loop, lambda: sampler.sample(prompt, 1, params).result()),
    }


async def stall_of(method: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """The longest stall of the caller's loop while it awaits a method, in milliseconds; and what the method gave."""
    from tests.support.probes import loop_lag

    with loop_lag(asyncio.get_running_loop()) as lag:
        await asyncio.sleep(0.02)
        result = await method()
        await asyncio.sleep(0.02)  # a stall is seen when it ends
    return 1e3 * lag.worst, result


def worst_stall(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> float:
    """The longest stall of a loop in another thread while some work goes on, in milliseconds; median of several."""
    from tests.support.probes import loop_lag

    stalls = []
    for _ in range(REPEATS):
        with loop_lag(loop) as lag:
            work()
            time.sleep(0.02)
        stalls.append({"worst": 1e3 * lag.worst})
    return harness.median(stalls[1:])["worst"]


def loop_of_the_package() -> asyncio.AbstractEventLoop:
    (loop,) = (each for each in gc.get_objects() if isinstance(each, asyncio.BaseEventLoop) and each.is_running())
    return loop


def training_data(sdk: ModuleType) -> list[Any]:
    tokens = list(range(TOKENS))
    inputs = {"target_tokens": tokens, "weights": [1.0] * TOKENS}
    return [sdk.types.Datum(model_input=sdk.types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)] * DATA


def one_run(peer: Peer) -> Numbers:
    from tests.support.server import FakeServer, Reply

    with FakeServer() as server:
        server.script("create_session", Reply(503), times=2)
        server.script("save_weights_for_sampler", Reply(503, delay=1.0))  # so that there is something to wait for
        return dict(harness.measured(peer, url=server.url))


def conduct() -> None:
    official, ours = harness.in_turns(RUNS, one_run)
    figures = {
        "calm": ("the caller's loop, idle for 1 s (ms)", None),
        "first": ("the caller's loop, first awaited call, create_session answered 503 twice (ms)", 10),
        "save": ("the caller's loop, save_weights_and_get_sampling_client, 1 s (ms)", 10),
        "idle": ("the package's loop, idle (ms)", None),
        "chunk": ("the package's loop, a chunk of 5 MB (ms)", 5),
        "prompt": (f"the package's loop, a prompt of {LONG_PROMPT:,} tokens (ms)", 5),
    }
    harness.print_table(
        [
            Row(figure, harness.both(official, ours, name), str(bar or "-"), bar is None or ours[name] <= bar)
            for name, (figure, bar) in figures.items()
        ]
    )


if __name__ == "__main__":
    harness.play(conduct, measure)
