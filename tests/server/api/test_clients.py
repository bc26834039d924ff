"""The unmodified official client and ours work against the API: the same scripts, over HTTP."""

from __future__ import annotations

import pytest

from tests.compat.runner import Runner, ScriptFailed
from tests.server.api.running import RunningServer

SERVED = (
    "supervised_loop",
    "async_supervised_loop",
    "chunked_batch",
    "forward_only",
    "every_tensor",
    "provenance",
    "custom_loss",
    "traced_loss",
    "resume_from_state",
    "async_resume_from_state",
    "copy_weights",
    "ephemeral_sampler",
    "samplers_from_paths",
    "sampling_options",
    "async_sampling",
    "compute_logprobs",
    "many_samples",
    "copies_of_a_sampler",
    "rest_calls",
    "async_rest_calls",
    "session_search",
    "admin_calls",
    "capabilities",
    "session_options",
    "closing",
    "concurrent_threads",
)

REFUSED = {
    "every_loss": "loss_fn 'stable_reinforce' has no public formula",
    "dimuon": "optimizer_config.type is 'dimuon'",
    "images_and_audio": "takes text only",
    "save_and_load": "age_encryption_recipients holds",
}
"""What this server does not have, and the beginning of what it says about it."""


@pytest.mark.parametrize("script", SERVED)
def test_a_script_runs(server: RunningServer, client: Runner, script: str) -> None:
    client.run(script, server.url)


@pytest.mark.parametrize("script", REFUSED)
def test_what_is_not_offered_is_refused_by_name(server: RunningServer, client: Runner, script: str) -> None:
    with pytest.raises(ScriptFailed, match="RequestFailedError") as caught:
        client.run(script, server.url)
    assert REFUSED[script] in str(caught.value)


def test_training_gives_the_numbers_of_the_worker(server: RunningServer, client: Runner) -> None:
    steps, info, *_ = client.run("supervised_loop", server.url)
    losses = [forward["metrics"]["loss:sum"] for forward, _ in steps]
    assert losses == sorted(losses, reverse=True)
    assert info["lora_rank"] == 16


def test_all_ways_to_resume_lead_to_the_same_loss(server: RunningServer, client: Runner) -> None:
    results = client.run("resume_from_state", server.url)
    assert len({loss for loss, _, _ in results}) == 1


def test_an_unknown_base_model_names_those_that_are_served(server: RunningServer, client: Runner) -> None:
    _, unknown, *_ = client.run("failed_operations", server.url)
    assert unknown["failure"] == "RequestFailedError"
    assert unknown["category"] == "user"


def test_a_token_is_had_for_a_key(client: Runner, tmp_path_factory: pytest.TempPathFactory) -> None:
    with RunningServer(
        tmp_path_factory.mktemp("tokens"), token_exchange=True, api_keys=("tml-compat", "tml-other")
    ) as server:
        whoami, _ = client.run("token_exchange", server.url)
    assert whoami["user_urn"].startswith("key-")
