"""A Ray cluster with room for every worker: found, checked and reserved, or refused with what to change."""

from __future__ import annotations

import math
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tinsmith._version import __version__
from tinsmith.server.on_ray.messages import ClusterSettings, Seat

OLDEST_RAY = (2, 55)
CONNECT_SECONDS = 10.0
PLACE_SECONDS = 60.0
"""For others to make room, such as the workers of a server that was stopped just before this one."""
_KIND = "accelerator_type:"


class RefusedError(Exception):
    """The message says what is wrong and what to change."""


class Node(NamedTuple):
    node_id: str
    address: str
    resources: Mapping[str, float]

    @property
    def gpu_kinds(self) -> set[str]:
        return {name.removeprefix(_KIND) for name in self.resources if name.startswith(_KIND)}


class Cluster:
    def __init__(self, settings: ClusterSettings, namespace: str) -> None:
        self._settings = settings
        _check_version()
        _connect(settings.address, namespace)
        self._nodes = {node["NodeID"]: _node(node) for node in ray.nodes() if node["Alive"]}
        _check_state(settings.kept_here, self._nodes.values())
        self._uses_gpus = _uses_gpus(settings.device, self._nodes.values())
        self._bundles = {(seat.base_model, seat.place): bundle(seat, self._uses_gpus) for seat in settings.seats}
        check_room(list(self._bundles.values()), list(self._nodes.values()))
        self._groups = self._placed()

    def options(self, base_model: str, place: str) -> dict[str, Any]:
        """Where the actor of this worker goes."""
        group, index = self._groups[base_model, place]
        needed = self._bundles[base_model, place]
        return {
            "num_cpus": needed["CPU"],
            "num_gpus": needed.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }

    def _placed(self) -> dict[tuple[str, str], tuple[PlacementGroup, int]]:
        """A group for each base model, with a bundle for each of its workers."""
        seats: defaultdict[str, list[str]] = defaultdict(list)
        for base_model, place in self._bundles:
            seats[base_model].append(place)
        placed = {}
        for base_model, places in seats.items():
            bundles = [self._bundles[base_model, place] for place in places]
            group = placement_group(bundles, strategy="PACK")
            if not group.wait(PLACE_SECONDS):
                raise RefusedError(
                    f"The Ray cluster has no room for the workers of {base_model!r}, which need {said(bundles)}; "
                    f"{said([ray.available_resources()])} of {said([ray.cluster_resources()])} are free. Stop other "
                    "work there, add nodes, or ask for less with --sample-workers, --train-workers or --worker-cpus."
                )
            self._check_kinds(base_model, group)
            placed.update({(base_model, place): (group, index) for index, place in enumerate(places)})
        return placed

    def _check_kinds(self, base_model: str, group: PlacementGroup) -> None:
        if not self._uses_gpus:
            return
        where = placement_group_table(group)["bundles_to_node_id"].values()
        kinds = {kind for node_id in where if node_id in self._nodes for kind in self._nodes[node_id].gpu_kinds}
        if len(kinds) > 1:
            raise RefusedError(
                f"The workers of {base_model!r} would be on GPUs of different kinds ({', '.join(sorted(kinds))}), "
                "which round differently: the same seed would give other samples on each. Start Ray on nodes of "
                "one kind, or ask for fewer workers, so that they fit there."
            )


def _check_version() -> None:
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if not OLDEST_RAY <= version < (3, 0):
        raise RefusedError(
            f"Ray is installed in version {ray.__version__}, and Tinsmith {__version__} needs one from "
            f"{'.'.join(map(str, OLDEST_RAY))} to below 3. Install such a one here and on all nodes: pip install "
            "'tinsmith[ray]'."
        )


def _connect(address: str, namespace: str) -> None:
    """Asks the port first: Ray itself would try for minutes."""
    if "://" in address:
        raise RefusedError(
            f"--ray is {address!r}, and Tinsmith takes no Ray Client: start the server on a node of the cluster, with "
            "--ray auto or --ray HOST:PORT."
        )
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise RefusedError(f"--ray is {address!r}; give HOST:PORT of the cluster's head, or auto.")
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise RefusedError(
                f"There is no Ray cluster at {address}: {error.strerror or error}. Start one with `ray start --head`, "
                "or correct --ray."
            ) from error
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="warning")
    except (ConnectionError, OSError, ValueError) as error:
        raise RefusedError(
            f"The Ray cluster at {address} cannot be joined: {_first_line(error)} Start Ray on this machine, with "
            "`ray start`, or correct --ray."
        ) from error
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise RefusedError(f"The Ray cluster at {address} cannot be joined: {_first_line(error)}") from error
        raise RefusedError(
            f"The Ray cluster at {address} is of another version: {' '.join(str(error).split())} Install the same Ray "
            "and the same Python on all nodes."
        ) from error


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{line}."


def _node(node: Mapping[str, Any]) -> Node:
    return Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])


def _check_state(kept_here: str, nodes: Iterable[Node]) -> None:
    num_nodes = len([*nodes])
    if kept_here and num_nodes > 1:
        raise RefusedError(
            f"The Ray cluster has {num_nodes} nodes, and workers on other nodes could not reach what is kept on this "
            f"machine: {kept_here}."
        )


def _uses_gpus(device: str, nodes: Iterable[Node]) -> bool:
    return device == "cuda" or (device == "auto" and any(node.resources.get("GPU", 0) for node in nodes))


def bundle(seat: Seat, uses_gpus: bool) -> dict[str, float]:
    """What a worker needs of one node."""
    return {"CPU": seat.cpus, **({"GPU": seat.processes} if uses_gpus else {})}


def check_room(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Node]) -> None:
    """Refuses what could not be placed if nobody else used the cluster."""
    total = Counter[str]()
    for node in nodes:
        total.update({name: math.floor(amount) for name, amount in node.resources.items()})
    for needed in bundles:
        if not any(all(node.resources.get(name, 0) >= amount for name, amount in needed.items()) for node in nodes):
            largest = [{name: max(node.resources.get(name, 0) for node in nodes) for name in needed}]
            raise RefusedError(
                f"A worker needs {said([needed])} on one node, and no node of the Ray cluster has that; the most on "
                f"one is {said(largest)}. Add larger nodes, or ask for less with --train-workers or --worker-cpus."
            )
    for name in ("GPU", "CPU"):
        asked = sum(needed.get(name, 0) for needed in bundles)
        if asked > total[name]:
            raise RefusedError(
                f"The {len(bundles)} workers need {asked:g} {name}s, and the Ray cluster has {total[name]}. Add nodes, "
                "or ask for less with --sample-workers, --train-workers or --worker-cpus."
            )


def said(bundles: Iterable[Mapping[str, float]]) -> str:
    total = Counter[str]()
    for each in bundles:
        total.update({name: each[name] for name in ("GPU", "CPU") if name in each})
    return " and ".join(f"{amount:g} {name}" for name, amount in total.items()) or "nothing"
