"""What waiting samples take: memory and CPU each, and whether there is an end to it.

The server answers 429 to every sample, so that all of them wait.
"""

from __future__ import annotations

import gc
import time
from types import ModuleType
from typing import Any

import harness
from harness import Numbers, Row

RUNS = 3
ASKED = 25_000
LIMIT = 20_000
"""How many may wait in a client that can be told so; the others are to be refused."""
PROMPT_TOKENS = 200


def measure(sdk: ModuleType, url: str) -> Numbers:
    from tests.support.probes import rss

    client = limited_service(sdk, url).create_sampling_client(base_model="tiny/model-1").result()
    prompt = sdk.types.ModelInput.from_ints(list(range(PROMPT_TOKENS)))
    params = sdk.types.SamplingParams(max_tokens=8)
    futures = [client.sample(prompt, 1, params)]
    time.sleep(0.5)  # the first one loads what is loaded lazily, and is sent back
    gc.collect()
    memory, cpu = rss(), time.process_time()
    for _ in range(ASKED - 1):
        try:
            futures.append(client.sample(prompt, 1, params))
        except sdk.TinkerError:
            break
    time.sleep(0.5)
    grown, spent = rss() - memory, time.process_time() - cpu
    return {"accepted": len(futures), "bytes": grown / len(futures), "us": 1e6 * spent / len(futures)}


def limited_service(sdk: ModuleType, url: str) -> Any:
    if not hasattr(sdk, "Config"):
        return harness.service(sdk, url)
    settings = {"base_url": url, "api_key": harness.KEY, "max_pending": LIMIT, "when_full": "error"}
    return sdk.ServiceClient(config=sdk.Config.from_env(**settings))


def conduct() -> None:
    from tests.support.server import spawned_server

    with spawned_server("--answer", "asample=429") as url:
        official, ours = harness.in_turns(RUNS, lambda peer: dict(harness.measured(peer, url=url)))
    accepted, memory, cpu = (harness.both(official, ours, name) for name in ours)
    limit = f"accepted of {ASKED:,}, with a limit of {LIMIT:,} where there is one"
    harness.print_table(
        [
            Row(limit, accepted, f"{LIMIT:,}", accepted[1] == LIMIT, 0),
            Row("memory of each (bytes)", memory, "2,000", memory[1] <= 2_000, 0),
            Row("CPU to queue each (us)", cpu),
        ]
    )


if __name__ == "__main__":
    harness.play(conduct, measure)
