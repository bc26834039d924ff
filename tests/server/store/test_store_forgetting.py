"""A session is forgotten, with every row of it, when it has ended and nothing of it can be used any more."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import sqlalchemy as sa

from tests.server.store.making import DONE, Clock, add_model, new_checkpoint, new_model, sample, training
from tinsmith.server.store import Store, ids
from tinsmith.server.store.records import CheckpointKey, Failed, NewLoss, NewSampler, NewSession, Submission
from tinsmith.server.store.schema import jobs, losses, models, samplers, sessions, streams

DAY = timedelta(days=1)
TABLES = (sessions, models, samplers, losses, streams, jobs)


def rows(store: Store) -> dict[str, int]:
    def count(connection: sa.Connection) -> dict[str, int]:
        found = {each.name: connection.scalar(sa.select(sa.func.count()).select_from(each)) or 0 for each in TABLES}
        return {name: number for name, number in found.items() if number}

    return store._database.read(count)


def used_session(store: Store) -> str:
    """With a model, a sampler, a loss, a model that was refused, and an operation that waits for a missing number."""
    session_id = store.sessions.create(NewSession(owner="ann")).session_id
    model_id, refused = (ids.model_id(session_id, number) for number in range(2))
    sampler = NewSampler(session_id=session_id, sampling_session_seq_id=0, owner="ann", base_model="tiny")
    sampler_id = store.samplers.create(sampler).sampler_id
    loss = NewLoss(session_id=session_id, custom_loss_seq_id=0, owner="ann", name="loss", definition=b"graph")
    store.losses.create(loss)
    add_model(store, new_model(model_id=model_id, session_id=session_id))
    of_session = {"session_id": session_id}
    begun = [
        Submission(job=training(0, model_id=model_id, **of_session)),
        Submission(job=training(5, model_id=model_id, **of_session)),
        Submission(job=sample(0, sampler_id=sampler_id, **of_session)),
        Submission(
            job=training(0, model_id=refused, **of_session), outcome=Failed(error="no such model", category="user")
        ),
    ]
    store.jobs.enqueue_many(begun)
    claimed = store.jobs.claim("tiny", "w", train=5, sample=5)
    store.jobs.complete("w", {job.request_id: DONE for job in claimed})
    return session_id


def end(store: Store, clock: Clock) -> None:
    """All that is kept for a day is over: first the results and models, then what is known of them."""
    clock.pass_(2 * DAY)
    store.results.expire(clock() - DAY)
    store.models.remove_idle(clock() - DAY)
    clock.pass_(2 * DAY)


def test_nothing_of_an_ended_session_is_kept_for_ever(store: Store, clock: Clock) -> None:
    session_id = used_session(store)
    store.sessions.finish(session_id, "ann", "success")
    assert store.forget_sessions(clock()) == 0
    end(store, clock)
    assert store.forget_sessions(clock() - DAY) == 1
    assert rows(store) == {}


def test_a_session_that_goes_on_is_not_forgotten(store: Store, clock: Clock) -> None:
    used_session(store)
    end(store, clock)
    before = rows(store)
    assert store.forget_sessions(clock() - DAY) == 0
    assert rows(store) == before


def save_checkpoint(store: Store, session_id: str) -> None:
    key = CheckpointKey(run_id=ids.model_id(session_id, 0), kind="weights", name="kept")
    store.checkpoints.save(new_checkpoint(key=key))


def ask_for_a_sample(store: Store, session_id: str) -> None:
    store.jobs.enqueue(sample(1, sampler_id=ids.sampler_id(session_id, 0), session_id=session_id))


@pytest.mark.parametrize("keep", [save_checkpoint, ask_for_a_sample])
def test_what_can_still_be_used_keeps_its_session(
    store: Store, clock: Clock, keep: Callable[[Store, str], None]
) -> None:
    kept, other = used_session(store), used_session(store)
    keep(store, kept)
    for session_id in (kept, other):
        store.sessions.finish(session_id, "ann", "success")
    end(store, clock)
    assert store.forget_sessions(clock() - DAY) == 1
    assert store.sessions.get(kept, "ann") is not None
    assert store.models.get(ids.model_id(kept, 0), "ann") is not None
    assert store.sessions.get(other, "ann") is None
