"""The audit trail in both databases."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa

from tests.server.store.making import Clock
from tinsmith.server.store import Store
from tinsmith.server.store.audit import noted
from tinsmith.server.store.records import NewEvent


def test_the_trail_is_newest_first_and_can_be_narrowed(store: Store, clock: Clock) -> None:
    start = clock()
    for number, owner in enumerate(("ann", "bob", "ann")):
        store.audit.record(NewEvent(owner=owner, event="checkpoint_delete", key_id=number, address="10.0.0.1"))
        clock.pass_(timedelta(hours=1))
    hour = timedelta(hours=1)
    assert [event.key_id for event in store.audit.trail(since=start)] == [2, 1, 0]
    assert [event.key_id for event in store.audit.trail(since=start + hour, until=start + 2 * hour)] == [1]
    assert [event.key_id for event in store.audit.trail(since=start, owner="ann")] == [2, 0]
    assert [event.key_id for event in store.audit.trail(since=start, key_ids=[0, 1])] == [1, 0]
    assert store.audit.trail(since=start, key_ids=[]) == []
    assert [event.key_id for event in store.audit.trail(since=start, limit=1)] == [2]


def test_what_is_old_is_forgotten(store: Store, clock: Clock) -> None:
    start = clock()
    store.audit.record(NewEvent(owner="ann", event="session_end"))
    clock.pass_(timedelta(days=1))
    store.audit.record(NewEvent(owner="bob", event="session_end"))
    assert store.audit.forget(start) == 0
    assert store.audit.forget(start + timedelta(hours=1)) == 1
    assert [event.owner for event in store.audit.trail(since=start)] == ["bob"]


@pytest.mark.parametrize("is_changed", [True, False])
def test_an_event_is_there_if_something_was_changed(store: Store, clock: Clock, is_changed: bool) -> None:
    def work(connection: sa.Connection) -> bool:
        return is_changed

    start, event = clock(), NewEvent(owner="ann", event="checkpoint_publish")
    assert store.audit._database.write(noted(work, event, clock())) is is_changed
    assert len(store.audit.trail(since=start)) == is_changed


def test_keys_are_events_without_the_key(store: Store, clock: Clock) -> None:
    start = clock()
    made = store.keys.create("ann", "laptop", address="command line of root")
    store.keys.register(made.plain, "again")
    assert store.keys.revoke(made.key.key_id, address="10.0.0.1")
    assert not store.keys.revoke(made.key.key_id)
    events = store.audit.trail(since=start)
    assert [(event.event, event.owner, event.key_id, event.address) for event in events] == [
        ("key_revoke", "ann", made.key.key_id, "10.0.0.1"),
        ("key_create", "ann", made.key.key_id, "command line of root"),
    ]
    assert made.plain not in repr(events)
