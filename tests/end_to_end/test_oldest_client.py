"""The oldest official client we serve, 0.24.1, the newest that speaks JSON only, in an environment of its own."""

from __future__ import annotations

import pytest

from tests.end_to_end.comparing import differences
from tests.end_to_end.conftest import RunScript

SAME_AS_NEW = (
    "loss_falls",
    "gradients_add_up",
    "two_owners_at_once",
    "two_base_models",
    "sample_and_forward",
    "alone_and_in_a_crowd",
    "samplers_keep_their_weights",
    "stop_texts",
    "losses_of_old",
    "lookups_of_old",
)


@pytest.mark.parametrize("script", SAME_AS_NEW)
def test_the_oldest_client_gets_what_the_newest_gets(oldest: RunScript, official: RunScript, script: str) -> None:
    assert differences(official(script), oldest(script)) == []


def test_it_resumes_a_run(oldest: RunScript) -> None:
    (uninterrupted, resumed, _), _ = oldest("resumed_and_uninterrupted")
    assert resumed == uninterrupted


def test_it_sees_nothing_of_others(oldest: RunScript) -> None:
    results = oldest("strangers")
    assert results["real"] == results["made up"]
    assert not results["listed"]
