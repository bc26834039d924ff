"""Who did what on a server of one's own, read from its database."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.cli.program import InProcess
from tinsmith.server.store import Store
from tinsmith.server.store.records import NewEvent


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def store(state: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{state / 'tinsmith.db'}")
    yield store
    store.close()


def test_keys_that_are_made_and_revoked_here_are_in_the_trail(cli: InProcess, state: Path) -> None:
    key = cli("keys", "create", "laptop", "--state", state).out.strip()
    cli("keys", "revoke", "1", "--yes", "--state", state)
    assert cli("keys", "revoke", "1", "--yes", "--state", state).code == 1
    assert cli("keys", "revoke", "7", "--yes", "--state", state).code == 1
    events = cli("-f", "json", "audit", "--state", state).json()["events"]
    assert [event["details"].get("reason") for event in events[:2]] == ["there is no such key", "it was revoked before"]
    assert [(event["event"], event["outcome"], event["key_id"]) for event in events] == [
        ("key_revoke", "refused", 7),
        ("key_revoke", "refused", 1),
        ("key_revoke", "done", 1),
        ("key_create", "done", 1),
    ]
    assert all(event["address"].startswith("command line") for event in events)
    assert events[-1].keys() == {
        *("time", "event", "outcome", "owner", "key_id", "key", "address", "model_id", "tinker_path", "details")
    }
    assert key not in str(events)


def test_what_is_no_time_is_answered_with_what_is(cli: InProcess, state: Path) -> None:
    done = cli("audit", "--since", "yesterday", "--state", state)
    assert done.code == 2
    assert "'yesterday' is no time. Give 90m, 12h, 7d or 4w, or a date such as 2026-01-31." in done.err


def test_the_trail_is_narrowed_to_a_key_and_to_a_time(cli: InProcess, state: Path, store: Store) -> None:
    ann, bob = (store.keys.create(name, name).key for name in ("ann", "bob"))
    for key in (ann, bob):
        path = "tinker://r/weights/x"
        store.audit.record(NewEvent(owner=key.owner, event="checkpoint_delete", key_id=key.key_id, tinker_path=path))
    shown = cli("audit", "--key", "ann", "--state", state).out
    assert "2 events" in shown
    assert "bob" not in shown
    assert "tinker://r/weights/x" in shown
    assert "2 events" in cli("audit", "--owner", "bob", "--state", state).out
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert "0 events" in cli("audit", "--since", later, "--state", state).out
    assert "4 events" in cli("audit", "--since", "90m", "--state", state).out
    limited = cli("audit", "--limit", "1", "--state", state)
    assert "1 event\n" in limited.out
    assert "There may be more" in limited.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(("--since", "soon"), "'soon' is no time"), (("--key", "nobody"), "There is no key 'nobody'")],
)
def test_what_cannot_be_asked_is_refused(
    cli: InProcess, state: Path, store: Store, arguments: tuple[str, ...], complaint: str
) -> None:
    done = cli("audit", *arguments, "--state", state)
    assert done.code != 0
    assert complaint in done.err


def test_a_folder_without_a_server_has_no_trail(cli: InProcess, tmp_path: Path) -> None:
    done = cli("audit", "--state", tmp_path / "nowhere")
    assert done.code == 1
    assert "no server's state folder" in done.err
