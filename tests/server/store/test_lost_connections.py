"""Nobody waits for ever for a database, or for another server, that is gone without a word."""

from __future__ import annotations

import socket

import pytest
import sqlalchemy as sa

from tests.server.postgres import Postgres
from tinsmith.server.store import Store, StoreUnavailableError, postgres


def test_a_database_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "CONNECT_SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StoreUnavailableError, match="timeout"):
        Store(f"postgresql://ann@127.0.0.1:{silent.getsockname()[1]}/tinsmith")


def test_a_server_that_is_stopped_holds_up_the_others_for_so_long_only(
    monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    monkeypatch.setattr(postgres, "TRANSACTION_SECONDS", 1)
    stopped, other = Store(postgres_url), Store(postgres_url)
    held = stopped.alone("place")
    held.__enter__()
    with other.alone("place"):
        pass
    with pytest.raises(StoreUnavailableError):
        held.__exit__(None, None, None)
    stopped.close()
    other.close()


def test_both_sides_ask_whether_the_other_is_still_there(postgres_url: str) -> None:
    store = Store(f"{postgres_url}&keepalives_idle=99")
    with store._database.engine.connect() as connection:
        mine = connection.connection.driver_connection.info.get_parameters()  # type: ignore[union-attr]
        theirs = connection.scalar(sa.text("SHOW idle_in_transaction_session_timeout"))
    assert (mine["keepalives_count"], mine["tcp_user_timeout"], mine["connect_timeout"]) == ("4", "60000", "10")
    assert mine["keepalives_idle"] == "99", "what the URL says counts"
    assert theirs == "5min"
    store.close()


def test_who_finds_all_connections_in_use_is_told_that_the_database_is_away(
    monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    store = Store(postgres_url)
    monkeypatch.setattr(store._database.engine.pool, "_timeout", 0.1)
    connections = [store._database.engine.connect() for _ in range(15)]
    with pytest.raises(StoreUnavailableError):
        store.keys.all()
    for connection in connections:
        connection.close()
    assert store.keys.all() == []
    store.close()


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> str:
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()
