"""Who may run together after a worker has died."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from tinsmith.server.store.records import Job
from tinsmith.server.suspects import (
    COMPANY,
    HELD_UP,
    MAX_CRASHES,
    MAX_KILLS,
    ending,
    epitaph,
    max_attempts,
    together,
)


def job(number: int, attempts: int = 0, model: str = "m") -> Job:
    return Job(
        request_id=f"{model}:{number}",
        kind="forward_backward",
        owner="ann",
        session_id="s",
        base_model="tiny",
        model_id=model,
        sampler_id=None,
        seq_id=number,
        size=1,
        payload=b"",
        created=datetime(2030, 1, 1, tzinfo=UTC),
        attempts=attempts,
    )


def test_jobs_that_nobody_suspects_run_all_together() -> None:
    jobs = [job(number) for number in range(300)]
    assert together(jobs, [job(300)]) == jobs


def test_suspects_go_first_and_among_themselves() -> None:
    suspects = [job(1, 1), job(2, 1)]
    assert together([job(3), *suspects, job(4)]) == suspects
    assert together(suspects, running=[job(5)]) == []
    assert together([job(3)], running=suspects) == []


def test_a_second_death_leaves_each_of_them_alone() -> None:
    twice = [job(1, 2), job(2, 2)]
    assert together([*twice, job(3, 1)]) == twice[:1]
    assert together(twice[1:], running=twice[:1]) == []
    assert together([job(1, 4)]) == [job(1, 4)]


def test_only_who_was_alone_can_be_given_up() -> None:
    assert COMPANY[-1] == 1
    assert len(COMPANY) <= min(MAX_CRASHES, MAX_KILLS)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=60))
def test_what_runs_of_a_model_is_the_beginning_of_what_waits(drawn: list[tuple[str, int]]) -> None:
    """As a worker meets them: the later a job of a model, the fewer deaths it has seen."""
    drawn.sort(key=lambda item: -item[1])
    waiting = [job(number, attempts, model) for number, (model, attempts) in enumerate(drawn)]
    chosen = together(waiting)
    assert bool(chosen) == bool(waiting)
    for model in "abc":
        mine = [one for one in waiting if one.model_id == model]
        assert _numbers(one for one in chosen if one.model_id == model) == _numbers(mine)[: _count(chosen, model)]


def _numbers(jobs: Sequence[Job] | object) -> list[int]:
    return [one.seq_id for one in jobs]  # type: ignore[attr-defined]


def _count(jobs: Sequence[Job], model: str) -> int:
    return sum(one.model_id == model for one in jobs)


def test_a_kill_from_outside_is_forgiven_more_often_than_a_crash() -> None:
    assert max_attempts(-signal.SIGSEGV) == max_attempts(1) == MAX_CRASHES
    assert max_attempts(-signal.SIGKILL) == max_attempts(None) == MAX_KILLS
    assert max_attempts(HELD_UP) > 1e6


def test_the_end_of_a_process_in_words() -> None:
    assert ending(1) == "with exit status 1"
    assert ending(-signal.SIGSEGV) == "by signal 11 (SIGSEGV)"
    assert ending(-signal.SIGKILL) == "by signal 9 (SIGKILL), as the system does when memory runs out"
    assert ending(-63) == "by signal 63 (unknown)"
    assert "3 times" in epitaph(1)
    assert "together with the server" in epitaph(None)
