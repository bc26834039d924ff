"""Every test that asks for a store runs on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.postgres import Postgres
from tests.server.store.making import Clock
from tinsmith.server.store import Store


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@pytest.fixture(scope="session")
def prepared(postgres: Postgres) -> str:
    """A database with all tables; copying it is quicker than building them."""
    url = postgres.new_database()
    Store(url).close()
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new, ready database is."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tinsmith.db"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database(template=request.getfixturevalue("prepared"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[Store]:
    store = Store(url, now=clock)
    yield store
    store.close()
