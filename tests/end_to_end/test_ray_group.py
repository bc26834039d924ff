"""A training group whose processes are placed by Ray gives what one worker gives, whatever of it is killed.

It does not matter whether each of them has the whole base model, or a shard of its layers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import tinsmith
from tests.end_to_end.scripts import sentence
from tests.end_to_end.serving import KEY, ServerProcess, failed_start, is_running, wait_until
from tests.support.ray_head import RayHead
from tinsmith.server.checkpoints import CheckpointFolders

pytestmark = pytest.mark.one_machine("it has a cluster of its own, and compares with a server of one machine")

MODEL = "tiny/model-1"
STEPS = range(20)
SECONDS = 120.0
# With the default eps the sign of rounding errors would be a full step.
STEP = tinsmith.AdamParams(learning_rate=1e-3, eps=1e-6)


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]

    def check_same(self, expected: Trained) -> None:
        assert self.losses == pytest.approx(expected.losses, rel=1e-5)
        assert self.weights.keys() == expected.weights.keys()
        for name, tensor in expected.weights.items():
            torch.testing.assert_close(self.weights[name], tensor, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHead]:
    with RayHead() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(scope="module", params=["never", "always"], ids=["whole", "sharded"])
def group(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    models: Mapping[str, Path],
    cluster: RayHead,
) -> Iterator[ServerProcess]:
    options = "--train-workers=2", "--sample-workers=1", f"--ray={cluster.address}", f"--shard-base={request.param}"
    with ServerProcess(tmp_path_factory.mktemp("group"), {MODEL: models[MODEL]}, *options) as running:
        yield running
        all_of_it = processes(running).values()
    wait_until(lambda: not any(map(is_running, all_of_it)), 30, "something is left")


@pytest.fixture(scope="module")
def alone(server: ServerProcess) -> Trained:
    """What one worker gives."""
    model = new_model(server)
    return finished(server, model, submit(model))


def processes(server: ServerProcess) -> dict[str, int]:
    """Of the workers and of the member, by what the dashboard calls them."""
    (model,) = server.call("GET", "/dashboard/api/overview").json()["models"]
    return {worker["name"]: worker["process"] for worker in model["workers"]}


def is_whole(server: ServerProcess) -> bool:
    (model,) = server.call("GET", "/dashboard/api/overview").json()["models"]
    return len(model["workers"]) == 3 and all(worker["is_ready"] for worker in model["workers"])


def new_model(server: ServerProcess) -> Any:
    service = tinsmith.ServiceClient(base_url=server.url, api_key=KEY)
    return service.create_lora_training_client(MODEL, rank=4, seed=1)


def submit(model: Any) -> list[Any]:
    futures = []
    for step in STEPS:
        data = [sentence(tinsmith, step + place, length=12 + place) for place in range(4)]
        futures.append(model.forward_backward(data, "cross_entropy"))
        model.optim_step(STEP)
    return futures


def finished(server: ServerProcess, model: Any, futures: list[Any]) -> Trained:
    losses = [future.result(timeout=SECONDS).metrics["loss:sum"] for future in futures]
    path = model.save_state("end").result(timeout=SECONDS).path
    folder = CheckpointFolders(server.state / "checkpoints").folder(path)
    return Trained(losses, load_file(folder / "adapter_model.safetensors"))


def test_losses_and_weights_are_those_of_one_worker(group: ServerProcess, alone: Trained) -> None:
    assert [*processes(group)] == ["train", "train-rank-1", "sample-0"]
    assert len({*processes(group).values()}) == 3
    model = new_model(group)
    finished(group, model, submit(model)).check_same(alone)
    figures = group.call("GET", "/metrics").body.decode()
    assert 'tinsmith_worker_ready{base_model="tiny/model-1",kind="training",' in figures
    assert 'worker="train-rank-1"} 1.0' in figures


def kill_member(group: ServerProcess, cluster: RayHead) -> None:
    os.kill(processes(group)["train-rank-1"], signal.SIGKILL)


def kill_leader(group: ServerProcess, cluster: RayHead) -> None:
    os.kill(processes(group)["train"], signal.SIGKILL)


def kill_bridge(group: ServerProcess, cluster: RayHead) -> None:
    group.kill_worker()


def kill_api(group: ServerProcess, cluster: RayHead) -> None:
    group.kill()
    group.start()


def kill_cluster(group: ServerProcess, cluster: RayHead) -> None:
    cluster.kill()
    cluster.start()


@pytest.mark.parametrize("kill", [kill_member, kill_leader])
def test_what_is_killed_of_it_in_training_costs_only_time(
    group: ServerProcess, cluster: RayHead, alone: Trained, kill: Callable[[ServerProcess, RayHead], None]
) -> None:
    check_killing(group, cluster, alone, kill)


# What comes next starts everything anew, in the same way with any group.
@pytest.mark.parametrize("group", ["always"], ids=["sharded"], indirect=True)
@pytest.mark.parametrize("kill", [kill_bridge, kill_api, kill_cluster])
def test_what_is_killed_around_it_in_training_costs_only_time(
    group: ServerProcess, cluster: RayHead, alone: Trained, kill: Callable[[ServerProcess, RayHead], None]
) -> None:
    check_killing(group, cluster, alone, kill)


def check_killing(
    group: ServerProcess, cluster: RayHead, alone: Trained, kill: Callable[[ServerProcess, RayHead], None]
) -> None:
    """The results are the same, and the whole group was started again."""
    wait_until(lambda: is_whole(group), SECONDS, "the group is not there")
    before = {name: pid for name, pid in processes(group).items() if name != "sample-0"}
    model = new_model(group)
    futures = submit(model)
    futures[2].result(timeout=SECONDS)
    kill(group, cluster)
    assert not futures[-1].done(), "killed too late to show anything"
    finished(group, model, futures).check_same(alone)
    wait_until(lambda: not any(map(is_running, before.values())), 30, "a process of the group was left")
    assert not {*before.values()} & {*processes(group).values()}


def test_a_lost_member_is_named_with_its_ending(group: ServerProcess) -> None:
    wait_until(lambda: is_whole(group), SECONDS, "the group is not there")
    killed = processes(group)["train-rank-1"]
    os.kill(killed, signal.SIGKILL)
    said = "rank 1 of the training group is gone: its actor is gone"
    wait_until(lambda: said in group.log(), SECONDS, "nobody was told")
    wait_until(lambda: is_whole(group) and processes(group)["train-rank-1"] != killed, SECONDS, "it did not come back")


def test_more_members_than_the_cluster_has_cpus_for_are_refused(
    tmp_path: Path, models: Mapping[str, Path], cluster: RayHead
) -> None:
    options = f"--ray={cluster.address}", "--train-workers=8", "--sample-workers=1"
    said = failed_start(tmp_path, f"--model={MODEL}={models[MODEL]}", *options)
    assert "The 9 workers need 9 CPUs, and the Ray cluster has 8." in said
    assert "--train-workers" in said
