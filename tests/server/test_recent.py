"""What was looked up a moment ago."""

import pytest

from tinsmith.server import recent
from tinsmith.server.recent import Recent


def test_an_entry_is_good_for_its_time_and_use_does_not_prolong_it() -> None:
    now = [0.0]
    entries: Recent[str, int] = Recent(5.0, lambda: now[0])
    entries.put("a", 1)
    for now[0] in (0.0, 3.0, 4.9):
        assert entries.get("a") == 1
    now[0] = 5.0
    assert entries.get("a") is None
    assert entries.get("b") is None


def test_it_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_MAX_ENTRIES", 10)
    entries: Recent[int, int] = Recent(5.0)
    for number in range(100):
        entries.put(number, number)
    assert entries.get(99) == 99
    assert sum(entries.get(number) is not None for number in range(100)) <= 10
