"""A checkpoint of another owner is read as long as it is published, whenever that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.workbench import BASE, Workbench
from tinsmith.server.engine import adapter_files
from tinsmith.server.engine.adapters import AdapterSpec
from tinsmith.server.store.records import CheckpointKey, Done, Failed, JobKind, NewSampler, Outcome

ANNS, BENS = "s:train:0", "b:train:0"


class Ben:
    """He may read what Ann has published."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench

    def submit(self, kind: JobKind, seq_id: int, body: dict[str, Any], **fields: Any) -> str:
        payload = msgspec.json.encode(body)
        return self._bench.submit(kind, seq_id=seq_id, payload=payload, owner="ben", session_id="b", **fields)

    def create(self) -> None:
        self.submit("create_model", 0, {}, model_id=BENS)

    def step(self, seq_id: int) -> str:
        body = {"model_id": BENS, "seq_id": seq_id, "adam_params": {"learning_rate": 0.01}}
        return self.submit("optim_step", seq_id, body, model_id=BENS)

    def load(self, seq_id: int, path: str, **more: Any) -> str:
        body = {"model_id": BENS, "seq_id": seq_id, "path": path, "optimizer": False, **more}
        return self.submit("load_weights", seq_id, body, model_id=BENS)

    def sampler(self, path: str, saved_by: str | None) -> str:
        sampler = NewSampler(
            session_id="b",
            sampling_session_seq_id=0,
            owner="ben",
            base_model=BASE,
            model_path=path,
            saved_by=saved_by,
        )
        return self._bench.store.samplers.create(sampler).sampler_id

    def sample(self, sampler_id: str, seq_id: int) -> Outcome:
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"seed": 1, "max_tokens": 2},
        }
        return self._bench.outcome(self.submit("sample", seq_id, body, sampler_id=sampler_id))


@pytest.fixture
def ben(bench: Workbench) -> Ben:
    return Ben(bench)


def published(bench: Workbench, seq_id: int) -> str:
    path = bench.save(ANNS, seq_id, "state", overwrite=True)
    bench.store.checkpoints.set_public(CheckpointKey.of(path), "ann", True)
    return path


def withdraw(bench: Workbench, path: str, *, by_overwriting: bool) -> None:
    """A checkpoint that is saved over a published one is not published."""
    if by_overwriting:
        bench.save(ANNS, 2, "state", overwrite=True)
    else:
        bench.store.checkpoints.set_public(CheckpointKey.of(path), "ann", False)
    assert bench.store.checkpoints.get(CheckpointKey.of(path), "ben") is None


def is_gone(outcome: Outcome, path: str) -> bool:
    return isinstance(outcome, Failed) and outcome.error == f"{path} does not exist any more."


@pytest.mark.parametrize("by_overwriting", [False, True])
def test_a_load_that_had_to_wait_reads_nothing_that_was_withdrawn(
    bench: Workbench, ben: Ben, by_overwriting: bool
) -> None:
    with bench.worker():
        bench.create(ANNS)
        ben.create()
        path = published(bench, 1)
        load = ben.load(2, path)  # number 1 is still missing
        withdraw(bench, path, by_overwriting=by_overwriting)
        ben.step(1)
        assert is_gone(bench.outcome(load), path)
        assert isinstance(bench.outcome(ben.step(3)), Done), "the model goes on as it was"
        assert isinstance(bench.outcome(ben.load(4, path, reader="ann")), Done), "a credential of hers was shown"


@pytest.mark.parametrize("by_overwriting", [False, True])
@pytest.mark.parametrize("knows_writer", [False, True])
def test_a_sampler_reads_nothing_that_was_withdrawn(
    bench: Workbench, ben: Ben, by_overwriting: bool, knows_writer: bool
) -> None:
    with bench.worker():
        bench.create(ANNS)
        path = published(bench, 1)
        sampler_id = ben.sampler(path, f"{ANNS}:1" if knows_writer else None)
        withdraw(bench, path, by_overwriting=by_overwriting)
        assert is_gone(ben.sample(sampler_id, 0), path)
        published(bench, 3 if by_overwriting else 2)
        again = ben.sample(sampler_id, 1)
        assert isinstance(again, Failed if knows_writer else Done), "it is for what was published when it was made"


def test_a_sampler_has_nothing_of_what_was_withdrawn_while_it_was_read(
    bench: Workbench, ben: Ben, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may have been saved in its place: who samples need not be who trains."""
    read_spec = adapter_files.read_spec

    def late(folder: Path) -> AdapterSpec:
        withdraw(bench, path, by_overwriting=False)
        return read_spec(folder)

    with bench.worker():
        bench.create(ANNS)
        path = published(bench, 1)
        sampler_id = ben.sampler(path, f"{ANNS}:1")
        monkeypatch.setattr(adapter_files, "read_spec", late)
        assert is_gone(ben.sample(sampler_id, 0), path)
        assert is_gone(ben.sample(sampler_id, 1), path)


def test_a_sampler_that_has_its_weights_keeps_them(bench: Workbench, ben: Ben) -> None:
    with bench.worker():
        bench.create(ANNS)
        path = published(bench, 1)
        sampler_id = ben.sampler(path, f"{ANNS}:1")
        assert isinstance(ben.sample(sampler_id, 0), Done)
        withdraw(bench, path, by_overwriting=True)
        assert isinstance(ben.sample(sampler_id, 1), Done)
    with bench.worker():
        assert is_gone(ben.sample(sampler_id, 2), path), "another worker would have to read them"
