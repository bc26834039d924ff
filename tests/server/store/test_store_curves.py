"""Curves of training runs, and samples to look at: written with the operations, and thinned with age."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import pytest
import sqlalchemy as sa

from tests.server.store.making import DONE, MODEL, SAMPLER, Clock, add_model, new_model, sample, training
from tinsmith.errors import InvalidInputError
from tinsmith.server.store import Store, curves, recent_samples, schema
from tinsmith.server.store.records import (
    Done,
    Failed,
    NewSampler,
    NewSession,
    Outcome,
    Sampled,
    Shown,
    ShownCompletion,
    Stepped,
    TrainedOn,
)


def done(shown: Shown) -> Done:
    return Done(result=b"", content_type="application/json", shown=shown)


def data(loss: float, weight: float = 1.0, tokens: int = 10) -> Done:
    return done(TrainedOn(loss=loss, weight=weight, tokens=tokens))


def step(**metrics: float) -> Done:
    return done(Stepped(metrics=metrics or {"grad_norm": 1.0}))


def run(store: Store, *outcomes: Outcome, model_id: str = MODEL, first: int = 0) -> None:
    """Operations of a model one after the other, each with this outcome."""
    add_model(store, new_model(model_id=model_id))
    for number, outcome in enumerate(outcomes, start=first):
        store.jobs.enqueue(training(number, model_id=model_id))
        (job,) = store.jobs.claim("tiny", "w", train=1)
        store.jobs.complete("w", {job.request_id: outcome})
    store.curves.gather([model_id])


def values(store: Store, name: str, model_id: str = MODEL) -> list[tuple[int, float | None]]:
    store.curves.gather([model_id])
    return [(step, value) for step, _, value in store.curves.points(model_id, name).points]


def rows(store: Store, table: sa.Table) -> int:
    return store._database.read(lambda connection: connection.scalar(sa.select(sa.func.count()).select_from(table)))


# Operations


def test_the_data_between_two_steps_make_one_point_weighted_by_what_they_count_for(store: Store) -> None:
    run(store, data(30.0, 10.0), data(10.0, 30.0), step(grad_norm=2.0), data(5.0, 10.0), step(grad_norm=3.0))
    assert values(store, "loss") == [(0, 1.0), (1, 0.5)]
    assert values(store, "tokens") == [(0, 20.0), (1, 10.0)]
    assert values(store, "grad_norm") == [(0, 2.0), (1, 3.0)]
    assert store.curves.progress([MODEL])[MODEL].steps == 2
    assert store.curves.progress([MODEL])[MODEL].last["loss"] == 0.5


def test_several_models_in_one_batch_have_curves_of_their_own(store: Store) -> None:
    names = [f"s:train:{number}" for number in range(3)]
    for name in names:
        add_model(store, new_model(model_id=name))
    for outcome in (data(1.0), step()):
        for name in names:
            store.jobs.enqueue(training(None, model_id=name))
        jobs = store.jobs.claim("tiny", "w", train=3)
        store.jobs.complete("w", dict.fromkeys((job.request_id for job in jobs), outcome))
    assert [values(store, "loss", name) for name in names] == 3 * [[(0, 1.0)]]


def test_tokens_per_second_count_from_the_step_before(store: Store, clock: Clock) -> None:
    run(store, data(1.0), step())
    clock.pass_(timedelta(seconds=10))
    run(store, data(1.0, tokens=100), step(), first=2)
    ((number, rate),) = values(store, "tokens_per_second")
    assert number == 1
    assert rate == pytest.approx(10.0, rel=0.01)


def test_a_step_without_data_has_what_the_optimizer_says_alone(store: Store) -> None:
    run(store, step(), step())
    assert store.curves.names(MODEL) == ["grad_norm"]
    assert values(store, "grad_norm") == [(0, 1.0), (1, 1.0)]


def test_data_that_count_for_nothing_have_no_loss(store: Store) -> None:
    run(store, data(0.0, weight=0.0), step())
    assert store.curves.names(MODEL) == ["tokens", "grad_norm"]


def test_what_is_no_finite_number_is_no_number(store: Store) -> None:
    run(store, step(grad_norm=float("nan")), step(grad_norm=float("inf")), step(grad_norm=1.0))
    assert values(store, "grad_norm") == [(0, None), (1, None), (2, 1.0)]


def test_failed_operations_and_those_of_another_worker_leave_no_point(store: Store) -> None:
    run(store, Failed(error="no", category="user"), data(1.0), step())
    store.jobs.enqueue(training(3))
    (job,) = store.jobs.claim("tiny", "dead", train=1)
    store.jobs.requeue("tiny", max_attempts=9, error="")
    assert store.jobs.complete("dead", {job.request_id: step()}) == []
    (again,) = store.jobs.claim("tiny", "w", train=1)
    store.jobs.complete("w", {again.request_id: step()})
    assert store.jobs.complete("w", {again.request_id: step()}) == [], "it is done"
    assert values(store, "grad_norm") == [(0, 1.0), (1, 1.0)]


def test_a_curve_outlives_the_program_and_goes_on(store: Store, url: str) -> None:
    run(store, data(4.0), step(), data(6.0))
    other = Store(url)
    try:
        run(other, step(), first=3)
        assert values(other, "loss") == [(0, 4.0), (1, 6.0)]
    finally:
        other.close()


def test_much_is_gathered_in_pieces_and_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "PIECE", 4)
    run(store, data(1.0), step(), data(2.0), data(4.0), step(), data(8.0), step(), DONE)
    store.curves.gather_all()
    store.curves.gather_all()
    assert values(store, "loss") == [(0, 1.0), (1, 3.0), (2, 8.0)]


def test_what_was_gathered_stays_when_its_jobs_are_removed(store: Store, clock: Clock) -> None:
    run(store, data(1.0), step())
    store.jobs.forget_payloads(MODEL, upto_seq=1)
    assert store.results.expire(clock()) == 2
    run(store, data(3.0), step(), first=2)
    assert values(store, "loss") == [(0, 1.0), (1, 3.0)]


def test_a_cursor_gives_what_is_new(store: Store) -> None:
    run(store, step(), step())
    cursor = store.curves.points(MODEL, "grad_norm").cursor
    assert store.curves.points(MODEL, "grad_norm", after=cursor).points == []
    run(store, step(), first=2)
    assert [step for step, _, _ in store.curves.points(MODEL, "grad_norm", after=cursor).points] == [2]


# What clients log


def test_clients_log_at_a_step_of_theirs_or_at_the_next(store: Store) -> None:
    run(store, step(), step())
    store.curves.log(MODEL, {"reward": 1.0, "length": 2.0}, None, most_names=2)
    store.curves.log(MODEL, {"reward": 3.0}, 40, most_names=2)
    assert values(store, "client/reward") == [(2, 1.0), (40, 3.0)]
    with pytest.raises(InvalidInputError, match="'more', but this model has 2 of at most 2"):
        store.curves.log(MODEL, {"more": 1.0}, None, most_names=2)
    assert store.curves.names(MODEL) == ["grad_norm", "client/reward", "client/length"]


def test_a_call_that_is_repeated_counts_once(store: Store) -> None:
    for seq_id, value in ((1, 1.0), (1, 1.0), (2, 2.0), (None, 3.0), (2, 2.0), (3, 4.0)):
        store.curves.log(MODEL, {"reward": value}, 0, seq_id, most_names=1)
    assert [value for _, value in values(store, "client/reward")] == [1.0, 2.0, 3.0, 4.0]


# Age


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "KEPT", 40)
    monkeypatch.setattr(curves, "PIECE", 20)


def test_old_points_become_means_of_ten_and_those_again(store: Store, short: None) -> None:
    for number in range(1000):
        store.curves.log(MODEL, {"x": float(number)}, number, most_names=1)
        if number % 100 == 0:
            store.curves.thin()
    store.curves.thin()
    found = values(store, "client/x")
    assert len(found) < 3 * (curves.KEPT + curves.PIECE)
    assert found[0] == (0, pytest.approx(49.5)), "the mean of a hundred"
    assert found[-40:] == [(number, float(number)) for number in range(960, 1000)]
    steps = [step for step, _ in found]
    assert steps == sorted(set(steps))
    assert max(after - before for before, after in pairwise(steps)) <= 100
    assert store.curves.thin() == 0
    assert store.curves.points(MODEL, "client/x").cursor == 1000


def test_what_is_no_number_does_not_spoil_a_mean(store: Store, short: None) -> None:
    for number in range(60):
        store.curves.log(MODEL, {"x": float("nan") if number < 10 else 1.0}, number, most_names=1)
    assert store.curves.thin() == 18
    assert values(store, "client/x")[:2] == [(0, None), (10, 1.0)]


def test_curves_go_with_their_session(store: Store, clock: Clock) -> None:
    session = store.sessions.create(NewSession(owner="ann"))
    model = new_model(session_id=session.session_id, model_id=f"{session.session_id}:train:0", trainable=False)
    add_model(store, model)
    run(store, data(1.0), step(), model_id=model.model_id)
    run(store, data(1.0), step())
    store.sessions.finish(session.session_id, "ann", "success", None)
    store.results.expire(clock())
    clock.pass_(timedelta(days=1))
    assert store.forget_sessions(clock()) == 1
    assert store.curves.names(model.model_id) == []
    assert (rows(store, schema.curves), rows(store, schema.points)) == (1, 1), "those of the other model"


# Samples


def sampled(text: int, owner: str = "ann") -> Done:
    completion = ShownCompletion(tokens=[text], stop_reason="stop")
    return done(Sampled(owner=owner, base_model="tiny", prompt=[1, 2], completions=[completion]))


def draw(store: Store, *outcomes: Done, first: int = 0) -> None:
    for number, outcome in enumerate(outcomes, start=first):
        store.jobs.enqueue(sample(number))
        (job,) = store.jobs.claim("tiny", "w", sample=1)
        store.jobs.complete("w", {job.request_id: outcome})


def test_samples_are_found_by_their_owner_newest_first(store: Store) -> None:
    draw(store, sampled(1), sampled(2), DONE)
    draw(store, sampled(3, "boris"), first=3)
    found = store.recent_samples.newest("ann", limit=10)
    assert [one.completions[0].tokens for one in found] == [[2], [1]]
    assert (found[0].prompt, found[0].request_id, found[0].run_id) == ([1, 2], f"{SAMPLER}:1", None)
    assert len(store.recent_samples.newest("ann", limit=1)) == 1


def test_samples_of_a_run_are_those_from_its_weights(store: Store) -> None:
    for number, weights in enumerate(
        (
            {},
            {"model_id": MODEL},
            {"model_path": f"tinker://{MODEL}/weights/one"},
            {"model_path": "tinker://s:t/weights/x"},
        )
    ):
        new = NewSampler(session_id="s", sampling_session_seq_id=number, owner="ann", base_model="tiny", **weights)
        sampler_id = store.samplers.create(new).sampler_id
        store.jobs.enqueue(sample(0, sampler_id=sampler_id))
        (job,) = store.jobs.claim("tiny", "w", sample=1)
        store.jobs.complete("w", {job.request_id: sampled(number)})
    found = store.recent_samples.newest("ann", limit=10, run_id=MODEL)
    assert [(one.completions[0].tokens, one.run_id) for one in found] == [([2], MODEL), ([1], MODEL)]


def test_samples_are_kept_for_a_while_and_only_the_newest(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_samples, "KEPT", 2)
    draw(store, sampled(1), sampled(2), sampled(3))
    long_ago = clock() - timedelta(days=1)
    store.recent_samples.forget(long_ago)
    assert [one.completions[0].tokens for one in store.recent_samples.newest("ann", limit=10)] == [[3], [2]]
    clock.pass_(timedelta(hours=1))
    draw(store, sampled(4), first=3)
    store.recent_samples.forget(clock() - timedelta(minutes=1))
    assert [one.completions[0].tokens for one in store.recent_samples.newest("ann", limit=10)] == [[4]]
