"""A server whose workers are on a Ray cluster, one that trains and two that sample, gives what one alone gives."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.compat.runner import Runner
from tests.end_to_end.comparing import differences
from tests.end_to_end.scripts import submitted
from tests.end_to_end.serving import COMMAND, KEY, ServerProcess, failed_start, wait_until
from tests.support.ray_head import RayHead

pytestmark = pytest.mark.one_machine("it has a cluster of its own, and compares with a server of one machine")

MODEL = "tiny/model-1"
STEPS = range(30)
SECONDS = 90.0
LONG = tinsmith.SamplingParams(max_tokens=300, seed=7, stop=[])


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHead]:
    with RayHead() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        # How long a process of Ray waits for a head that is gone, a minute unless told otherwise.
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
        yield running


@pytest.fixture(scope="module")
def on_ray(
    tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path], cluster: RayHead
) -> Iterator[ServerProcess]:
    folders, options = {MODEL: models[MODEL]}, (f"--ray={cluster.address}", "--sample-workers=2")
    with ServerProcess(tmp_path_factory.mktemp("ray"), folders, *options) as running:
        yield running


def workers(server: ServerProcess) -> dict[str, dict[str, Any]]:
    """What the dashboard shows of them, by name."""
    answer = server.call("GET", "/dashboard/api/overview")
    assert answer.status == 200, answer
    (model,) = answer.json()["models"]
    return {worker["name"]: worker for worker in model["workers"]}


def kill(server: ServerProcess, name: str) -> int:
    """SIGKILL for the process of a worker; gives back who that was."""
    pid: int = workers(server)[name]["process"]
    os.kill(pid, signal.SIGKILL)
    return pid


def is_back(server: ServerProcess, name: str, killed: int) -> bool:
    worker = workers(server)[name]
    return worker["is_ready"] and worker["process"] != killed


def new_model(client: tinsmith.ServiceClient) -> Any:
    return client.create_lora_training_client(MODEL, rank=4, seed=1)


def submit(model: Any, steps: Sequence[int] = STEPS) -> list[Any]:
    return submitted(tinsmith, model, steps)


def losses(futures: Sequence[Any]) -> list[float]:
    return [future.result(timeout=SECONDS).metrics["loss:sum"] for future in futures]


def ask(sampler: Any, count: int, params: Any = LONG) -> list[Any]:
    return [sampler.sample(tinsmith.ModelInput.from_ints([1, 2, first]), 1, params) for first in range(count)]


def drawn(futures: Sequence[Any]) -> list[list[int]]:
    return [list(future.result(timeout=SECONDS).sequences[0].tokens) for future in futures]


class Alone:
    """What a server with one worker gives."""

    def __init__(self, server: ServerProcess) -> None:
        with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client:
            model = new_model(client)
            self.losses = losses(submit(model))
            self.samples = drawn(ask(model.save_weights_and_get_sampling_client(), 12))


@pytest.fixture(scope="module")
def alone(server: ServerProcess) -> Alone:
    return Alone(server)


@pytest.fixture
def client(on_ray: ServerProcess) -> Iterator[tinsmith.ServiceClient]:
    with tinsmith.ServiceClient(base_url=on_ray.url, api_key=KEY) as opened:
        yield opened


def test_losses_and_samples_are_those_of_one_worker(
    on_ray: ServerProcess, client: tinsmith.ServiceClient, alone: Alone
) -> None:
    assert [*workers(on_ray)] == ["train", "sample-0", "sample-1"]
    assert all(worker["is_ready"] and worker["where"] for worker in workers(on_ray).values())
    model = new_model(client)
    assert losses(submit(model)) == pytest.approx(alone.losses, rel=1e-5)
    sampler = model.save_weights_and_get_sampling_client()
    assert drawn(ask(sampler, 12)) == alone.samples
    figures = on_ray.call("GET", "/metrics").body.decode()
    assert 'tinsmith_worker_ready{base_model="tiny/model-1",kind="training",' in figures
    for replica in ("sample-0", "sample-1"):
        assert f'tinsmith_worker_samples{{base_model="tiny/model-1",worker="{replica}"}} 0.0' in figures


def test_the_official_client_gets_what_it_gets_from_one_worker(
    on_ray: ServerProcess, server: ServerProcess, official_runner: Runner
) -> None:
    for script in ("supervised_loop", "samplers_keep_their_weights", "seeded_sampling"):
        expected, found = (official_runner.run(script, url) for url in (server.url, on_ray.url))
        assert differences(expected, found) == []


def test_a_model_can_be_sampled_as_it_is_just_now(on_ray: ServerProcess, client: tinsmith.ServiceClient) -> None:
    """Through the OpenAI endpoint, which names the model itself."""
    model = new_model(client)
    body = {"model": model.model_id, "prompt": "abc", "max_tokens": 20, "temperature": 0.0}
    texts = []
    for step in range(2):
        losses(submit(model, range(10 * step, 10 * step + 10)))
        answer = on_ray.call("POST", "/v1/completions", body, headers={"authorization": f"Bearer {KEY}"})
        assert answer.status == 200, answer
        texts.append(answer.json()["choices"][0]["text"])
    assert texts[0] != texts[1]


def test_a_killed_replica_costs_only_time_and_draws_the_same(
    on_ray: ServerProcess, client: tinsmith.ServiceClient, alone: Alone
) -> None:
    model = new_model(client)
    losses(submit(model))
    futures = ask(model.save_weights_and_get_sampling_client(), 12)
    busy = lambda: [name for name, worker in workers(on_ray).items() if worker["samples"]]  # noqa: E731
    wait_until(lambda: bool(busy()), SECONDS, "no replica has anything to do")
    name = busy()[0]
    killed = kill(on_ray, name)
    assert not all(future.done() for future in futures), "killed too late to show anything"
    assert drawn(futures) == alone.samples
    wait_until(lambda: is_back(on_ray, name, killed), SECONDS, "the replica did not come back")
    assert drawn(ask(model.save_weights_and_get_sampling_client(), 12)) == alone.samples


def test_a_killed_trainer_costs_only_time_and_its_samplers_go_on(
    on_ray: ServerProcess, client: tinsmith.ServiceClient, alone: Alone
) -> None:
    model = new_model(client)
    futures = submit(model)
    futures[2].result(timeout=SECONDS)
    killed = kill(on_ray, "train")
    assert not futures[-1].done(), "killed too late to show anything"
    assert losses(futures) == pytest.approx(alone.losses, rel=1e-5)
    sampler = model.save_weights_and_get_sampling_client()
    first = kill(on_ray, "train")
    assert first != killed
    # Its weights were nowhere but in the memory of that process, and no replica has asked for them yet.
    assert drawn(ask(sampler, 12)) == alone.samples


def test_a_server_that_is_killed_goes_on_from_where_it_was(
    on_ray: ServerProcess, client: tinsmith.ServiceClient, alone: Alone
) -> None:
    model = new_model(client)
    futures = submit(model)
    futures[2].result(timeout=SECONDS)
    on_ray.kill()
    on_ray.start()
    assert losses(futures) == pytest.approx(alone.losses, rel=1e-5)
    assert drawn(ask(model.save_weights_and_get_sampling_client(), 12)) == alone.samples


def test_a_cluster_that_dies_and_comes_back_costs_only_time(
    on_ray: ServerProcess, client: tinsmith.ServiceClient, cluster: RayHead, alone: Alone
) -> None:
    model = new_model(client)
    futures = submit(model)
    futures[2].result(timeout=SECONDS)
    cluster.kill()
    wait_until(lambda: not any(worker["is_ready"] for worker in workers(on_ray).values()), SECONDS, "they are ready")
    waiting = on_ray.call("GET", "/readyz")
    assert waiting.status == 503
    cluster.start()
    assert losses(futures) == pytest.approx(alone.losses, rel=1e-5)
    assert drawn(ask(model.save_weights_and_get_sampling_client(), 12)) == alone.samples


# What is refused


def refusal(state: Path, folder: Path, *options: str) -> str:
    return failed_start(state, f"--model={MODEL}={folder}", *options)


def test_a_cluster_that_is_not_there_is_refused(tmp_path: Path, models: Mapping[str, Path]) -> None:
    said = refusal(tmp_path, models[MODEL], "--ray=127.0.0.1:9")
    assert "There is no Ray cluster at 127.0.0.1:9: Connection refused." in said
    assert "ray start --head" in said


def test_more_than_the_cluster_has_is_refused(tmp_path: Path, models: Mapping[str, Path], cluster: RayHead) -> None:
    said = refusal(tmp_path, models[MODEL], f"--ray={cluster.address}", "--sample-workers=20")
    assert "The 21 workers need 21 CPUs, and the Ray cluster has 8." in said
    assert "--sample-workers" in said


def test_a_server_that_waits_for_others_to_make_room_says_so_and_can_be_stopped(
    tmp_path: Path, models: Mapping[str, Path], cluster: RayHead, on_ray: ServerProcess
) -> None:
    options = (f"--model={MODEL}={models[MODEL]}", f"--state={tmp_path}", "--port=0", f"--ray={cluster.address}")
    command = [COMMAND, "serve", *options, "--sample-workers=5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = next(line for line in process.stderr if "room" in line)
        assert "tiny/model-1 waits for room on the Ray cluster: its workers need 6 CPU." in said
        process.terminate()
        assert process.stderr.read().endswith("tinsmith.server.main INFO Stopped.\n")
        assert process.stdout.read() == ""
    assert process.returncode == 0


def test_the_cluster_of_this_machine_is_found(
    tmp_path: Path, models: Mapping[str, Path], cluster: RayHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    said = refusal(tmp_path, models[MODEL], "--ray=auto", "--worker-cpus=9")
    assert "A worker needs 9 CPU on one node" in said
