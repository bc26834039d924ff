"""The scheduler's invariants, for any set of waiting jobs."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.server.schedule import (
    BARRIERS_OF_A_STEP,
    MAX_BEGUN,
    REMEMBERED_SECONDS,
    Served,
    TrainingJob,
    note_begun,
    note_served,
    note_spent,
    schedule,
)

KINDS = ("forward_backward", "forward_backward", "forward_backward", "optim_step", "save_weights", "load_weights")
NOTHING_SERVED = Served({}, {})


@st.composite
def waiting(draw: st.DrawFn) -> list[TrainingJob]:
    jobs = []
    for model in range(draw(st.integers(1, 5))):
        owner = f"owner-{draw(st.integers(0, 2))}"
        for seq_id in range(1, draw(st.integers(1, 6)) + 1):
            kind, tokens = draw(st.sampled_from(KINDS)), draw(st.integers(1, 500))
            created = float(draw(st.integers(0, 100)))
            jobs.append(TrainingJob(f"{model}:{seq_id}", kind, owner, f"model-{model}", seq_id, tokens, created))
    return draw(st.permutations(jobs))


def run_to_the_end(jobs: list[TrainingJob], budget: int) -> list[tuple[TrainingJob, ...]]:
    """Batch after batch, with what was served counted as a worker counts it."""
    by_owner: dict[str, float] = defaultdict(float)
    by_model: dict[str, float] = defaultdict(float)
    to_finish: dict[str, int] = {}
    left, batches = list(jobs), []
    while left:
        batch = schedule(left, Served(by_owner, by_model, to_finish), budget)
        assert batch, "jobs wait, but nothing runs"
        batches.append(batch)
        for job in batch:
            left.remove(job)
            by_owner[job.owner] += job.tokens
            by_model[job.model_id] += job.tokens
        note_begun(to_finish, batch)
    return batches


@given(waiting(), st.integers(1, 2000))
def test_every_job_runs_once_and_a_models_jobs_keep_their_order(jobs: list[TrainingJob], budget: int) -> None:
    order: dict[str, list[int]] = defaultdict(list)
    for batch in run_to_the_end(jobs, budget):
        for job in batch:
            order[job.model_id].append(job.seq_id)
    assert {model: sorted(seqs) for model, seqs in order.items()} == order
    assert sum(map(len, order.values())) == len(jobs)


@given(waiting(), st.integers(1, 2000))
def test_a_barrier_runs_alone(jobs: list[TrainingJob], budget: int) -> None:
    for batch in run_to_the_end(jobs, budget):
        assert len(batch) == 1 or not any(job.is_barrier for job in batch)


@given(waiting(), st.integers(1, 2000))
def test_a_batch_keeps_to_the_budget_unless_one_job_alone_exceeds_it(jobs: list[TrainingJob], budget: int) -> None:
    for batch in run_to_the_end(jobs, budget):
        assert len(batch) == 1 or sum(job.tokens for job in batch) <= budget


@given(waiting())
def test_with_room_for_all_every_model_that_can_run_data_is_in_the_batch(jobs: list[TrainingJob]) -> None:
    batch = schedule(jobs, NOTHING_SERVED, token_budget=10**9)
    first = {}
    for job in sorted(jobs, key=lambda job: job.seq_id):
        first.setdefault(job.model_id, job)
    if not batch[0].is_barrier:
        ready = {model for model, job in first.items() if not job.is_barrier}
        assert {job.model_id for job in batch} == ready


def test_the_owner_who_had_least_comes_first() -> None:
    greedy = [TrainingJob(f"g{i}", "forward_backward", "greedy", "model-g", i, 100, 0.0) for i in range(1, 50)]
    modest = TrainingJob("m1", "forward_backward", "modest", "model-m", 1, 100, 99.0)
    batch = schedule([*greedy, modest], Served({"greedy": 5000.0}, {"model-g": 5000.0}), token_budget=100)
    assert batch == (modest,)


def test_a_barrier_of_one_model_does_not_hold_up_another() -> None:
    step = TrainingJob("a2", "optim_step", "one", "model-a", 2, 1, 5.0)
    data = TrainingJob("b1", "forward_backward", "two", "model-b", 1, 10, 0.0)
    assert schedule([step, data], NOTHING_SERVED, 100) == (data,)
    assert schedule([step], NOTHING_SERVED, 100) == (step,)


def a_step(owner: str, first: int, created: float) -> list[TrainingJob]:
    kinds = ("forward_backward", "optim_step", "save_weights_for_sampler")
    return [
        TrainingJob(f"{owner}{first + place}", kind, owner, owner, first + place, 100 if place == 0 else 1, created)
        for place, kind in enumerate(kinds)
    ]


def test_a_step_that_was_begun_is_finished_before_others_begin_theirs() -> None:
    jobs = [job for place, owner in enumerate("abcdef") for job in a_step(owner, 1, float(place))]
    order = [job.request_id for batch in run_to_the_end(jobs, budget=100) for job in batch]
    assert order == [f"{owner}{seq_id}" for owner in "abcdef" for seq_id in (1, 2, 3)]


def test_barriers_alone_do_not_keep_others_waiting() -> None:
    data = TrainingJob("g0", "forward_backward", "greedy", "greedy", 0, 100, 0.0)
    steps = [TrainingJob(f"g{i}", "optim_step", "greedy", "greedy", i, 1, 0.0) for i in range(1, 100)]
    modest = TrainingJob("m1", "forward_backward", "modest", "modest", 1, 100, 1.0)
    batches = run_to_the_end([data, *steps, modest], budget=100)
    assert [modest in batch for batch in batches].index(True) <= 1 + BARRIERS_OF_A_STEP


def test_what_is_known_of_steps_to_finish_is_bounded() -> None:
    to_finish: dict[str, int] = {}
    for number in range(3 * MAX_BEGUN):
        note_begun(to_finish, [TrainingJob("r", "forward_backward", "o", f"model-{number}", 1, 1, 0.0)])
    assert list(to_finish) == [f"model-{number}" for number in range(2 * MAX_BEGUN, 3 * MAX_BEGUN)]


def test_nothing_waiting_gives_nothing() -> None:
    assert schedule([], NOTHING_SERVED, 100) == ()


def test_a_long_time_alone_does_not_cost_a_long_time_in_company() -> None:
    """After a thousand turns alone, whoever comes is ahead for some ten turns and not for a thousand."""
    served: dict[str, float] = {}
    for _ in range(1000):
        note_served(served, [("ann", 10.0)])
    turns = 0
    while served.get("bob", 0.0) < served["ann"]:
        note_served(served, [("bob", 10.0)])
        turns += 1
    assert turns <= 10


def test_who_was_not_seen_for_long_is_forgotten() -> None:
    served = {"ann": 1000.0}
    for _ in range(500):
        note_served(served, [("bob", 1.0)])
    assert "ann" not in served


@pytest.mark.parametrize(("turn", "step"), [(0.7, 0.005), (0.1, 0.1), (0.01, 1.0)])
def test_two_kinds_of_work_get_half_of_the_time_each_however_long_their_turns_are(turn: float, step: float) -> None:
    spent: dict[str, float] = {}
    had = {"training": 0.0, "sampling": 0.0}
    while sum(had.values()) < 60:
        kind = "training" if spent.get("training", 0.0) <= spent.get("sampling", 0.0) else "sampling"
        seconds = turn if kind == "training" else step
        note_spent(spent, kind, seconds)
        had[kind] += seconds
    assert had["training"] / sum(had.values()) == pytest.approx(0.5, abs=0.06)


def test_a_long_time_alone_is_forgotten_after_seconds() -> None:
    spent: dict[str, float] = {}
    for _ in range(10_000):
        note_spent(spent, "training", 1.0)
    waited = 0.0
    while spent.get("sampling", 0.0) < spent["training"]:
        note_spent(spent, "sampling", 0.01)
        waited += 0.01
    assert waited < REMEMBERED_SECONDS
