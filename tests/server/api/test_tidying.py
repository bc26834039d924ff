"""What ends and what is removed without anybody asking, with a clock that the test turns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.server.api.running import RunningServer
from tinsmith.server import tidying
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.snapshots import SnapshotFolders
from tinsmith.server.spilled import SpilledWeights
from tinsmith.server.tidying import Tidying

TIMEOUT = timedelta(minutes=10)
MINUTE = timedelta(minutes=1)


class Minutes:
    """Rounds of tidying, a minute apart, at times of our own."""

    def __init__(self, running: RunningServer) -> None:
        services = running.app.state.services
        self.now = datetime.now(UTC)
        self.tidying = Tidying(
            services.config,
            services.store,
            services.storage,
            services.waiting,
            services.workers,
            services.samplers_in_use,
            lambda: self.now,
        )
        self._running = running
        self._threads = ThreadPoolExecutor(1, "minutes")

    def round(self) -> None:
        loop = self._running.workers.loop
        asyncio.run_coroutine_threadsafe(self.tidying.round(self._threads), loop).result(30)

    def pass_(self, span: timedelta) -> None:
        for _ in range(span // MINUTE):
            self.now += MINUTE
            self.round()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    with RunningServer(tmp_path) as made:
        yield made


@pytest.fixture
def minutes(running: RunningServer) -> Minutes:
    return Minutes(running)


def status(running: RunningServer, session_id: str) -> str:
    found = running.post("sessions/search", {"session_id": session_id}).json()["sessions"][0]
    return str(found["status"]["type"])


def test_a_session_that_falls_silent_ends_with_its_samples_and_keeps_its_models(
    running: RunningServer, minutes: Minutes
) -> None:
    session_id = running.session()
    model_id, sampler_id = running.model(session_id), running.sampler(session_id)
    saved = running.result(running.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "kept"}))
    running.workers.hold("sample")
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    waiting = running.post("asample", {**body, "sampling_session_id": sampler_id, "seq_id": 0})
    minutes.pass_(TIMEOUT)
    assert status(running, session_id) == "active"
    minutes.pass_(MINUTE)
    assert status(running, session_id) == "cancelled"
    running.workers.release()
    assert "cancelled" in running.result(waiting)["error"]
    assert running.post("session_heartbeat", {"session_id": session_id}).status == 410
    refused = running.result(running.post("asample", {**body, "sampling_session_id": sampler_id, "seq_id": 1}))
    assert refused["category"] == "user"
    assert "make a new sampling client" in refused["error"]
    again = {"session_id": session_id, "model_seq_id": 1, "base_model": "tiny/model-1"}
    assert running.post("create_model", again).status == 410
    assert running.post("weights_info", {"tinker_path": saved["path"]}).status == 200
    step = running.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    assert "metrics" in running.result(step)


@pytest.mark.parametrize("end", ["silence", "errored"])
def test_who_waits_for_a_queued_sample_hears_of_the_end_of_its_session(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunningServer(tmp_path, long_poll_seconds=300) as running:
        session_id = running.session()
        model_id, sampler_id = running.model(session_id), running.sampler(session_id)
        monkeypatch.setattr(running.workers, "_claim", list)  # whatever comes from now on stays in the queue
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        sample = running.post("asample", {**body, "sampling_session_id": sampler_id, "seq_id": 0})
        step = running.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
        with ThreadPoolExecutor(1) as pool:
            polled = pool.submit(running.result, sample, timeout=400)
            while not len(running.app.state.services.waiting):
                time.sleep(0.01)
            if end == "silence":
                Minutes(running).pass_(TIMEOUT + MINUTE)
            else:
                running.post(f"sessions/{session_id}/finish", {"reason": {"type": end}, "detail": None})
            assert "its session ended" in polled.result(30)["error"]
        (queued,) = running.store.results.statuses([step.json()["request_id"]]).values()
        assert queued.state == "queued", "training was asked for, and is done"


def test_all_objects_are_looked_through_every_minute_unless_many_wait_for_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    monkeypatch.setattr(tidying, "collect", lambda: looks.append(threading.current_thread().name))
    with RunningServer(tmp_path, long_poll_seconds=300, session_timeout_seconds=86400) as running:
        sampler_id = running.sampler()
        minutes = Minutes(running)

        def looks_within(span: timedelta) -> int:
            before = len(looks)
            minutes.pass_(span)
            return sum(name.startswith("minutes") for name in looks[before:])  # the server has rounds of its own

        assert looks_within(3 * MINUTE) == 3
        running.workers.hold("sample")
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        sample = running.post("asample", {**body, "sampling_session_id": sampler_id, "seq_id": 0})
        with ThreadPoolExecutor(1) as pool:
            polled = pool.submit(running.result, sample, timeout=400)
            while not len(running.app.state.services.waiting):
                time.sleep(0.01)
            assert looks_within(3 * MINUTE) == 3, "one is not many"
            monkeypatch.setattr(tidying, "MANY_WAIT", 1)
            assert looks_within(tidying.COLLECT_PAUSE) == 0
            assert looks_within(MINUTE) == 1
            running.workers.release()
            assert "error" not in polled.result(30)
        assert looks_within(MINUTE) == 1


def test_a_session_whose_client_is_heard_of_goes_on(running: RunningServer, minutes: Minutes) -> None:
    session_id = running.session()
    for _ in range(3):
        minutes.pass_(TIMEOUT - MINUTE)
        running.store.sessions._database.now = lambda: minutes.now
        assert running.post("session_heartbeat", {"session_id": session_id}).status == 200
    assert status(running, session_id) == "active"


def test_silence_that_nobody_could_have_heard_does_not_count(running: RunningServer, minutes: Minutes) -> None:
    """A client that waits for its server, or whose machine slept as ours did, finds its session again."""
    session_id = running.session()
    minutes.now += timedelta(days=1)
    minutes.round()
    minutes.pass_(TIMEOUT - MINUTE)
    assert status(running, session_id) == "active"
    restarted = Minutes(running)
    restarted.now = minutes.now
    restarted.round()
    assert status(running, session_id) == "active"
    minutes.pass_(MINUTE)
    assert status(running, session_id) == "cancelled"


def test_a_clock_that_is_set_forward_ends_no_session(tmp_path: Path) -> None:
    with RunningServer(tmp_path, session_timeout_seconds=60) as running:
        minutes = Minutes(running)
        running.store.sessions._database.now = lambda: minutes.now
        session_id = running.session()
        for seconds in (*[15] * 8, 100, *[15] * 4):
            minutes.now += timedelta(seconds=seconds)
            minutes.round()
            assert running.post("session_heartbeat", {"session_id": session_id}).status == 200


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_session_is_judged_by_one_clock_although_another_server_hears_it(
    running: RunningServer, minutes: Minutes, hours: int
) -> None:
    running.store.sessions._database.now = lambda: minutes.now + timedelta(hours=hours)
    session_id = running.session()
    for _ in range(2 * TIMEOUT // MINUTE):
        minutes.pass_(MINUTE)
        assert running.post("session_heartbeat", {"session_id": session_id}).status == 200
    minutes.pass_(TIMEOUT)
    assert status(running, session_id) == "active"
    minutes.pass_(MINUTE)
    assert status(running, session_id) == "cancelled"


def test_files_of_copied_weights_go_with_the_last_who_could_ask_for_them(
    running: RunningServer, minutes: Minutes, tmp_path: Path
) -> None:
    spilled = SpilledWeights(tmp_path / "samplers")
    session_id = running.session()
    model_id = running.model(session_id)
    snapshot = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0}
    sampler_id = running.result(running.post("save_weights_for_sampler", snapshot))["sampling_session_id"]
    for name in (sampler_id, "unknown:sample:0"):
        with spilled.writing(name) as file:
            file.write_bytes(b"weights")
    minutes.round()
    assert spilled.sampler_ids() == [sampler_id]
    finish = {"reason": {"type": "success"}, "detail": None}
    assert running.post(f"sessions/{session_id}/finish", finish).status == 204
    minutes.round()
    assert spilled.sampler_ids() == []
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    refused = running.result(running.post("asample", {**body, "sampling_session_id": sampler_id, "seq_id": 0}))
    assert "has no weights any more" in refused["error"]
    assert refused["category"] == "user"


def test_of_weights_that_were_published_the_newest_file_stays_for_all_who_draw_with_it(
    running: RunningServer, minutes: Minutes, tmp_path: Path
) -> None:
    spilled, sampler_ids = SpilledWeights(tmp_path / "samplers"), []
    model_id = running.model()
    for number in range(3):
        body = {"model_id": model_id, "seq_id": 1 + number, "sampling_session_seq_id": number, "kind": "inflight"}
        sampler_ids.append(running.result(running.post("save_weights_for_sampler", body))["sampling_session_id"])
        with spilled.writing(sampler_ids[-1]) as file:
            file.write_bytes(b"weights")
    minutes.round()
    assert spilled.sampler_ids() == [sampler_ids[-1]]
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    drawn = running.result(running.post("asample", {**body, "sampling_session_id": sampler_ids[0], "seq_id": 0}))
    assert "error" not in drawn


def test_files_of_copied_weights_are_bounded_for_each_owner(tmp_path: Path) -> None:
    """Those used within the hour do not count."""
    spilled = SpilledWeights(tmp_path / "samplers")
    with RunningServer(tmp_path, max_sampler_copies=2, session_timeout_seconds=24 * 3600) as running:
        minutes, model_id, sampler_ids = Minutes(running), running.model(), []
        for number in range(4):
            body = {"model_id": model_id, "seq_id": 1 + number, "sampling_session_seq_id": number}
            sampler_ids.append(running.result(running.post("save_weights_for_sampler", body))["sampling_session_id"])
            with spilled.writing(sampler_ids[-1]) as file:
                file.write_bytes(b"weights")
        minutes.pass_(59 * MINUTE)
        assert sorted(spilled.sampler_ids()) == sampler_ids
        minutes.pass_(2 * MINUTE)
        assert sorted(spilled.sampler_ids()) == sampler_ids[2:]


def test_a_model_that_nobody_uses_is_given_up_a_week_after_its_session(
    running: RunningServer, minutes: Minutes, tmp_path: Path
) -> None:
    model_id = running.model()
    saved = running.result(running.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "kept"}))
    snapshots = SnapshotFolders(CheckpointFolders(tmp_path / "snapshots"))
    with snapshots.writing(model_id, 0) as folder:
        (folder / "weights").write_bytes(b"weights")
    running.store.models.set_snapshot(model_id, 0)
    running.post(f"sessions/{model_id.partition(':')[0]}/finish", {"reason": {"type": "success"}, "detail": None})
    minutes.now += timedelta(days=6)
    minutes.round()
    assert snapshots.folder(model_id, 0).is_dir()
    minutes.now += timedelta(days=2)
    minutes.round()
    assert list((tmp_path / "snapshots").iterdir()) == []
    running.app.state.services.models_in_use.clear()
    step = running.result(running.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}}))
    assert "load a checkpoint" in step["error"]
    assert running.post("weights_info", {"tinker_path": saved["path"]}).status == 200


def test_the_server_tidies_up_by_itself(tmp_path: Path) -> None:
    with RunningServer(tmp_path, session_timeout_seconds=2) as running:
        session_id = running.session()
        end = time.monotonic() + 30
        while status(running, session_id) != "cancelled":
            assert time.monotonic() < end, "the session was not ended"
            time.sleep(0.05)
