"""What a sample costs the client: CPU of all its threads, and how many samples get through in a second."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import harness
from harness import Numbers, Row

RUNS = 5
SAMPLES = 2_000
PROMPT_TOKENS = 100


def measure(sdk: ModuleType, url: str) -> Numbers:
    client = harness.service(sdk, url).create_sampling_client(base_model="tiny/model-1").result()
    draw(sdk, client, 100)  # connections, flags and lazy imports are not what is measured
    wall, cpu = time.perf_counter(), time.process_time()
    draw(sdk, client, SAMPLES)
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def draw(sdk: ModuleType, client: Any, count: int) -> None:
    params = sdk.types.SamplingParams(max_tokens=8)
    prompts = [sdk.types.ModelInput.from_ints([(i + k) % 1000 for k in range(PROMPT_TOKENS)]) for i in range(count)]
    for future in [client.sample(prompt, 1, params) for prompt in prompts]:
        future.result()


def rows_for(polling: str, batch: bool) -> list[Row]:
    from tests.support.server import spawned_server

    with spawned_server("--flags", f'{{"sample_use_retrieve_futures": {str(batch).lower()}}}') as url:
        official, ours = harness.in_turns(RUNS, lambda peer: harness.measured(peer, url=url))
    cpu = [1e3 * numbers["cpu"] / SAMPLES for numbers in (official, ours)]
    rate = [SAMPLES / numbers["wall"] for numbers in (official, ours)]
    return [
        Row(f"CPU per sample, {polling} (ms)", cpu, "a third", 3 * cpu[1] <= cpu[0], 2),
        Row(f"samples per second, {polling}", rate, "3 times", rate[1] >= 3 * rate[0], 0),
    ]


def conduct() -> None:
    harness.print_table(rows_for("a poll for each", batch=False) + rows_for("batch polling", batch=True))


if __name__ == "__main__":
    harness.play(conduct, measure)
