"""Jobs of models that cannot go on for now: put back, and left out when others are taken."""

from __future__ import annotations

from tests.server.store.making import MODEL, training
from tinsmith.server.store import Store

BASE = "tiny"
OTHER = "s:train:1"


def claimed(store: Store, without: tuple[str, ...] = ()) -> list[tuple[str | None, int]]:
    return [(job.model_id, job.seq_id) for job in store.jobs.claim(BASE, "w", train=9, without=without)]


def test_what_is_put_back_of_one_model_waits_in_its_old_place_and_others_are_taken(store: Store) -> None:
    mine = [store.jobs.enqueue(training(seq_id)).request_id for seq_id in range(2)]
    store.jobs.enqueue(training(0, model_id=OTHER))
    assert len(claimed(store)) == 3
    store.jobs.begin("w", mine[:1])
    assert store.jobs.release(BASE, "w", begun=mine[:1], models=[MODEL]) == []
    store.jobs.enqueue(training(1, model_id=OTHER))
    assert claimed(store, without=(MODEL,)) == [(OTHER, 1)]
    assert claimed(store, without=(MODEL,)) == []
    again = store.jobs.claim(BASE, "w", train=9)
    assert [(job.model_id, job.seq_id, job.attempts) for job in again] == [(MODEL, 0, 0), (MODEL, 1, 0)]


def test_a_job_that_was_to_be_cancelled_is_not_put_back(store: Store) -> None:
    request_id = store.jobs.enqueue(training(0)).request_id
    claimed(store)
    assert store.jobs.cancel(request_id, "ann") == "asked"
    assert store.jobs.release(BASE, "w", begun=[], models=[MODEL]) == [request_id]
