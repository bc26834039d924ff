"""The unmodified official client is satisfied with our reading of the protocol: every script works with it."""

from __future__ import annotations

import pytest

from tests.compat.cases import CASES, RunCase
from tests.compat.trace import trace

IN_PARALLEL = ("chunks_by_count", "chunks_by_bytes", "compressed_chunks")


@pytest.mark.parametrize("name", CASES)
def test_every_script_finishes(official: RunCase, name: str) -> None:
    assert official(name).requests


def test_the_loss_falls_while_training(official: RunCase) -> None:
    steps, info, *_ = official("supervised_loop").result
    losses = [forward["metrics"]["loss:sum"] for forward, _ in steps]
    assert losses == sorted(losses, reverse=True)
    assert info["lora_rank"] == 16


@pytest.mark.parametrize("name", IN_PARALLEL)
def test_the_first_chunk_arrives_last_and_all_run_in_order(official: RunCase, name: str) -> None:
    run = official(name)
    arrived = [request.message().seq_id for request in run.requests if request.endpoint == "forward_backward"]
    assert arrived[-1] == 1
    executed = [seq_id for _, seq_id, _ in run.executed]
    assert executed == sorted(executed) == [*range(1, len(arrived) + 2)]


def test_chunks_make_no_difference_to_what_comes_back(official: RunCase) -> None:
    cut = official("chunks_by_count").result
    assert cut == official("chunks_in_turn").result == official("compressed_chunks").result
    assert len(cut[0]["outputs"]) == 5


def test_a_custom_loss_has_the_gradient_of_its_formula(official: RunCase) -> None:
    output, step = official("custom_loss").result
    slopes = [2 * value for one in output["outputs"] for value in one["logprobs"]["data"]]
    assert step["metrics"]["grad_norm"] == pytest.approx(abs(sum(slopes)), rel=1e-6)


def test_results_are_fetched_once_each(official: RunCase) -> None:
    polls = trace(CASES["supervised_loop"], official("supervised_loop")).polls
    assert [len(found) for found in polls.values()] == [1] * 7
