"""A trouble that lasts is told when it begins, now and then, and when it is over."""

from __future__ import annotations

import logging

import pytest

from tinsmith.server.outage import Outage

log = logging.getLogger("tests.outage")


def test_a_trouble_that_lasts_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tinsmith.server.outage.time.monotonic", lambda: now[0])
    trouble = Outage(log)
    with caplog.at_level(logging.INFO, "tests.outage"):
        trouble.is_over()
        for second in range(130):
            now[0] = float(second)
            trouble.met("The database is out of reach", OSError("refused\nand much advice"))
        assert trouble.is_on
        trouble.is_over()
        trouble.is_over()
    assert [record.message for record in caplog.records] == [
        "The database is out of reach: refused",
        "The database is out of reach, for 60 s now: refused",
        "The database is out of reach, for 120 s now: refused",
        "Work goes on after 129 s.",
    ]
    assert not trouble.is_on
