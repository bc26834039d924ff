"""A revoked key is refused at once, wherever it was revoked and whatever it had opened before."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.api.running import Answer, RunningServer
from tests.server.api.test_limits import LARGE_BYTES, begun_download, sample, until
from tinsmith.server.recent import Latest
from tinsmith.server.routes import _call, _download
from tinsmith.server.store import Store
from tinsmith.server.store.records import NewKey

OTHER = "tml-other"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    with RunningServer(tmp_path, api_keys=(OTHER,), long_poll_seconds=60) as made:
        yield made


@pytest.fixture
def key(running: RunningServer) -> NewKey:
    return running.store.keys.create("anna", "laptop")


def revoke_elsewhere(running: RunningServer, key: NewKey) -> None:
    """As the command line does: with a connection of its own."""
    elsewhere = Store(running.config.database_url)
    assert elsewhere.keys.revoke(key.key.key_id)
    elsewhere.close()


def test_a_key_revoked_elsewhere_is_refused_by_the_next_request(running: RunningServer) -> None:
    for _ in range(5):
        key = running.store.keys.create("anna", "laptop")
        token = running.post("auth/token", {}, key=key.plain).json()["jwt"]
        assert [running.get("sessions", key=one).status for one in (key.plain, token, OTHER)] == [200, 200, 200]
        revoke_elsewhere(running, key)
        assert [running.get("sessions", key=one).status for one in (key.plain, token, OTHER)] == [401, 401, 200]


def test_a_key_is_never_good_again_after_it_was_refused_in_a_crowd(running: RunningServer, key: NewKey) -> None:
    """Lookups that were under way when the key was revoked leave nothing behind."""
    stop = threading.Event()
    seen: list[list[int]] = []

    def ask() -> None:
        mine: list[int] = []
        while not stop.is_set():
            mine.append(running.get("sessions", key=key.plain).status)
        seen.append(mine)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        until(lambda: running.get("sessions", key=key.plain).status == 200)
        revoke_elsewhere(running, key)
        assert running.get("sessions", key=key.plain).status == 401
        stop.set()
        for one in asking:
            one.result(30)
    for mine in seen:
        assert mine == sorted(mine), "200s, then 401s"


def waiting_poll(
    running: RunningServer, key: NewKey, endpoint: str, body: Any
) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []
    poll = threading.Thread(target=lambda: answers.append(running.post(endpoint, body, key=key.plain, timeout=90)))
    poll.start()
    until(lambda: len(running.app.state.services.waiting) == 1)
    return poll, answers


@pytest.mark.parametrize("endpoint", ["retrieve_future", "retrieve_futures"])
def test_a_long_poll_of_a_key_that_was_revoked_gets_no_result(
    running: RunningServer, key: NewKey, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr(_call, "ASK_AGAIN_SECONDS", 0.0)
    running.workers.hold("sample")
    sampler_id = running.sampler(key=key.plain)
    request_id = sample(running, sampler_id, 0, key=key.plain).json()["request_id"]
    bodies = {
        "retrieve_future": {"request_id": request_id},
        "retrieve_futures": {
            "target": {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": 0},
            "prev_cursor": 0,
            "retrieved_request_ids": [],
        },
    }
    poll, answers = waiting_poll(running, key, endpoint, bodies[endpoint])
    revoke_elsewhere(running, key)
    running.workers.release()
    poll.join(30)
    assert [answer.status for answer in answers] == [401]
    assert running.store.results.statuses([request_id])[request_id].outcome is not None, "accepted work is done"


def test_a_body_that_was_on_its_way_when_its_key_was_revoked_is_refused(
    running: RunningServer, key: NewKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_call, "ASK_AGAIN_SECONDS", 0.0)
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.putrequest("POST", "/api/v1/create_session")
    for name, value in {"x-api-key": key.plain, "content-length": "14", "content-type": "application/json"}.items():
        connection.putheader(name, value)
    connection.endheaders(b'{"tags"')
    until(lambda: running.app.state.services.incoming._held["anna"] == 14)
    revoke_elsewhere(running, key)
    connection.send(b": []  }")
    assert connection.getresponse().status == 401
    connection.close()


# --- signed URLs -----------------------------------------------------------------------------------------------------


def exported(running: RunningServer, key: str) -> str:
    """The place of an export with a published checkpoint."""
    model_id = running.model(key=key)
    saved = running.post("save_weights_external", {"model_id": model_id, "seq_id": 1, "path": "out"}, key=key)
    assert running.result(saved, key=key)["path"]
    return f"training_runs/{model_id}/checkpoints/external_weights/out"


def urls(running: RunningServer, place: str, key: str) -> list[str]:
    files = running.get(f"{place}/external_weights_urls", key=key).json()["urls"]
    archive = running.get(f"{place}/archive", key=key).json()["url"]
    return [url.removeprefix(running.url) for url in (files["adapter_config.json"], archive)]


def fetched(running: RunningServer, links: list[str]) -> list[int]:
    return [running.call("GET", link, key=None).status for link in links]


def test_a_download_url_ends_with_its_key(running: RunningServer, key: NewKey) -> None:
    place = exported(running, key.plain)
    links = urls(running, place, key.plain)
    session_id = place.split("/")[1].partition(":")[0]
    links.append(
        running.get(f"sessions/{session_id}/trace_export", key=key.plain).json()["url"].removeprefix(running.url)
    )
    second = running.store.keys.create("anna", "second")
    others = urls(running, place, second.plain)
    assert fetched(running, [*links, *others]) == [200] * 5
    revoke_elsewhere(running, key)
    assert fetched(running, [*links, *others]) == [403, 403, 403, 200, 200]


@pytest.mark.parametrize("file", ["archive.tar", "adapter_model.safetensors"])
def test_a_download_on_its_way_ends_with_its_key(
    running: RunningServer,
    key: NewKey,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_download, "ASK_AGAIN_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    place = exported(running, key.plain)
    (weights,) = running.config.checkpoints.glob("*/*/out/adapter_model.safetensors")
    os.truncate(weights, LARGE_BYTES)
    links = [*running.get(f"{place}/external_weights_urls", key=key.plain).json()["urls"].values()]
    links.append(running.get(f"{place}/archive", key=key.plain).json()["url"])
    (link,) = (link.removeprefix(running.url) for link in links if file in link)
    with begun_download(running, link) as answer:
        assert len(answer.read(10_000)) == 10_000
        revoke_elsewhere(running, key)
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer.read()
    assert "A download was broken off: its key was revoked." in caplog.messages
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_a_download_url_ends_with_what_it_shows(running: RunningServer, key: NewKey) -> None:
    place = exported(running, key.plain)
    links = urls(running, place, key.plain)
    assert running.call("DELETE", f"/api/v1/{place}", key=key.plain).status == 204
    assert fetched(running, links) == [404, 404]


def test_a_reader_of_a_published_checkpoint_loses_it_when_it_is_withdrawn(running: RunningServer, key: NewKey) -> None:
    place = exported(running, key.plain)
    assert running.post(f"{place}/publish", key=key.plain).status == 204
    links = urls(running, place, OTHER)
    assert fetched(running, links) == [200, 200]
    assert running.call("DELETE", f"/api/v1/{place}/publish", key=key.plain).status == 204
    assert fetched(running, links) == [404, 404]


def test_a_download_url_that_was_changed_is_worthless(running: RunningServer, key: NewKey) -> None:
    place = exported(running, key.plain)
    (link, archive) = urls(running, place, key.plain)
    path, _, query = link.partition("?")
    values = dict(urllib.parse.parse_qsl(query))
    run = place.split("/")[1]
    changes: list[Callable[[], str]] = [
        lambda: link.replace("adapter_config.json", "adapter_model.safetensors"),
        lambda: link.replace("/out/", "/other/"),
        lambda: link.replace(run, run.replace(":train:0", ":train:1")),
        lambda: link.replace("external_weights", "weights"),
        lambda: f"{path}?{urllib.parse.urlencode({**values, 'expires': str(int(values['expires']) + 1)})}",
        lambda: f"{path}?{urllib.parse.urlencode({**values, 'key': '1'})}",
        lambda: f"{path}?{urllib.parse.urlencode({**values, 'key': ''})}",
        lambda: f"{path}?{urllib.parse.urlencode({**values, 'signature': values['signature'][:-1]})}",
        lambda: f"{path}?{urllib.parse.urlencode({**values, 'signature': ''})}",
        lambda: f"{path}?{archive.partition('?')[2]}",
        lambda: f"{path.rpartition('/')[0]}/..%2f..%2fsecret?{query}",
        lambda: path,
    ]
    assert fetched(running, [link]) == [200]
    assert fetched(running, [change() for change in changes]) == [403] * len(changes)


# --- one look for all ------------------------------------------------------------------------------------------------


def test_a_value_is_read_anew_for_everybody_and_once_for_all_who_ask_together() -> None:
    async def main() -> None:
        readings = 0
        go_on = asyncio.Event()

        async def read() -> int:
            nonlocal readings
            readings += 1
            number = readings
            await go_on.wait()
            return number

        latest = Latest(read)
        first = asyncio.create_task(latest.get())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert readings == 1
        later = [asyncio.create_task(latest.get()) for _ in range(100)]
        await asyncio.sleep(0)
        later[0].cancel()
        go_on.set()
        assert await first == 1
        assert await asyncio.gather(*later[1:]) == [2] * 99, "none is content with what was read before it asked"
        assert readings == 2
        assert await latest.get() == 3

    asyncio.run(main())


def test_a_reading_that_fails_fails_for_those_who_asked_and_for_nobody_later() -> None:
    async def main() -> None:
        outcomes = iter([RuntimeError("gone"), 1])

        async def read() -> int:
            outcome = next(outcomes)
            if isinstance(outcome, RuntimeError):
                raise outcome
            return outcome

        latest = Latest(read)
        with pytest.raises(RuntimeError, match="gone"):
            await latest.get()
        assert await latest.get() == 1

    asyncio.run(main())
