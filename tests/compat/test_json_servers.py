"""Servers that speak only JSON, as the service once did: our client notices, and its user sees the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.compat.cases import Case, RunCase, as_fastapi_does, run_case
from tests.compat.runner import Runner

# What of a result does not depend on ids, which such servers make up in their own way.
ESSENCE: dict[str, Callable[[Any], Any]] = {
    "supervised_loop": lambda result: [[_losses(forward), step] for forward, step in result[0]],
    "forward_only": lambda result: [_losses(result[0]), result[1]],
    "chunked_batch": lambda result: [_losses(result[0]), result[1]],
    "custom_loss": lambda result: [_losses(result[0]), result[1]],
    "resume_from_state": lambda result: [[loss, step] for loss, step, _ in result],
    "ephemeral_sampler": lambda result: [_tokens(response) for response in result[0]],
    "compute_logprobs": lambda result: result[0],
}
CURRENT = {name: "chunks_by_count" if name == "chunked_batch" else name for name in ESSENCE}


def _losses(output: Any) -> Any:
    return [output["metrics"]["loss:sum"], output["outputs"]]


def _tokens(response: Any) -> Any:
    return [[one["tokens"], one["logprobs"], one["stop_reason"]] for one in response["sequences"]]


@pytest.mark.parametrize("script", ESSENCE)
def test_the_numbers_are_those_of_a_current_server(ours: RunCase, our_runner: Runner, script: str) -> None:
    flags = {"fwdbwd_max_chunk_len": 2}
    old = run_case(Case(script, flags, dialect="json"), our_runner)
    assert ESSENCE[script](old.result) == ESSENCE[script](ours(CURRENT[script]).result)


def test_a_server_is_asked_once_which_dialect_it_speaks(our_runner: Runner) -> None:
    run = run_case(Case("supervised_loop", dialect="json"), our_runner)
    sent = [request for request in run.requests if request.endpoint == "forward_backward"]
    assert [request.headers["content-type"].rpartition("/")[2] for request in sent] == ["x-protobuf"] + ["json"] * 3


def test_a_server_that_breaks_on_protobuf_is_spoken_to_in_json(our_runner: Runner) -> None:
    run = run_case(Case("supervised_loop", dialect="json", prepare=as_fastapi_does), our_runner)
    assert len(run.result[0]) == 3
