"""Usage and storage as tables, JSON and CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from tests.cli.conftest import Stock
from tests.cli.program import InProcess
from tests.cli.test_listings import headings
from tests.support.server import FakeServer
from tinsmith.cli.billing import STORAGE_COLUMNS, USAGE_COLUMNS

HOURS = ("2030-01-01T00:00:00Z", "2030-01-01T01:00:00Z")


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_usage_has_one_column_per_field_and_says_what_is_not_known_yet(cli: InProcess, stock: Stock) -> None:
    done = cli("billing", "usage", *HOURS)
    assert headings(done.out) == list(USAGE_COLUMNS)
    assert done.out.count("null") == 4, "the rates of three kinds of tokens and of storage"


def test_usage_as_json_is_the_answer_of_the_server(cli: InProcess, stock: Stock, server: FakeServer) -> None:
    document = cli("-f", "json", "billing", "usage", "2030-01-01", HOURS[1]).json()
    assert document.keys() == {"data", "sessions", "cost_data_through"}
    assert document["data"][0]["event_info"] == {"type": "training", "token_count": 100}
    (request,) = server.received("events")
    assert request.query == {"starting_on": HOURS[0], "ending_before": HOURS[1]}


def test_usage_and_sessions_as_csv(cli: InProcess, stock: Stock, home: Path) -> None:
    rows = table(cli("billing", "usage", *HOURS, "--csv", "-").out)
    assert [row["type"] for row in rows] == ["training", "sampling_prefill", "sampling_sample", "checkpoint", "storage"]
    assert rows[0]["token_count"] == "100"
    assert rows[0]["effective_rate_usd_per_million_tokens"] == ""
    done = cli("billing", "usage", *HOURS, "--csv", "usage.csv", "--sessions-csv", "-")
    assert [row["session_id"] for row in table(done.out)] == [stock.session_id]
    assert table((home / "usage.csv").read_text()) == rows
    assert cli("billing", "usage", *HOURS, "--csv", "-", "--sessions-csv", "-").code == 2


def test_storage_in_three_forms(cli: InProcess, stock: Stock, server: FakeServer) -> None:
    assert headings(cli("billing", "checkpoint-storage").out) == list(STORAGE_COLUMNS)
    document = cli("-f", "json", "billing", "checkpoint-storage", "--project-id", "mine").json()
    assert document["effective_rate_usd_per_gigabyte_month"] == 0.1
    assert document["data"][0]["checkpoint_count"] == 3
    assert server.received("current")[-1].query == {"project_id": "mine"}
    (row,) = table(cli("billing", "checkpoint-storage", "--csv", "-").out)
    assert tuple(row) == STORAGE_COLUMNS
