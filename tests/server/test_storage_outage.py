"""A worker whose files lie in a storage that goes away: who waits, who goes on, and that nothing is lost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.server.bucket import BUCKET, Bucket, running_bucket
from tinsmith.server import full_disk, objects
from tinsmith.server.store.records import Done

if TYPE_CHECKING:
    from tests.server.workbench import Workbench

MINE, OTHER = "s:train:0", "s:train:1"
REASON = "the storage of the server's files is out of reach; it is done when that is back"


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with running_bucket() as running:
        yield running


@pytest.fixture
def stored(bench: Workbench, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    """Files in the bucket, and no patience."""
    for module, name in ((objects, "LOOK_SECONDS"), (full_disk, "LOOK_SECONDS"), (full_disk, "RETRY_SECONDS")):
        monkeypatch.setattr(module, name, 0.1)
    url = f"s3://{BUCKET}/{bench.state.name}"
    objects.Objects(url).claim("a database")
    bench.settings = msgspec.structs.replace(bench.settings, storage=url)
    return bench


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def save(bench: Workbench, seq_id: int) -> str:
    body = {"model_id": MINE, "seq_id": seq_id, "path": "a"}
    return bench.submit("save_weights", MINE, seq_id=seq_id, payload=msgspec.json.encode(body))


def is_open(bench: Workbench, job: str) -> bool:
    return bench.store.results.statuses([job])[job].outcome is None


def test_a_save_waits_alone_with_its_model_in_memory(stored: Workbench, bucket: Bucket) -> None:
    with stored.worker():
        stored.losses(stored.train(stored.create(MINE), range(1, 5)))
        stored.create(OTHER)
        bucket.go_away()
        saved, later = save(stored, 5), stored.train(MINE, range(7, 9))
        stored.step(MINE, 6)
        until(lambda: stored.no_room)
        stored.losses(stored.train(OTHER, range(1, 5)))
        stored.tokens(stored.sample(stored.base_sampler(), 0))
        sampler = stored.copied_sampler(OTHER, 5)
        stored.tokens(stored.sample(sampler, 0))
        assert is_open(stored, saved)
        assert stored.no_room == {MINE: REASON}
        bucket.come_back()
        assert isinstance(stored.outcome(saved), Done)
        stored.losses(later)
        until(lambda: not stored.no_room)
    assert stored.replays == []
    assert not [*stored.state.glob("checkpoints/*")], "nothing is kept in the state folder itself"


def test_what_is_not_in_memory_waits_for_its_files_and_goes_on(stored: Workbench, bucket: Bucket) -> None:
    stored.replay_bound(0.0)
    with stored.worker():
        stored.losses(stored.train(stored.create(MINE), range(1, 5)))
        sampler = stored.copied_sampler(MINE, 5)
        drawn = stored.tokens(stored.sample(sampler, 0))
        stored.step(MINE, 6)
        expected = stored.losses([stored.data(MINE, 7, forward_only=True)])
    shutil.rmtree(stored.state / "cache")
    bucket.go_away()
    with stored.worker():
        again, sample = stored.data(MINE, 8, first=7, forward_only=True), stored.sample(sampler, 1)
        until(lambda: stored.no_room == {MINE: REASON, sampler: REASON})
        stored.losses(stored.train(stored.create(OTHER), range(1, 5)))
        assert is_open(stored, again)
        assert is_open(stored, sample)
        bucket.come_back()
        assert stored.losses([again]) == stored.losses([stored.data(MINE, 9, first=7, forward_only=True)])
        assert stored.tokens(sample) == drawn
    assert len(expected) == 1
    assert sum(replay.total for replay in stored.replays) == 0, "all was in the snapshot of the worker that ended"
    waited = stored.store.jobs.history(MINE, 7, 9)
    assert all(job.attempts <= 1 for job in waited), "a try that met the outage does not count"
