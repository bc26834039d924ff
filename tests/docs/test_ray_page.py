"""The page about Ray: its manifest is the file that is shipped and has the shape KubeRay wants, its options exist."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT, blocks
from tests.docs.shell import commands, program
from tests.support.ray_head import RAY

PAGE = DOCS / "how-to" / "ray.md"
MANIFEST = ROOT / "deploy" / "raycluster.yaml"


def test_the_page_shows_the_manifest_as_it_is() -> None:
    assert blocks(PAGE, "yaml") == [MANIFEST.read_text(encoding="utf-8")]


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


def test_ray_start_has_the_options_of_the_page() -> None:
    shown = [program(words) for text in blocks(PAGE, "bash") for words in commands(text)]
    used = {word for words in shown if words[:2] == ["ray", "start"] for word in words if word.startswith("--")}
    assert used >= {"--head", "--address"}
    told = subprocess.run([*RAY, "start", "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert used <= {*re.findall(r"--[a-z-]+", told)}
