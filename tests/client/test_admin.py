"""The admin client: audit log, billing, storage."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest

import tinsmith
from tests.support.server import FakeServer, Reply
from tinsmith.errors import InvalidInputError


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server, tinsmith.ServiceClient(base_url=server.url, api_key="tml-x") as service:
        service.create_lora_training_client("tiny/model-1", rank=8).save_state("a").result(10)
        yield server


@pytest.fixture
def admin(server: FakeServer) -> tinsmith.AdminClient:
    return tinsmith.AdminClient(base_url=server.url, api_key="tml-x")


def last(server: FakeServer) -> tuple[str, str, dict[str, str], str]:
    request = server.requests[-1]
    return request.method, request.path, request.query, request.headers["x-sdk-method"]


@pytest.mark.parametrize(
    ("arguments", "query"),
    [
        ({}, {"event_type": "all"}),
        ({"event_type": "checkpoints", "day": date(2030, 1, 2)}, {"event_type": "checkpoints", "day": "2030-01-02"}),
        ({"day": datetime(2030, 1, 2, 13, tzinfo=UTC)}, {"event_type": "all", "day": "2030-01-02"}),
    ],
)
def test_the_audit_log(
    server: FakeServer, admin: tinsmith.AdminClient, arguments: dict[str, Any], query: dict[str, str]
) -> None:
    log = admin.get_audit_log(**arguments).result(10)
    assert log.entries[0].event == "checkpoint_created"
    assert last(server) == ("GET", "/api/v1/audit", query, "AdminClient.get_audit_log")
    assert asyncio.run(admin.get_audit_log_async(**arguments)) == log


def test_the_audit_log_may_lie_elsewhere_and_the_key_stays_here(
    admin: tinsmith.AdminClient, server: FakeServer
) -> None:
    with FakeServer() as storage:
        storage.script("log.json", Reply(json={"entries": []}))
        server.script("audit", Reply(307, body=b"", headers={"location": f"{storage.url}/log.json?signature=1"}))
        assert admin.get_audit_log().result(10).entries == []
        (request,) = storage.requests
        assert "x-api-key" not in request.headers


def test_billing(server: FakeServer, admin: tinsmith.AdminClient) -> None:
    start, end = "2030-01-01T00:00:00Z", "2030-01-02T00:00:00Z"
    usage = admin.get_billing_usage(start, end).result(10)
    assert len(usage.data) == 5
    query = {"starting_on": start, "ending_before": end}
    assert last(server) == ("GET", "/api/v1/billing/usage/events", query, "AdminClient.get_billing_usage")
    assert asyncio.run(admin.get_billing_usage_async(start, end)) == usage


def test_times_are_sent_in_utc(server: FakeServer, admin: tinsmith.AdminClient) -> None:
    east = timezone(timedelta(hours=2))
    start, end = datetime(2030, 1, 1, 2, tzinfo=east), datetime(2030, 1, 2, tzinfo=UTC)
    admin.get_billing_usage(start, end).result(10)
    assert last(server)[2]["starting_on"] == "2030-01-01T00:00:00Z"


def test_storage(server: FakeServer, admin: tinsmith.AdminClient) -> None:
    used = admin.get_current_checkpoint_storage_usage("p-1").result(10)
    assert used.data[0].checkpoint_count == 1
    path, name = "/api/v1/billing/usage/checkpoints/current", "AdminClient.get_current_checkpoint_storage_usage"
    assert last(server) == ("GET", path, {"project_id": "p-1"}, name)
    assert asyncio.run(admin.get_current_checkpoint_storage_usage_async("p-1")) == used


@pytest.mark.parametrize(
    "arguments", [{"event_type": "everything"}, {"event_type": None}, {"day": "2030-01-02"}, {"day": 5}], ids=str
)
def test_an_audit_log_that_cannot_be_asked_for_is_refused(
    admin: tinsmith.AdminClient, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(arguments))):
        admin.get_audit_log(**arguments)


@pytest.mark.parametrize("time", ["", "yesterday", datetime(2030, 1, 1), date(2030, 1, 1), 5, None], ids=repr)
def test_a_time_that_is_none_or_has_no_zone_is_refused_by_name(admin: tinsmith.AdminClient, time: Any) -> None:
    good = datetime(2030, 1, 1, tzinfo=UTC)
    with pytest.raises(InvalidInputError, match="starting_on"):
        admin.get_billing_usage(time, good)
    with pytest.raises(InvalidInputError, match="ending_before"):
        admin.get_billing_usage(good, time)
