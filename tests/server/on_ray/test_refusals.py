"""What a cluster must have, in words that say what to change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tinsmith.errors import ConfigError, MissingExtraError
from tinsmith.server.config import ServerConfig
from tinsmith.server.models import ModelSource
from tinsmith.server.on_ray import lives
from tinsmith.server.on_ray.lives import RayLives
from tinsmith.server.on_ray.messages import Seat
from tinsmith.server.on_ray.refusals import (
    Node,
    RefusedError,
    bundle,
    check_kinds,
    check_room,
    check_state,
    check_version,
    only_here,
    only_kind,
    reason,
    uses_gpus,
)

SMALL, LARGE = Node({"CPU": 8.0}), Node({"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0})
OTHER = Node({"CPU": 64.0, "GPU": 8.0, "accelerator_type:A100": 1.0})
MODELS = (ModelSource("m", "m"),)


def seat(cpus: int = 1) -> Seat:
    return Seat(base_model="m", place="train", cpus=cpus, processes=1)


def test_what_ray_says_of_every_death_is_left_out_of_the_reason() -> None:
    said = "The actor died.\n  Its node is gone. There are some potential root causes. (1) ..."
    assert reason(RuntimeError(said)) == "Its node is gone"
    assert reason(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize("version", ["2.54.1", "1.13.0", "3.0.0"])
def test_a_ray_that_is_too_old_or_too_new(version: str) -> None:
    with pytest.raises(RefusedError, match=f"version {version}, and .* needs one from 2.55 to below 3"):
        check_version(version)


@pytest.mark.parametrize("version", ["2.55.0", "2.60.0", "2.100.0rc1"])
def test_a_ray_that_will_do(version: str) -> None:
    check_version(version)


def test_a_worker_that_fits_on_no_node() -> None:
    with pytest.raises(
        RefusedError, match=r"needs 1 GPU and 65 CPU on one node, .* the most on one is 8 GPU and 64 CPU"
    ):
        check_room([bundle(seat(cpus=65), uses_gpus=True)], [SMALL, LARGE])
    with pytest.raises(RefusedError, match=r"needs 1 GPU and 1 CPU on one node, .* is 0 GPU and 8 CPU"):
        check_room([bundle(seat(), uses_gpus=True)], [SMALL])


def test_a_worker_with_a_gpu_where_there_are_none() -> None:
    with pytest.raises(RefusedError, match=r"has that; the most on one is .*\. Add GPUs, or take --device cpu\."):
        check_room([{"CPU": 1, "GPU": 1}], [SMALL])


def test_workers_that_fit_one_by_one_and_not_together() -> None:
    bundles = [bundle(seat(), uses_gpus=True)] * 9
    with pytest.raises(RefusedError, match="The 9 workers need 9 GPUs, and the Ray cluster has 8") as refused:
        check_room(bundles, [LARGE])
    assert "--sample-workers" in str(refused.value)
    check_room(bundles, [LARGE, OTHER])


def test_gpus_are_asked_for_where_there_are_some_unless_that_is_said() -> None:
    assert uses_gpus("auto", [SMALL, LARGE])
    assert not uses_gpus("auto", [SMALL])
    assert not uses_gpus("cpu", [LARGE])
    assert uses_gpus("cuda", [SMALL])


def test_gpus_of_different_kinds() -> None:
    check_kinds("m", [LARGE, LARGE, SMALL])
    with pytest.raises(RefusedError, match=r"'m' would be on GPUs of different kinds \(A100, H100\)"):
        check_kinds("m", [LARGE, OTHER])


def test_who_may_be_placed_later_stays_with_the_gpus_there_are() -> None:
    assert only_kind([LARGE, LARGE, SMALL]) == {"accelerator_type:H100": 0.001}
    assert only_kind([LARGE, OTHER]) == {}, "they may fit on either"
    assert only_kind([SMALL]) == {}


def test_who_needs_what_is_on_this_node_stays_there() -> None:
    node = Node({"CPU": 8.0, "node:__internal_head__": 1.0, "node:10.0.0.7": 1.0})
    assert only_here(node) == {"node:10.0.0.7": 0.001}


def test_state_of_this_machine_with_workers_elsewhere() -> None:
    check_state("", [SMALL, SMALL])
    check_state("the database", [SMALL])
    with pytest.raises(RefusedError, match=r"2 nodes, .* this machine: the database"):
        check_state("the database", [SMALL, SMALL])


def test_what_is_kept_on_this_machine_is_named_with_the_remedy(tmp_path: Path) -> None:
    def kept_here(**settings: str) -> str:
        config = ServerConfig(models=MODELS, state=tmp_path, ray="auto", **settings)  # type: ignore[arg-type]
        return RayLives(config, {})._settings.kept_here

    assert "--database" in kept_here()
    assert "--storage" in kept_here()
    assert "--database" not in kept_here(database="postgresql://h/d")
    assert kept_here(database="postgresql://h/d", storage="s3://b") == ""
    assert kept_here(database="postgresql+psycopg://h/d", storage="gs://b/p") == ""
    assert "--database" in kept_here(database="sqlite:////var/lib/tinsmith.db", storage="s3://b")
    assert kept_here(database="postgresql://h/d", storage="file:///shared/by/all/nodes") == ""


def test_without_ray_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "find_spec", lambda name: None)
    config = ServerConfig(models=MODELS, state=tmp_path, ray="auto")
    with pytest.raises(MissingExtraError, match=r"tinsmith\[ray\]"):
        asyncio.run(RayLives(config, {}).prepare())


@pytest.mark.parametrize(
    "address", ["ray://127.0.0.1:10001", "here", "here:there", ":6379", "here:0", "here:65536", "here:6²"]
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match=f"--ray is '{address}'.*HOST:PORT"):
        ServerConfig(models=MODELS, ray=address)


def test_replicas_without_a_cluster() -> None:
    with pytest.raises(ConfigError, match="--sample-workers is for workers on a Ray cluster"):
        ServerConfig(models=MODELS, sample_workers=2)
    with pytest.raises(ConfigError, match="--worker-cpus is for workers on a Ray cluster"):
        ServerConfig(models=MODELS, worker_cpus=2)


def test_patience_with_replicas_whose_number_is_fixed() -> None:
    with pytest.raises(ConfigError, match="--idle-sample-worker goes with bounds"):
        ServerConfig(models=MODELS, ray="auto", sample_workers=2, most_sample_workers=2, idle_sample_worker_seconds=5.0)


def test_more_workers_than_any_cluster_has() -> None:
    with pytest.raises(ConfigError, match="--sample-workers is more than 10,000"):
        ServerConfig(models=MODELS, ray="auto", sample_workers=1, most_sample_workers=10**9)
