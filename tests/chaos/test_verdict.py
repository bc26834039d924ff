"""The verdict sees what it is there to see: each kind of harm, done on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.chaos.ledger import Ledger, Round, read_rounds
from tests.chaos.verdict import Expected, check_rounds, check_store
from tinsmith.server.checkpoints import CheckpointFolders, Folders
from tinsmith.server.store import Store, ids
from tinsmith.server.store.records import Done, JobKind, NewJob

MODEL = "session:train:0"
CALLED: list[JobKind] = ["create_model", "forward_backward", "optim_step"]
END = f"tinker://{MODEL}/weights/end"


@pytest.fixture
def database(tmp_path: Path) -> str:
    """One in which three operations of a model were done."""
    url = f"sqlite:///{tmp_path / 'tinsmith.db'}"
    store = Store(url)
    for number, kind in enumerate(CALLED):
        job = NewJob(
            kind=kind, owner="ann", payload=b"", session_id="s", base_model="tiny", model_id=MODEL, seq_id=number
        )
        store.jobs.enqueue(job)
    done = Done(result=b"{}", content_type="application/json")
    store.jobs.complete("w", {job.request_id: done for job in store.jobs.claim("tiny", "w", train=9)})
    store.close()
    return url


def one_round(**changes: Any) -> Round:
    return Round(**{"name": "patient.tinsmith, round 1", "models": {MODEL: CALLED}, "is_over": True, **changes})


def saved(root: Path, weights: list[float]) -> Folders:
    checkpoints = CheckpointFolders(root)
    with checkpoints.writing(END) as folder:
        save_file({"weights": np.array(weights, np.float32)}, folder / "adapter.safetensors")
    return checkpoints


def test_what_was_done_once_is_no_reason_to_complain(database: str) -> None:
    acknowledged = [ids.request_id(MODEL, number) for number in range(3)]
    assert check_store([one_round(acknowledged=acknowledged)], database) == []


def test_an_operation_that_is_lost_is_found(database: str) -> None:
    (complaint,) = check_store([one_round(models={MODEL: [*CALLED, "optim_step"]})], database)
    assert MODEL in complaint
    (complaint,) = check_store([one_round(acknowledged=[ids.request_id(MODEL, 3)])], database)
    assert "was acknowledged and is lost" in complaint


def test_an_operation_that_is_there_twice_is_found(database: str) -> None:
    assert check_store([one_round(models={MODEL: CALLED[:2]})], database)


def test_an_operation_that_still_waits_is_found(database: str) -> None:
    store = Store(database)
    store.jobs.enqueue(
        NewJob(kind="optim_step", owner="ann", payload=b"", session_id="s", base_model="tiny", model_id=MODEL, seq_id=3)
    )
    store.close()
    assert f"{ids.request_id(MODEL, 3)} is queued" in check_store([one_round()], database)


def test_weights_that_differ_are_found_by_the_last_bit_or_by_the_tolerance(tmp_path: Path) -> None:
    found = one_round(results=[("save_weights", END)])
    expected = Expected([found], saved(tmp_path / "calm", [1.0, 2.0]))
    for name, weights, complaints in (("same", 2.0, (0, 0)), ("close", 2.000001, (1, 0)), ("far", 2.001, (1, 1))):
        checkpoints = saved(tmp_path / name, [1.0, weights])
        counted = tuple(len(check_rounds([found], expected, checkpoints, exactly=exactly)) for exactly in (True, False))
        assert counted == complaints, name


@pytest.mark.parametrize(
    "harm",
    [
        {"results": [("sample", [[1, 2, 4]]), ("forward_backward", 1.0)]},
        {"results": [("sample", [[1, 2, 3]]), ("forward_backward", 1.1)]},
        {"results": [("sample", [[1, 2, 3]])]},
        {"is_over": False},
        {"error": "it was too much"},
    ],
)
def test_a_round_that_went_otherwise_is_found(tmp_path: Path, harm: dict[str, Any]) -> None:
    calm = one_round(results=[("sample", [[1, 2, 3]]), ("forward_backward", 1.0)])
    nothing_saved = CheckpointFolders(tmp_path)
    expected = Expected([calm], nothing_saved)
    assert check_rounds([calm], expected, nothing_saved, exactly=True) == []
    assert check_rounds([one_round(**{"results": calm.results, **harm})], expected, nothing_saved, exactly=False)


def test_a_ledger_that_breaks_off_is_read_as_a_round_that_did_not_end(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "patient.tinsmith.ledger")
    ledger.note("round", number=1)
    ledger.note("called", model=MODEL, kind="create_model")
    ledger.close()
    (found,) = read_rounds(tmp_path)
    assert (found.models, found.is_over) == ({MODEL: ["create_model"]}, False)
