"""Jobs of models and samplers that cannot go on for now: put back, and left out when others are taken."""

from __future__ import annotations

from tests.server.store.making import MODEL, SAMPLER, sample, training
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
    assert store.jobs.release(BASE, "w", begun=mine[:1], requests=mine) == []
    store.jobs.enqueue(training(1, model_id=OTHER))
    assert claimed(store, without=(MODEL,)) == [(OTHER, 1)]
    assert claimed(store, without=(MODEL,)) == []
    again = store.jobs.claim(BASE, "w", train=9)
    assert [(job.model_id, job.seq_id, job.attempts) for job in again] == [(MODEL, 0, 0), (MODEL, 1, 0)]


def test_one_sample_is_put_back_while_others_of_its_sampler_go_on(store: Store) -> None:
    first, second = (store.jobs.enqueue(sample(seq_id)).request_id for seq_id in range(2))
    store.jobs.enqueue(sample(0, sampler_id="s:sample:1"))
    assert len(store.jobs.claim(BASE, "w", sample=2)) == 2
    assert store.jobs.release(BASE, "w", begun=[], requests=[second]) == []
    others = store.jobs.claim(BASE, "w", sample=9, without=(SAMPLER,))
    again = store.jobs.claim(BASE, "w", sample=9)
    assert first not in {job.request_id for job in (*others, *again)}
    assert second in {job.request_id for job in again}
    assert SAMPLER not in {job.sampler_id for job in others}


def test_a_job_that_was_to_be_cancelled_is_not_put_back(store: Store) -> None:
    request_id = store.jobs.enqueue(training(0)).request_id
    claimed(store)
    assert store.jobs.cancel(request_id, "ann") == "asked"
    assert store.jobs.release(BASE, "w", begun=[], requests=[request_id]) == [request_id]
