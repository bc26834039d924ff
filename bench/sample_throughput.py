"""What a sample costs the client: CPU of all its threads, and how many samples get through in a second."""

from __future__ import annotations

import time
from types import ModuleType

import harness
from harness import Numbers, Row

RUNS = 5
SAMPLES = 2_000
PROMPT_TOKENS = 100


def measure(sdk: ModuleType, url: str) -> Numbers:
    client = harness.service(sdk, url).create_sampling_client(base_model="tiny/model-1")
    draw(sdk, client, 100)  # connections, flags and lazy imports are not what is measured
    wall, cpu = time.perf_counter(), time.process_time()
    draw(sdk, client, SAMPLES)
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def draw(sdk: ModuleType, client: object, count: int) -> None:
    params = sdk.types.SamplingParams(max_tokens=8)
    prompts = [sdk.types.ModelInput.from_ints([(i + k) % 1000 for k in range(PROMPT_TOKENS)]) for i in range(count)]
    for future in [client.sample(prompt, 1, params) for prompt in prompts]:
        future.result()


def conduct() -> None:
    from tests.support.server import spawned_server

    rows = []
    for polling, flag in (("a poll per sample", "false"), ("batch polling", "true")):
        with spawned_server("--flags", f'{{"sample_use_retrieve_futures": {flag}}}') as url:
            official, ours = harness.in_turns(RUNS, lambda url=url: {"url": url})
        rows.append(
            Row(f"CPU per sample, {polling} (ms)", 1e3 * official["cpu"] / SAMPLES, 1e3 * ours["cpu"] / SAMPLES,
                "a third", 3 * ours["cpu"] <= official["cpu"], 2)
        )
        rows.append(
            Row(f"samples per second, {polling}", SAMPLES / official["wall"], SAMPLES / ours["wall"],
                "3 times", 3 * ours["wall"] <= official["wall"], 0)
        )
    harness.print_table(rows)


if __name__ == "__main__":
    harness.play(conduct, measure)
