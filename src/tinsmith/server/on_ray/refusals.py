"""What of a Ray cluster is refused, and in which words. Pure, and without Ray."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tinsmith._version import __version__
from tinsmith.server.on_ray.messages import Seat

OLDEST_RAY = (2, 55)
_KIND = "accelerator_type:"
_NODE = "node:"
_A_LITTLE = 0.001
"""Of what a node has one of, so that many can have some."""
_GUESSES = " There are some potential root causes"
"""What Ray says after this is the same of every death."""


class RefusedError(Exception):
    """The message says what is wrong and what to change."""


class Node(NamedTuple):
    resources: Mapping[str, float]

    @property
    def gpu_kinds(self) -> set[str]:
        return {name.removeprefix(_KIND) for name in self.resources if name.startswith(_KIND)}


def check_version(installed: str) -> None:
    version = tuple(int(part) for part in installed.split(".")[:2])
    if not OLDEST_RAY <= version < (3, 0):
        raise RefusedError(
            f"Ray is installed in version {installed}, and Tinsmith {__version__} needs one from "
            f"{'.'.join(map(str, OLDEST_RAY))} to below 3. Install such a one here and on all nodes: pip install "
            "'tinsmith[ray]'."
        )


def other_version(version: str, where: str) -> str:
    return f"Tinsmith is of version {version} on {where} and {__version__} here; install the same"


def reason(error: Exception) -> str:
    """What is wrong in an error of Ray's, which tells much more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[-1].partition(_GUESSES)[0].rstrip(".") if lines else ""
    return said or type(error).__name__


def check_kinds(base_model: str, nodes: Iterable[Node]) -> None:
    """Refuses GPUs of different kinds for the workers of one base model, which would be on these nodes."""
    kinds = {kind for node in nodes for kind in node.gpu_kinds}
    if len(kinds) > 1:
        raise RefusedError(
            f"The workers of {base_model!r} would be on GPUs of different kinds ({', '.join(sorted(kinds))}), which "
            "round differently: the same seed would give other samples on each. Start Ray on nodes of one kind, or ask "
            "for fewer workers, so that they fit there."
        )


def same_kind(nodes: Iterable[Node]) -> dict[str, float]:
    """What a bundle asks for besides, so that its GPUs are of the kind of these nodes: Ray counts kinds by nodes."""
    return {f"{_KIND}{kind}": _A_LITTLE for node in nodes for kind in node.gpu_kinds}


def only_kind(nodes: Iterable[Node]) -> dict[str, float]:
    """The same for those of the first: if all GPUs are of one kind, nobody moves to another that is added later."""
    asked = same_kind(nodes)
    return asked if len(asked) == 1 else {}


def only_here(node: Node) -> dict[str, float]:
    """What a bundle asks for besides, so that it stays on this node, also if others are added later."""
    return {name: _A_LITTLE for name in node.resources if name.startswith(_NODE) and not name.endswith("__")}


def check_state(kept_here: str, nodes: Collection[Node]) -> None:
    if kept_here and len(nodes) > 1:
        raise RefusedError(
            f"The Ray cluster has {len(nodes)} nodes, and workers on other nodes could not reach what is kept on this "
            f"machine: {kept_here}."
        )


def uses_gpus(device: str, nodes: Iterable[Node]) -> bool:
    return device == "cuda" or (device == "auto" and any(node.resources.get("GPU", 0) for node in nodes))


def bundle(seat: Seat, uses_gpus: bool) -> dict[str, float]:
    """What each process of a worker needs of one node."""
    return {"CPU": seat.cpus, **({"GPU": 1} if uses_gpus else {})}


def check_room(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Node]) -> None:
    """Refuses what could not be placed if nobody else used the cluster."""
    total = Counter[str]()
    for node in nodes:
        total.update({name: math.floor(amount) for name, amount in node.resources.items()})
    for needed in bundles:
        if not any(all(node.resources.get(name, 0) >= amount for name, amount in needed.items()) for node in nodes):
            largest = [{name: max(node.resources.get(name, 0) for node in nodes) for name in needed}]
            has_gpus = largest[0].get("GPU", 1) >= 1
            remedy = "larger nodes, or ask for less with --worker-cpus" if has_gpus else "GPUs, or take --device cpu"
            raise RefusedError(
                f"A worker needs {said([needed])} on one node, and no node of the Ray cluster has that; the most on "
                f"one is {said(largest)}. Add {remedy}."
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
