"""Who works in a place: the last that began there, and nobody who was taken for dead."""

from __future__ import annotations

import pytest

from tests.server.store.making import sample, training
from tinsmith.server.store import Store
from tinsmith.server.store.leading import ReplacedError


def test_whoever_began_before_works_no_more(url: str) -> None:
    api, old, new = Store(url), Store(url), Store(url)
    base = training(0).base_model or ""
    job = api.jobs.enqueue(training(0)).request_id
    old.jobs.take_post(base, "train")
    assert [each.request_id for each in old.jobs.claim(base, "train/old", train=9)] == [job]
    new.jobs.take_post(base, "train")
    with pytest.raises(ReplacedError, match="in its place"):
        old.jobs.begin("train/old", [job])
    new.jobs.requeue(base, max_attempts=3, error="", place="train")
    for refused in (
        lambda: old.jobs.claim(base, "train/old", train=9),
        lambda: old.jobs.requeue(base, max_attempts=3, error="", place="train"),
    ):
        with pytest.raises(ReplacedError):
            refused()
    old.jobs.take_post(base, "train")  # after an outage: this does not bring it back
    with pytest.raises(ReplacedError):
        old.jobs.claim(base, "train/old", train=9)
    assert [each.request_id for each in new.jobs.claim(base, "train/new", train=9)] == [job]
    for store in (api, old, new):
        store.close()


def test_other_places_and_servers_are_not_concerned(url: str) -> None:
    api, trainer, replica = Store(url), Store(url), Store(url)
    base = training(0).base_model or ""
    trainer.jobs.take_post(base, "train")
    replica.jobs.take_post(base, "sample-0")
    trained = api.jobs.enqueue(training(0)).request_id
    api.jobs.enqueue(sample(0, replica="sample-0"))
    api.jobs.requeue(base, max_attempts=3, error="", place="train")
    assert [each.request_id for each in trainer.jobs.claim(base, "train/a", train=9)] == [trained]
    assert len(replica.jobs.claim(base, "sample-0/a", sample=9, replica="sample-0")) == 1
    for store in (api, trainer, replica):
        store.close()
