"""A Ray cluster with room for every worker: found, checked and reserved, or refused with what to change."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import defaultdict
from typing import Any

import ray
from ray.exceptions import AuthenticationError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
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
    only_here,
    only_kind,
    said,
    same_kind,
    uses_gpus,
)

log = logging.getLogger(__name__)

FIRST_REPLICA = "sample-0"
CONNECT_SECONDS = 10.0
TELL_SECONDS = 5.0
PLACE_SECONDS = 60.0
"""For others to make room, such as the workers of a server that was stopped just before this one."""


class Cluster:
    def __init__(self, settings: ClusterSettings, namespace: str) -> None:
        self._settings = settings
        check_version(ray.__version__)
        _connect(settings.address, namespace)
        self._nodes = _living_nodes()
        check_state(settings.kept_here, self._nodes.values())
        self._here = ray.get_runtime_context().get_node_id()
        self.uses_gpus = uses_gpus(settings.device, self._nodes.values())
        where = only_kind(self._nodes.values()) if self.uses_gpus else {}
        if settings.kept_here:
            where |= only_here(self._nodes[self._here])
        self._bundles = {
            (seat.base_model, seat.place): {**bundle(seat, self.uses_gpus), **where} for seat in settings.seats
        }
        self._sizes = {(seat.base_model, seat.place): seat.processes for seat in settings.seats}
        check_room([each for seat in self._bundles for each in self._bundles_of(seat)], list(self._nodes.values()))
        self._groups = self._placed()
        self._later: dict[tuple[str, str], PlacementGroup] = {}

    def has_this_node(self) -> bool:
        return any(node["NodeID"] == self._here and node["Alive"] for node in ray.nodes())

    def member_options(self, base_model: str, place: str) -> list[dict[str, Any]]:
        """Where those go that share the training of this worker, by their ranks."""
        return [self.options(base_model, place, rank) for rank in range(1, self._sizes.get((base_model, place), 1))]

    def options(self, base_model: str, place: str, rank: int = 0) -> dict[str, Any]:
        """Where the actor of this worker goes. A replica that came later has a group of its own, as soon as there is
        room: until then its actor waits, and a cluster that can grow knows for what."""
        group, index = self._groups.get((base_model, place)) or self._added(base_model, place)
        needed = self._bundles.get((base_model, place)) or self._bundles[base_model, FIRST_REPLICA]
        return {
            "num_cpus": needed["CPU"],
            "num_gpus": needed.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index + rank),
        }

    def release(self, base_model: str, place: str) -> None:
        """The actor has ended: the room of a replica that came later is for others."""
        if (group := self._later.pop((base_model, place), None)) is not None:
            with contextlib.suppress(Exception):  # the cluster is gone, and the group with it
                remove_placement_group(group)

    def _added(self, base_model: str, place: str) -> tuple[PlacementGroup, int]:
        """The one that it has, if Ray did not take its actor the last time."""
        if (base_model, place) not in self._later:
            needed = self._bundles[base_model, FIRST_REPLICA]
            first, _ = self._groups[base_model, FIRST_REPLICA]
            self._nodes = _living_nodes()  # the first replica may be on one that was added
            same = same_kind(self._nodes_of(first)) if self.uses_gpus else {}
            self._later[base_model, place] = placement_group([{**needed, **same}], strategy="PACK")
        return self._later[base_model, place], 0

    def _placed(self) -> dict[tuple[str, str], tuple[PlacementGroup, int]]:
        """A group for each base model, with a bundle for each process of its workers; where the first of each is."""
        seats: defaultdict[str, list[str]] = defaultdict(list)
        for base_model, place in self._bundles:
            seats[base_model].append(place)
        placed = {}
        for base_model, places in seats.items():
            firsts: list[int] = []
            bundles: list[dict[str, float]] = []
            for place in places:
                firsts.append(len(bundles))
                bundles += self._bundles_of((base_model, place))
            group = placement_group(bundles, strategy="PACK")
            if not group.wait(TELL_SECONDS):
                log.warning("%s waits for room on the Ray cluster: its workers need %s.", base_model, said(bundles))
            if not group.wait(PLACE_SECONDS):
                raise RefusedError(
                    f"The Ray cluster has no room for the workers of {base_model!r}, which need {said(bundles)}; "
                    f"{said([ray.available_resources()])} of {said([ray.cluster_resources()])} are free. Stop other "
                    "work there, add nodes, or ask for less with --sample-workers, --train-workers or --worker-cpus."
                )
            self._check_kinds(base_model, group)
            placed.update({(base_model, place): (group, first) for place, first in zip(places, firsts, strict=True)})
        return placed

    def _bundles_of(self, seat: tuple[str, str]) -> list[dict[str, float]]:
        return [self._bundles[seat]] * self._sizes[seat]

    def _check_kinds(self, base_model: str, group: PlacementGroup) -> None:
        if self.uses_gpus:
            check_kinds(base_model, self._nodes_of(group))

    def _nodes_of(self, group: PlacementGroup) -> list[Node]:
        where = placement_group_table(group)["bundles_to_node_id"].values()
        return [self._nodes[node_id] for node_id in where if node_id in self._nodes]


def _living_nodes() -> dict[str, Node]:
    return {node["NodeID"]: Node(node["Resources"]) for node in ray.nodes() if node["Alive"]}


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
        ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (AuthenticationError, ConnectionError, OSError, ValueError) as error:  # a wrong token is told as any of them
        if isinstance(error, AuthenticationError) or "token" in str(error).lower():
            raise RefusedError(
                f"The Ray cluster at {address} wants another token: {_first_line(error)} Set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN or ~/.ray/auth_token as on its nodes."
            ) from error
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
