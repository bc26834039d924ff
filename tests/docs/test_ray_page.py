"""The page about Ray: its files are those that are shipped, Kubernetes and Ray take them, its options exist."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.runtime_env import RuntimeEnv

from tests.docs.pages import DOCS, ROOT, blocks
from tests.docs.shell import commands, program
from tests.support.ray_head import RAY

PAGE = DOCS / "how-to" / "ray.md"
MANIFEST = ROOT / "deploy" / "raycluster.yaml"
JOB = ROOT / "deploy" / "ray-job.yaml"


def test_the_page_shows_the_files_as_they_are() -> None:
    assert blocks(PAGE, "yaml") == [file.read_text(encoding="utf-8") for file in (JOB, MANIFEST)]


def test_ray_takes_the_environment_of_the_job() -> None:
    wanted = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    assert RuntimeEnv(**wanted).env_vars() == {"RAY_JOB_STOP_WAIT_TIME_S": "60"}


@pytest.fixture(scope="module")
def cluster() -> Any:
    return yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))


def pods(cluster: Any) -> dict[str, Any]:
    spec = cluster["spec"]
    groups = {"head": spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}
    return {name: group["template"]["spec"] for name, group in groups.items()}


def test_it_is_a_cluster_of_kuberay(cluster: Any) -> None:
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert cluster["metadata"]["name"] == "tinsmith"
    assert {"rayVersion", "headGroupSpec", "workerGroupSpecs"} == cluster["spec"].keys()
    for group in [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "Kubernetes takes texts only"
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_kubernetes_takes_its_pods(cluster: Any) -> None:
    """For clusters of KubeRay themselves there is no schema among packages."""
    for name, pod in pods(cluster).items():
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}
        kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)


def test_every_pod_has_what_a_worker_needs(cluster: Any) -> None:
    images = set()
    for pod in pods(cluster).values():
        (container,) = pod["containers"]
        images.add(container["image"])
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert {*mounted.values()} == {"/var/lib/tinsmith", "/models"}
        assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
        assert container["envFrom"] == [{"secretRef": {"name": "tinsmith"}}]
    assert len(images) == 1, "every node has the same version"


def test_the_workers_of_the_page_fit_its_cluster(cluster: Any) -> None:
    """One that trains and two that sample, each with a GPU; the head has none, and no CPUs for them."""
    (group,) = cluster["spec"]["workerGroupSpecs"]
    (container,) = pods(cluster)["gpu"]["containers"]
    assert group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"]) == 3
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_port_of_the_api_is_open(cluster: Any) -> None:
    (container,) = pods(cluster)["head"]["containers"]
    assert {"name": "tinsmith", "containerPort": 8000} in container["ports"]


@pytest.mark.parametrize(
    ("command", "some"), [(["start"], {"--head", "--address"}), (["job", "submit"], {"--runtime-env", "--no-wait"})]
)
def test_ray_has_the_options_of_the_page(command: list[str], some: set[str]) -> None:
    shown = [program(words) for text in blocks(PAGE, "bash") for words in commands(text)]
    rays = [words[: words.index("--") if "--" in words else None] for words in shown]  # what comes behind is a server's
    begins = ["ray", *command]
    used = {word for words in rays if words[: len(begins)] == begins for word in words if word.startswith("--")}
    assert used >= some
    told = subprocess.run([*RAY, *command, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert used <= {*re.findall(r"--[a-z-]+", told)}
