"""Older official clients, each in an environment of its own: 0.24.1, which speaks JSON only, and 0.36.0."""

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
def test_an_older_client_gets_what_the_newest_gets(older: RunScript, official: RunScript, script: str) -> None:
    assert differences(official(script), older(script)) == []


def test_it_resumes_a_run(older: RunScript) -> None:
    (uninterrupted, resumed, _), _ = older("resumed_and_uninterrupted")
    assert resumed == uninterrupted


def test_it_sees_nothing_of_others(older: RunScript) -> None:
    results = older("strangers")
    assert results["real"] == results["made up"]
    assert not results["listed"]
