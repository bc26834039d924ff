"""A training group whose processes are on different nodes of a Ray cluster, one of which goes away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.end_to_end.scripts import sentence
from tests.end_to_end.serving import KEY, ServerProcess, wait_until
from tests.server.bucket import BUCKET, running_bucket
from tests.server.postgres import Postgres
from tests.support.ray_head import RayHead
from tests.support.ray_node import RayNode

pytestmark = pytest.mark.one_machine("it has a cluster of its own, and compares with a server of one machine")

MODEL = "tiny/model-1"
OTHER_ADDRESS = "127.0.0.2"
STEPS = range(16)
SECONDS = 180.0
STEP = tinsmith.AdamParams(learning_rate=1e-3, eps=1e-6)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHead]:
    """With room for one process on each node, and the credentials of the bucket, which workers have from there."""
    with running_bucket(), RayHead(cpus=1) as head, pytest.MonkeyPatch.context() as patch:
        for name, value in head.environment.items():
            patch.setenv(name, value)
        yield head


@pytest.fixture
def node(cluster: RayHead) -> Iterator[RayNode]:
    with RayNode(cluster, OTHER_ADDRESS, cpus=1) as running:
        yield running


@pytest.fixture
def group(tmp_path: Path, models: Mapping[str, Path], cluster: RayHead, node: RayNode) -> Iterator[ServerProcess]:
    """They hold the base model together, which makes them talk most."""
    with Postgres() as postgres:
        options = f"--database={postgres.new_database()}", f"--storage=s3://{BUCKET}/nodes"
        options += f"--ray={cluster.address}", "--train-workers=2", "--shard-base=always"
        with ServerProcess(tmp_path, {MODEL: models[MODEL]}, *options) as running:
            yield running


def places(server: ServerProcess) -> dict[str, str]:
    (model,) = server.call("GET", "/dashboard/api/overview").json()["models"]
    return {worker["name"]: worker["where"] for worker in model["workers"] if worker["is_ready"]}


def are_apart(server: ServerProcess) -> bool:
    where = places(server)
    return {*where} == {"worker", "worker-rank-1"} and len({*where.values()}) == 2


def submitted(server: ServerProcess) -> list[Any]:
    model = tinsmith.ServiceClient(base_url=server.url, api_key=KEY).create_lora_training_client(MODEL, rank=4, seed=1)
    futures = []
    for step in STEPS:
        data = [sentence(tinsmith, step + place, length=12 + place) for place in range(4)]
        futures.append(model.forward_backward(data, "cross_entropy"))
        model.optim_step(STEP)
    return futures


def losses(futures: Sequence[Any]) -> list[float]:
    return [future.result(timeout=SECONDS).metrics["loss:sum"] for future in futures]


def test_members_on_another_node_give_what_one_worker_gives_also_when_it_is_lost(
    server: ServerProcess, group: ServerProcess, cluster: RayHead, node: RayNode
) -> None:
    assert are_apart(group)
    assert any(OTHER_ADDRESS in where for where in places(group).values())
    alone = losses(submitted(server))
    assert losses(submitted(group)) == pytest.approx(alone, rel=1e-5)

    futures = submitted(group)
    futures[2].result(timeout=SECONDS)
    node.kill()
    assert not futures[-1].done(), "killed too late to show anything"
    wait_until(lambda: not places(group), SECONDS, "the group goes on")
    with RayNode(cluster, OTHER_ADDRESS, cpus=1):
        assert losses(futures) == pytest.approx(alone, rel=1e-5)
        wait_until(lambda: are_apart(group), SECONDS, "they are not where they were")
