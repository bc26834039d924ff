"""A Ray cluster with room for every worker: found, checked and reserved, or refused with what to change."""

from __future__ import annotations

import socket
from collections import defaultdict
from typing import Any

import ray
from ray.exceptions import AuthenticationError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tinsmith.server.on_ray.messages import ClusterSettings
from tinsmith.server.on_ray.refusals import (
    Node,
    RefusedError,
    bundle,
    check_kinds,
    check_room,
    check_state,
    check_version,
    said,
    uses_gpus,
)

CONNECT_SECONDS = 10.0
PLACE_SECONDS = 60.0
"""For others to make room, such as the workers of a server that was stopped just before this one."""


class Cluster:
    def __init__(self, settings: ClusterSettings, namespace: str) -> None:
        self._settings = settings
        check_version(ray.__version__)
        _connect(settings.address, namespace)
        self._nodes = {node["NodeID"]: Node(node["Resources"]) for node in ray.nodes() if node["Alive"]}
        check_state(settings.kept_here, self._nodes.values())
        self._uses_gpus = uses_gpus(settings.device, self._nodes.values())
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
        if self._uses_gpus:
            where = placement_group_table(group)["bundles_to_node_id"].values()
            check_kinds(base_model, [self._nodes[node_id] for node_id in where if node_id in self._nodes])


def _connect(address: str, namespace: str) -> None:
    """Asks the port first: Ray itself would try for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise RefusedError(
                f"There is no Ray cluster at {address}: {error.strerror or error}. Start one with `ray start --head`, "
                "or correct --ray."
            ) from error
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="warning")
    except (AuthenticationError, ConnectionError, OSError, ValueError) as error:  # a wrong token is told as any of them
        raise RefusedError(
            f"The Ray cluster at {address} cannot be joined: {_first_line(error)} Start Ray on this machine, with "
            "`ray start`, or correct --ray; if the cluster wants a token, set RAY_AUTH_MODE and RAY_AUTH_TOKEN as on "
            "its nodes."
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
