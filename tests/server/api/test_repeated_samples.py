"""A sample that is submitted once more, as clients do that got no answer: it is still to be drawn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.server.api.running import RunningServer

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}


def test_a_sample_that_is_submitted_twice_counts_until_it_is_done(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    over: list[str] = []

    def note(request_ids: Sequence[str]) -> None:
        over.extend(request_ids)

    monkeypatch.setattr(server.workers, "are_over", note)
    body = {"sampling_session_id": server.sampler(), "seq_id": 0, "prompt": PROMPT, "sampling_params": {}}
    server.workers.hold("sample")
    first, again = server.post("asample", body), server.post("asample", body)
    assert again.json()["request_id"] == first.json()["request_id"]
    assert over == []
    server.workers.release()
    server.result(first)
    server.post("asample", body)
    assert over == [first.json()["request_id"]]
