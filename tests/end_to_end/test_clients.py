"""The official client and ours, unmodified, against a real server with a real engine: the same scripts, and results."""

from __future__ import annotations

import pytest

from tests.compat.runner import ScriptFailed
from tests.end_to_end.comparing import differences
from tests.end_to_end.conftest import RunScript

SAME_RESULTS = (
    "supervised_loop",
    "chunked_batch",
    "forward_only",
    "provenance",
    "custom_loss",
    "traced_loss",
    "copy_weights",
    "compute_logprobs",
    "session_options",
    "failed_operations",
    "pending_results",
    "concurrent_threads",
    "loss_falls",
    "every_public_loss",
    "tensors_the_loss_reads",
    "gradients_add_up",
    "two_owners_at_once",
    "two_base_models",
    "save_and_load_again",
    "resumed_and_uninterrupted",
    "sample_and_forward",
    "alone_and_in_a_crowd",
    "samplers_keep_their_weights",
    "inflight_samplers",
    "seeded_sampling",
    "whole_context",
    "abandoned_samples",
    "published",
    "strangers",
    "downloads",
)
"""Seeded, or without anything random; they give the same with both packages."""

RANDOM = (
    "async_supervised_loop",
    "clients_used_at_once",
    "clients_awaited",
    "clients_as_futures",
    "async_custom_loss",
    "resume_from_state",
    "async_resume_from_state",
    "ephemeral_sampler",
    "samplers_from_paths",
    "sampling_options",
    "async_sampling",
    "many_samples",
    "copies_of_a_sampler",
    "large_results",
    "retried_submissions",
    "rest_calls",
    "async_rest_calls",
    "session_search",
    "admin_calls",
    "capabilities",
    "closing",
    "bad_calls",
)
"""Without seeds, or about all that the server holds: it is enough that they finish."""

REFUSED = {
    "every_loss": "not an input of the loss importance_sampling",
    "every_tensor": "not an input of the loss cross_entropy",
    "dimuon": "'dimuon', an optimizer whose formula is not public",
    "images_and_audio": "takes text only",
    "save_and_load": "age_encryption_recipients holds",
}
"""What this server does not offer, and what it says about it."""


@pytest.mark.parametrize("script", RANDOM)
def test_a_script_finishes(either: RunScript, script: str) -> None:
    either(script)


@pytest.mark.parametrize("script", SAME_RESULTS)
def test_both_packages_get_the_same(official: RunScript, ours: RunScript, script: str) -> None:
    assert differences(official(script), ours(script)) == []


@pytest.mark.parametrize("script", REFUSED)
def test_what_is_not_offered_is_refused_by_name(either: RunScript, script: str) -> None:
    with pytest.raises(ScriptFailed, match="RequestFailedError") as caught:
        either(script)
    assert REFUSED[script] in str(caught.value)
