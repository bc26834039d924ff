"""What a worker may write for a key, and how much it takes on at a time."""

from __future__ import annotations

import msgspec
import pytest

from tests.server.workbench import Workbench
from tinsmith.server import worker
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.store.records import Done, Failed


def test_a_worker_saves_no_more_than_a_key_may_keep(bench: Workbench) -> None:
    with bench.worker():
        bench.create("s:train:0")
        path = bench.save("s:train:0", 1, "first")
    folders = CheckpointFolders(bench.state / "checkpoints")
    size = folders.size_bytes(path)
    bench.settings = msgspec.structs.replace(bench.settings, max_checkpoint_bytes=size + 1)
    with bench.worker():
        body = {"model_id": "s:train:0", "seq_id": 2, "path": "second"}
        second = bench.submit("save_weights", "s:train:0", seq_id=2, payload=msgspec.json.encode(body))
        refused = bench.outcome(second)
        assert isinstance(refused, Failed)
        assert refused.category == "user"
        assert f"({size:,} bytes) cannot be saved" in refused.error
        assert bench.save("s:train:0", 3, "first", overwrite=True) == path, "what is replaced does not count"
    assert [folder.name for folder in folders.folder(path).parent.iterdir()] == ["first"]
    assert bench.store.checkpoints.kept_bytes("ann") == folders.size_bytes(path)


def test_payloads_that_are_larger_than_all_room_are_worked_on_one_by_one(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_CLAIMED_BYTES", 1)
    jobs = [bench.create("s:train:0"), *bench.train("s:train:0", range(1, 7))][1:]
    samples = [bench.sample(bench.base_sampler(), number, max_tokens=1) for number in range(3)]
    with bench.worker():
        assert all(isinstance(bench.outcome(request_id), Done) for request_id in (*jobs, *samples))
