"""The official client and ours, unmodified, against a real server with a real engine: the same scripts, the same results."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.compat.runner import ScriptFailed
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
    "rest_calls",
    "session_search",
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
    "async_rest_calls",
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
    "save_and_load": "age_encryption_recipients is not offered",
}
"""What this server does not offer, and what it says about it."""

_VARYING = {
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}": "(id)",
    r"copy-[0-9a-f]{24}": "(copy)",
    r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00": "(time)",
    r"(signature|expires)=[^&]+": "(signed)",
}


@pytest.mark.parametrize("script", RANDOM)
def test_a_script_finishes(either: RunScript, script: str) -> None:
    either(script)


@pytest.mark.parametrize("script", SAME_RESULTS)
def test_both_packages_get_the_same(official: RunScript, ours: RunScript, script: str) -> None:
    assert _differences(comparable(official(script)), comparable(ours(script)), script) == []


@pytest.mark.parametrize("script", REFUSED)
def test_what_is_not_offered_is_refused_by_name(either: RunScript, script: str) -> None:
    with pytest.raises(ScriptFailed, match="RequestFailedError") as caught:
        either(script)
    assert REFUSED[script] in str(caught.value)


def comparable(value: Any) -> Any:
    """A result without what is different in every run."""
    match value:
        case str():
            for pattern, name in _VARYING.items():
                value = re.sub(pattern, name, value)
            return value
        case {"failure": _}:
            return {name: comparable(item) for name, item in value.items() if name not in ("failure", "caught_by")}
        case dict():
            # Files hold ids, so their sizes differ by a byte or two.
            return {comparable(name): comparable(item) for name, item in value.items() if "bytes" not in name}
        case list():
            return [comparable(item) for item in value]
    return value


def _differences(theirs: Any, mine: Any, place: str) -> list[str]:
    match theirs, mine:
        case dict(), dict():
            return [
                found
                for name in theirs.keys() | mine.keys()
                for found in _differences(theirs.get(name, "(absent)"), mine.get(name, "(absent)"), f"{place}.{name}")
            ]
        case list(), list() if len(theirs) == len(mine):
            pairs = enumerate(zip(theirs, mine, strict=True))
            return [found for index, pair in pairs for found in _differences(*pair, f"{place}[{index}]")]
        case float(), float():
            return [] if theirs == pytest.approx(mine, rel=1e-4, abs=1e-5) else [f"{place}: {theirs} and {mine}"]
    return [] if theirs == mine else [f"{place}: {theirs!r} and {mine!r}"]
