"""Every test that asks for a store runs on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.server.postgres import Postgres
from tests.server.store.making import Clock
from tinsmith.server.store import Store, schema


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def prepared(postgres: Postgres) -> str:
    """A database with all tables; emptying them is quicker than building them for every test."""
    url = postgres.new_database()
    Store(url).close()
    return url


def _emptied(url: str) -> str:
    with psycopg.connect(url) as connection:
        names = [sql.Identifier(table.name) for table in schema.metadata.sorted_tables if table is not schema.identity]
        connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(sql.SQL(", ").join(names)))
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty database is."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tinsmith.db"
    return _emptied(request.getfixturevalue("prepared"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[Store]:
    store = Store(url, now=clock)
    yield store
    store.close()
