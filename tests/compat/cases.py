"""The server's half of every script: flags, and what it is told to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.compat.runner import Runner
from tests.support.server import Default, FakeServer, Recorded, Reply


@dataclass(frozen=True)
class Case:
    script: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    dynamic_flags: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[FakeServer], None] = lambda server: None
    dialect: Literal["current", "json"] = "current"
    concurrent: bool = False
    """Whether the script sends requests of one kind at the same time, so that their order is a matter of luck."""


@dataclass(frozen=True)
class Run:
    """What one package sent, and what its user got."""

    result: Any
    requests: list[Recorded]
    executed: list[tuple[str, int | None, str]]


RunCase = Callable[[str], Run]
"""Runs the case of this name, or gives back its one run."""


def run_case(case: Case, runner: Runner) -> Run:
    with FakeServer(flags=case.flags, dynamic_flags=case.dynamic_flags, dialect=case.dialect) as server:
        case.prepare(server)
        result = runner.run(case.script, server.url)
        return Run(_without_address(result, server.url), server.received(), server.executed)


def _without_address(value: Any, url: str) -> Any:
    """Ports differ from run to run."""
    if isinstance(value, str):
        return value.replace(url, "http://server")
    if isinstance(value, dict):
        return {name: _without_address(item, url) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_address(item, url) for item in value]
    return value


def as_fastapi_does(server: FakeServer) -> None:
    """That framework repeats the refused body in its answer, and breaks where the body is not text."""
    server.api.protobuf_refusal = 500


def _refuse(server: FakeServer) -> None:
    refusals = (Reply(status, json={"detail": f"no: {status}"}) for status in (400, 401, 403, 422))
    server.script("forward_backward", Default(), *refusals)


def _refuse_the_first(server: FakeServer) -> None:
    server.script("forward_backward", Reply(400, json={"detail": "no"}))


def _fail(server: FakeServer) -> None:
    for category in ("user", "server", "unknown"):
        server.fail_future("optim_step", f"failed by {category}", category)
    server.fail_future("asample", "no such luck")


def _not_ready(server: FakeServer) -> None:
    waiting = {"type": "try_again", "request_id": "any", "queue_state": "paused_capacity", "queue_state_reason": "busy"}
    server.script(
        lambda request: request.headers.get("x-tinker-request-type") == "OptimStep",
        Reply(408, json=waiting),
        Reply(200, json=waiting),
        Reply(408, body=b"", headers={"content-type": "text/plain"}),
    )


def _announce_large_results(server: FakeServer) -> None:
    server.settings.metadata_only_above = 0


def _make_trouble(server: FakeServer) -> None:
    server.script("optim_step", Reply(503))
    server.script("asample", Reply(429), Default(), Default(), Reply(500))
    server.script(lambda request: request.headers.get("x-tinker-request-type") == "Sample", Reply(410))


CASES: dict[str, Case] = {
    **{
        name: Case(name)
        for name in (
            "supervised_loop",
            "async_supervised_loop",
            "clients_used_at_once",
            "clients_awaited",
            "clients_as_futures",
            "inflight_sampler",
            "forward_only",
            "every_loss",
            "every_tensor",
            "dimuon",
            "images_and_audio",
            "provenance",
            "custom_loss",
            "async_custom_loss",
            "traced_loss",
            "save_and_load",
            "copy_weights",
            "ephemeral_sampler",
            "samplers_from_paths",
            "sampling_options",
            "async_sampling",
            "compute_logprobs",
            "rest_calls",
            "async_rest_calls",
            "session_search",
            "admin_calls",
            "capabilities",
            "session_options",
            "closing",
            "bad_calls",
        )
    },
    "many_samples": Case("many_samples", concurrent=True),
    "concurrent_threads": Case("concurrent_threads", concurrent=True),
    "chunks_by_count": Case("chunked_batch", {"fwdbwd_max_chunk_len": 2}, concurrent=True),
    "chunks_by_bytes": Case("chunked_batch", {"fwdbwd_max_chunk_bytes_count": 150}, concurrent=True),
    "chunks_in_turn": Case("chunked_batch", {"fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": False}),
    "compressed_chunks": Case(
        "chunked_batch", {"fwdbwd_max_chunk_len": 2, "proto_compress_fwdbwd": True}, concurrent=True
    ),
    "plain_transport": Case("supervised_loop", {"use_pyqwest_transport": False}),
    "traced_loss_on_the_server": Case("traced_loss", {"custom_loss_server_side": True}),
    "resume_from_state": Case("resume_from_state", {"create_model_via_load_weights": True}),
    "async_resume_from_state": Case("async_resume_from_state", {"create_model_via_load_weights": True}),
    "many_samples_polled_together": Case("many_samples", {"sample_use_retrieve_futures": True}, concurrent=True),
    "copies_of_a_sampler": Case("copies_of_a_sampler", {"sample_join_sampling_session": True}),
    "cancelled_sample": Case(
        "cancelled_sample",
        dynamic_flags={"sample_cancel_enabled": True},
        prepare=lambda server: server.hold("asample"),
    ),
    "token_exchange": Case("token_exchange", {"pjwt_auth_enabled": True}),
    "bad_requests": Case("bad_requests", prepare=_refuse),
    "first_request_refused": Case("first_request_refused", prepare=_refuse_the_first),
    "failed_operations": Case("failed_operations", prepare=_fail),
    "pending_results": Case("pending_results", prepare=_not_ready),
    "large_results": Case("large_results", prepare=_announce_large_results),
    "retried_submissions": Case("retried_submissions", prepare=_make_trouble),
}
