"""What the faults have done: the ledgers against an undisturbed run, against the store, and what is left lying about.

Every function gives back complaints; none means that all is well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa
from safetensors.numpy import load_file

from tests.chaos.ledger import Round, program_of
from tests.chaos.target import Target
from tinsmith.server.checkpoints import Folders
from tinsmith.server.snapshots import is_needed
from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.records import Snapshots
from tinsmith.server.store.schema import jobs, models

TOLERANCE = 1e-5
_HALF_WRITTEN = (".unfinished", ".replaced", ".tmp")


class Expected:
    """What an undisturbed run of each program gave, and the files it saved."""

    def __init__(self, rounds: Sequence[Round], checkpoints: Folders) -> None:
        self._rounds = {program_of(each.name): each for each in rounds}
        self._checkpoints = checkpoints

    def differences(self, found: Round, checkpoints: Folders, *, exactly: bool) -> Iterator[str]:
        expected = self._rounds[program_of(found.name)]
        if len(found.results) != len(expected.results):
            yield f"{len(found.results)} results instead of {len(expected.results)}"
        for number, (mine, theirs) in enumerate(zip(found.results, expected.results, strict=False)):
            if mine[0] == theirs[0] == "save_weights":
                tensors, expected_tensors = _tensors(checkpoints, mine[1]), _tensors(self._checkpoints, theirs[1])
                for complaint in _unlike(tensors, expected_tensors, exactly):
                    yield f"result {number}, {mine[1]}: {complaint}"
            elif not _alike(mine, theirs, exactly):
                yield f"result {number} is {mine} instead of {theirs}"


def check_rounds(rounds: Sequence[Round], expected: Expected, checkpoints: Folders, *, exactly: bool) -> list[str]:
    """Every round came to its end with the results of the undisturbed one."""
    complaints = []
    for each in rounds:
        if each.error is not None:
            complaints.append(f"{each.name} failed: {each.error}")
        elif not each.is_over:
            complaints.append(f"{each.name} did not end")
        else:
            found = expected.differences(each, checkpoints, exactly=exactly)
            complaints += [f"{each.name}: {difference}" for difference in found]
    return complaints


def _alike(mine: tuple[str, Any], theirs: tuple[str, Any], exactly: bool) -> bool:
    if mine[0] == theirs[0] and isinstance(mine[1], float) and isinstance(theirs[1], float) and not exactly:
        return abs(mine[1] - theirs[1]) <= TOLERANCE * max(1.0, abs(theirs[1]))
    return mine == theirs


def _tensors(checkpoints: Folders, path: str) -> Mapping[str, Any]:
    """Weights and optimizer of a checkpoint."""
    files = sorted(checkpoints.folder(path).glob("*.safetensors"))
    return {f"{file.stem}: {name}": tensor for file in files for name, tensor in load_file(file).items()}


def _unlike(mine: Mapping[str, Any], theirs: Mapping[str, Any], exactly: bool) -> Iterator[str]:
    if not mine or mine.keys() != theirs.keys():
        yield f"it holds {sorted(mine)} instead of {sorted(theirs)}"
    for name in mine.keys() & theirs.keys():
        if exactly and mine[name].tobytes() != theirs[name].tobytes():
            yield f"{name} is not the same to the last bit"
        elif not np.allclose(mine[name], theirs[name], rtol=TOLERANCE, atol=TOLERANCE):
            yield f"{name} differs by {np.abs(mine[name] - theirs[name]).max():.2g}"


def check_store(rounds: Sequence[Round], database: str) -> list[str]:
    """Whatever was called or acknowledged is there once and done, in the order of the calls, and nothing waits."""
    columns = (jobs.c.request_id, jobs.c.stream, jobs.c.kind, jobs.c.state)
    rows = _rows(database, sa.select(*columns).order_by(jobs.c.stream, jobs.c.seq_id))
    states = {row.request_id: row.state for row in rows}
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(row.stream, []).append(row.kind)
    complaints = [f"{request_id} is {state}" for request_id, state in states.items() if state != "done"]
    for each in rounds:
        lost = [request_id for request_id in each.acknowledged if request_id not in states]
        complaints += [f"{each.name}: {request_id} was acknowledged and is lost" for request_id in lost]
        for model, called in each.models.items():
            if kinds.get(model) != called:
                complaints.append(f"{each.name}: {model} was to do {called}; the store has {kinds.get(model)}")
    return complaints


def check_processes(victim: Target) -> list[str]:
    """None is left when it has ended."""
    return [f"process {pid} is still there" for pid in victim.left_over()]


def check_files(victim: Target) -> list[str]:
    """No half-written file, no snapshot that nobody knows."""
    strange = [path for state in victim.states for path in state.rglob("*") if path.name.startswith(_HALF_WRITTEN)]
    strange += [path for state in victim.states for path in state.iterdir() if path.name.endswith(("-wal", "-shm"))]
    complaints = [f"{path} is still there" for path in strange]
    unknown = _unknown_snapshots(victim.snapshots, victim.database)
    return complaints + [f"snapshot {name} is still there" for name in unknown]


def _unknown_snapshots(snapshots: Folders, database: str) -> list[str]:
    columns = (models.c.snapshot_seq.label("last"), models.c.previous_snapshot_seq.label("previous"))
    rows = _rows(database, sa.select(models.c.model_id, *columns))
    known = {row.model_id.replace(":", "_"): Snapshots(last=row.last, previous=row.previous) for row in rows}
    found = [(run, name) for run in sorted(snapshots.runs()) for name in sorted(snapshots.names(run))]
    return [f"{name} of {run}" for run, name in found if not is_needed(name, known[run])]


def _rows(database: str, query: sa.Select[Any]) -> list[Row]:
    opened = Database(database)
    try:
        return opened.all(query, lambda row: row)
    finally:
        opened.close()
