"""How many models an owner may have holds over all servers on a database, and keeps nobody else waiting."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

from tests.server.api.running import MODELS, RunningServer
from tests.server.postgres import Postgres

MANY = 40
"""More owners than a server has connections to its database, which are 15."""


def made_at_once(asked: Sequence[tuple[RunningServer, str, str, int]]) -> list[Any]:
    """What became of requests in the same moment: where, whose, in which session, and which model of it."""
    together = Barrier(len(asked))

    def make(server: RunningServer, key: str, session_id: str, number: int) -> Any:
        body = {"session_id": session_id, "model_seq_id": number, "base_model": MODELS[0]}
        together.wait()
        return server.result(server.post("create_model", body, key=key), key=key)

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: make(*one), asked))


def test_many_owners_make_their_models_in_the_same_moment(tmp_path: Path, postgres: Postgres) -> None:
    keys = tuple(f"tml-{number}" for number in range(MANY))
    with RunningServer(tmp_path, database=postgres.new_database(), api_keys=keys) as server:
        results = made_at_once([(server, key, server.session(key=key), 0) for key in keys])
    assert len({result["model_id"] for result in results}) == MANY


def test_two_servers_together_make_no_more_models_than_an_owner_may_have(tmp_path: Path, postgres: Postgres) -> None:
    url, settings = postgres.new_database(), {"api_keys": ("tml-a",), "max_models": 3, "long_poll_seconds": 1}
    with (
        RunningServer(tmp_path / "one", database=url, **settings) as one,
        RunningServer(tmp_path / "two", database=url, **settings) as two,
    ):
        session_id = one.session(key="tml-a")
        results = made_at_once([((one, two)[number % 2], "tml-a", session_id, number) for number in range(12)])
    assert sum("model_id" in result for result in results) == 3
    assert sum("this owner has 3 already" in str(result.get("error")) for result in results) == 9
