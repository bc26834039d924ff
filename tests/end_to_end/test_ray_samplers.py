"""Sampler replicas on Ray: streams go through them, and there are as many as there is to draw."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.end_to_end.serving import KEY, ServerProcess, failed_start, wait_until
from tests.support.ray_head import RayHead

pytestmark = pytest.mark.one_machine("it has a cluster of its own, and compares with a server of one machine")

MODEL = "tiny/model-1"
SECONDS = 120.0
PARAMS = tinsmith.SamplingParams(max_tokens=200, seed=7, stop=[])
NUM_SAMPLES = 30
"""Of each request: one of them alone is little enough for one replica."""
ASKED = {"model": MODEL, "prompt": "abc", "max_tokens": 300, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def scaled(
    tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]
) -> Iterator[tuple[ServerProcess, RayHead]]:
    """Between one and four replicas, with room for three besides who trains."""
    with RayHead(cpus=4) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        options = f"--ray={cluster.address}", "--sample-workers=1:4", "--idle-sample-worker=3"
        with ServerProcess(tmp_path_factory.mktemp("scaled"), {MODEL: models[MODEL]}, *options) as running:
            yield running, cluster


@pytest.fixture
def on_ray(scaled: tuple[ServerProcess, RayHead]) -> ServerProcess:
    return scaled[0]


def workers(server: ServerProcess) -> dict[str, dict[str, Any]]:
    """What the dashboard shows of them, by name."""
    answer = server.call("GET", "/dashboard/api/overview")
    assert answer.status == 200, answer
    (model,) = answer.json()["models"]
    return {worker["name"]: worker for worker in model["workers"]}


def ready(server: ServerProcess) -> list[str]:
    return [name for name, worker in workers(server).items() if worker["is_ready"] and name != "train"]


def ask(sampler: Any, first: int) -> Any:
    return sampler.sample(tinsmith.ModelInput.from_ints([1, 2, first]), NUM_SAMPLES, PARAMS)


def drawn(future: Any) -> list[list[int]]:
    return [list(sequence.tokens) for sequence in future.result(timeout=SECONDS).sequences]


def streamed(server: ServerProcess, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a completion as they come; the last one must be the end."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    body = json.dumps({**asked, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, headers, method="POST")
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        for line in response:
            name, _, event = line.decode().strip().partition(": ")
            if event == "[DONE]":
                return
            if name == "data":  # else a sign of life
                yield json.loads(event)
    raise AssertionError("the stream broke off")


def text(events: Iterator[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events)


def whole(server: ServerProcess) -> str:
    answer = server.call("POST", "/v1/completions", ASKED, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status == 200, answer
    completed: str = answer.json()["choices"][0]["text"]
    return completed


def test_a_stream_through_a_replica_comes_while_it_is_drawn_and_is_the_same(
    on_ray: ServerProcess, server: ServerProcess
) -> None:
    events = list(streamed(on_ray, ASKED))
    assert len([event for event in events if event["choices"][0]["text"]]) > 20
    assert text(iter(events)) == whole(on_ray) == whole(server)


def test_a_stream_goes_on_where_it_was_when_its_replica_is_killed(on_ray: ServerProcess, server: ServerProcess) -> None:
    (name,) = ready(on_ray)
    stream = streamed(on_ray, ASKED)
    begun = text(islice(stream, 5))
    os.kill(workers(on_ray)[name]["process"], signal.SIGKILL)
    assert begun + text(stream) == whole(server)


def test_replicas_come_while_there_is_much_to_draw_and_go_afterwards_and_nothing_is_lost(
    on_ray: ServerProcess, server: ServerProcess
) -> None:
    with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client:
        alone = client.create_sampling_client(base_model=MODEL)
        expected = [drawn(ask(alone, first)) for first in range(3)]
    with tinsmith.ServiceClient(base_url=on_ray.url, api_key=KEY) as client:
        sampler = client.create_sampling_client(base_model=MODEL)
        futures: list[Any] = []

        def asked_for_more(until_there_are: int) -> bool:
            """Keeps it busy, within bounds."""
            if sum(not future.done() for future in futures) < 12:
                futures.append(ask(sampler, len(futures) % 3))
            return len(ready(on_ray)) >= until_there_are

        wait_until(lambda: asked_for_more(3), SECONDS, "no replicas came")
        wait_until(
            lambda: not asked_for_more(4) and "waits for room" in str(workers(on_ray)), SECONDS, "the fourth has room"
        )
        assert on_ray.call("GET", "/readyz").status == 200, "the others go on"
        figures = on_ray.call("GET", "/metrics").body.decode()
        assert figures.count('tinsmith_worker_ready{base_model="tiny/model-1",kind="sampling"') == 4
        assert "sample-3 waits for room on the Ray cluster" in on_ray.log()

        def only_one_is_left() -> bool:
            if len(futures) < 400 and all(future.done() for future in futures):
                futures.append(ask(sampler, len(futures) % 3))
            return [*workers(on_ray)] == ["train", "sample-0"]

        wait_until(only_one_is_left, SECONDS, "replicas stay")
        for number, future in enumerate(futures):
            assert drawn(future) == expected[number % 3], number


def test_bounds_that_are_none_are_refused(tmp_path: Path, models: Mapping[str, Path]) -> None:
    for value, remedy in (("4:1", "give 1:4"), ("0:2", "give 1:2, or 0"), ("many", "as 1:4")):
        said = failed_start(tmp_path, f"--model={MODEL}={models[MODEL]}", "--ray=auto", f"--sample-workers={value}")
        assert f"--sample-workers is {value!r}" in said or f"--sample-workers is {value}," in said
        assert remedy in said
