"""Real worker processes under supervision: started, heard, started again after their death, and ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.server.full_disk_worker import IS_FULL
from tinsmith.errors import ConfigError
from tinsmith.server import keeper
from tinsmith.server.config import ServerConfig
from tinsmith.server.messages import Replay
from tinsmith.server.models import ModelSource
from tinsmith.server.store import Store
from tinsmith.server.store.records import Done, Expired, Failed, Lora, NewJob, NewModel, Outcome
from tinsmith.server.supervise import WorkerProcesses

BASE = "tiny"
LOOSE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE_SECONDS", 0.01)


@asynccontextmanager
async def processes(
    state: Path, folder: Path, *, stall_seconds: int = 3600, **more: Path
) -> AsyncIterator[WorkerProcesses]:
    source = ModelSource(BASE, str(folder))
    config = ServerConfig(models=(source,), state=state, dtype="float32", stall_seconds=stall_seconds)
    store = Store(config.database_url)
    workers = WorkerProcesses(config, {BASE: folder, **more}, store)
    await workers.start()
    try:
        yield workers
    finally:
        await asyncio.wait_for(workers.stop(), LOOSE_SECONDS)
        assert children() == []
        store.close()


def children() -> list[int]:
    """Our workers. Other tests of the same run have processes of their own."""
    pid = os.getpid()
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if b"tinsmith.server.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


def priorities_of_threads(pid: int) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()}


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * LOOSE_SECONDS))  # type: ignore[arg-type]


def create_model(store: Store, number: int, base_model: str = BASE) -> str:
    model_id = f"s:train:{number}"
    job = NewJob(
        kind="create_model",
        owner="ann",
        payload=b"{}",
        session_id="s",
        base_model=base_model,
        model_id=model_id,
        seq_id=0,
    )
    model = NewModel(model_id=model_id, owner="ann", base_model=base_model, lora=Lora(rank=1), optimizer_config={})
    return store.jobs.enqueue(job, model=model).request_id


def test_a_worker_that_computes_on_the_cpu_gives_way_to_requests(tmp_path: Path, tiny_folder: Path) -> None:
    async def scenario() -> None:
        async with processes(tmp_path, tiny_folder) as workers:
            await workers.ready()
            (worker,) = children()
            ours, lowest = os.getpriority(os.PRIO_PROCESS, 0), 19
            assert os.getpriority(os.PRIO_PROCESS, worker) == min(lowest, ours + 5)
            assert ours in priorities_of_threads(worker)  # its signs of life do not wait

    run(scenario)


def test_a_worker_is_woken_heard_and_replaced_when_it_dies(
    tmp_path: Path, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def scenario() -> None:
        store = Store(f"sqlite:///{tmp_path / 'tinsmith.db'}")
        async with processes(tmp_path, tiny_folder) as workers:
            done: asyncio.Queue[str] = asyncio.Queue()

            def notice(request_ids: Sequence[str]) -> None:
                for request_id in request_ids:
                    done.put_nowait(request_id)

            workers.on_done(notice)
            for number in range(2):
                await workers.ready()
                request_id = create_model(store, number)
                workers.wake(BASE)
                assert await done.get() == request_id
                (worker,) = children()
                os.kill(worker, signal.SIGKILL)
                while (why := workers.held_up(BASE)) is None:  # noqa: ASYNC110 - nothing tells when a process is gone
                    await asyncio.sleep(0.01)
                assert why == "its worker is gone, and is being started again"
            await workers.ready()
            assert workers.held_up(BASE) is None
            assert children() != [worker]
            workers.wake("no such model")
        store.close()

    run(scenario)
    assert caplog.text.count(f"The worker of {BASE} is back.") == 2


def test_a_worker_says_which_model_waits_for_room_on_the_disk_until_there_is_some(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.touch()
    monkeypatch.setattr(keeper, "WORKER_MODULE", "tests.server.full_disk_worker")
    monkeypatch.setenv(IS_FULL, str(full))

    async def scenario() -> None:
        store = Store(f"sqlite:///{tmp_path / 'tinsmith.db'}")
        create_model(store, 0)
        body = b'{"model_id": "s:train:0", "seq_id": 1, "path": "a"}'
        job = {"owner": "ann", "session_id": "s", "base_model": BASE, "model_id": "s:train:0", "seq_id": 1}
        saved = store.jobs.enqueue(NewJob(kind="save_weights", payload=body, **job)).request_id  # type: ignore[arg-type]
        async with processes(tmp_path, tiny_folder) as workers:
            while (reason := workers.held_up(BASE, "s:train:0")) is None:  # noqa: ASYNC110 - those who poll ask it
                await asyncio.sleep(0.01)
            assert reason.startswith("A checkpoint of ")
            assert reason.endswith(" does not fit: the server's disk has 0 KiB free; it is done when there is room")
            assert workers.held_up(BASE, "s:train:1") is None
            assert workers.is_ready(BASE)
            assert store.results.statuses([saved])[saved].outcome is None
            full.unlink()
            while store.results.statuses([saved])[saved].outcome is None:  # noqa: ASYNC110 - nor does a store tell
                await asyncio.sleep(0.01)
            assert isinstance(store.results.statuses([saved])[saved].outcome, Done)
            while workers.held_up(BASE, "s:train:0") is not None:  # noqa: ASYNC110 - it is told a moment later
                await asyncio.sleep(0.01)
        store.close()

    run(scenario)


def test_how_far_a_replay_is_can_be_seen_until_it_is_over(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "WORKER_MODULE", "tests.server.telling_worker")

    async def scenario() -> None:
        async with processes(tmp_path, tiny_folder) as workers:
            await workers.ready()
            for replayed in (3, 5, None):
                expected = None if replayed is None else Replay(model_id="m", replayed=replayed, total=7)
                while workers.replay(BASE) != expected:  # noqa: ASYNC110 - it is asked by those who poll
                    await asyncio.sleep(0.01)
                workers.wake(BASE)
            assert workers.replay("no such model") is None

    run(scenario)


def test_a_worker_that_says_nothing_is_missed_until_it_speaks_again(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "SILENT_SECONDS", 3)

    async def scenario() -> None:
        async with processes(tmp_path, tiny_folder) as workers:
            await workers.ready()
            (worker,) = children()
            os.kill(worker, signal.SIGSTOP)
            while (missed := workers.held_up(BASE, "")) is None:  # noqa: ASYNC110 - it is asked by those who poll
                await asyncio.sleep(0.01)
            os.kill(worker, signal.SIGCONT)
            assert missed.startswith("its worker has not been heard of for 3 s")
            while workers.held_up(BASE, "") is not None:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            assert children() == [worker]

    run(scenario)
    assert "has not been heard of for 3 s; after 3603 s another one is started" in caplog.text


def test_a_worker_that_says_nothing_for_too_long_is_replaced(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "SILENT_SECONDS", 2)

    async def scenario() -> None:
        store = Store(f"sqlite:///{tmp_path / 'tinsmith.db'}")
        async with processes(tmp_path, tiny_folder, stall_seconds=2) as workers:
            await workers.ready()
            (worker,) = children()
            os.kill(worker, signal.SIGSTOP)
            while workers.is_ready(BASE):  # noqa: ASYNC110 - nothing tells when a process is gone
                await asyncio.sleep(0.01)
            await workers.ready()
            assert worker not in children()
            assert isinstance(await outcome(store, create_model(store, 0)), Done)
        store.close()

    run(scenario)
    assert "was not heard of for 4 s and was killed; starting it again" in caplog.text


def test_a_worker_that_is_still_loading_is_not_waited_for(tmp_path: Path, tiny_folder: Path) -> None:
    async def scenario() -> None:
        async with processes(tmp_path, tiny_folder) as workers:
            while not children():  # noqa: ASYNC110 - nor when there is one
                await asyncio.sleep(0.01)
            assert not workers.is_ready(BASE)

    run(scenario)


def test_a_terminated_group_leaves_the_decision_to_the_parent(tmp_path: Path, tiny_folder: Path) -> None:
    """SIGTERM and SIGINT may reach the worker too; it ends when its parent says so."""

    async def scenario() -> None:
        async with processes(tmp_path, tiny_folder) as workers:
            await workers.ready()
            (worker,) = children()
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(worker, number)
            await asyncio.sleep(0.1)
            assert children() == [worker]

    run(scenario)


def test_a_worker_that_cannot_be_started_is_tried_again(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = asyncio.create_subprocess_exec, []

    async def without_memory(*arguments: str, **options: object) -> asyncio.subprocess.Process:
        if not failed:
            failed.append(True)
            raise OSError("Cannot allocate memory")
        return await real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", without_memory)

    async def scenario() -> None:
        async with processes(tmp_path, tiny_folder) as workers:
            await workers.ready()
            assert failed

    run(scenario)


@pytest.fixture
def broken_folder(tmp_path: Path, tiny_folder: Path) -> Path:
    """A model that lacks a tensor, which shows only when all of it is loaded."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


async def outcome(store: Store, request_id: str) -> Outcome | Expired:
    while True:
        found = store.results.statuses([request_id])[request_id].outcome
        if found is not None:
            return found
        await asyncio.sleep(0.01)


def test_a_model_that_cannot_be_loaded_is_given_up_and_the_other_is_served(
    tmp_path: Path, tiny_folder: Path, broken_folder: Path
) -> None:
    async def scenario() -> None:
        store = Store(f"sqlite:///{tmp_path / 'tinsmith.db'}")
        early = create_model(store, 0, "broken")
        async with processes(tmp_path, tiny_folder, broken=broken_folder) as workers:
            await workers.ready()
            assert (workers.is_ready(BASE), workers.problem(BASE)) == (True, None)
            assert not workers.is_ready("broken")
            problem = workers.problem("broken")
            assert problem is not None
            assert problem.startswith("The base model 'broken' cannot be loaded: ")
            assert "has no tensor model.layers.1.mlp.down_proj.weight" in problem
            late, good = create_model(store, 1, "broken"), create_model(store, 2)
            for base_model in ("broken", BASE):
                workers.wake(base_model)
            assert await outcome(store, early) == await outcome(store, late) == Failed(error=problem, category="server")
            assert isinstance(await outcome(store, good), Done)
        store.close()

    run(scenario)


def restarts(caplog: pytest.LogCaptureFixture) -> int:
    return sum("starting it again" in record.msg for record in caplog.records)


def test_a_model_that_was_loaded_once_is_never_given_up(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = keeper.WORKER_MODULE
    monkeypatch.setattr(keeper, "MAX_PAUSE_SECONDS", 0.03)

    async def scenario() -> None:
        async with processes(tmp_path, tiny_folder) as workers:
            await workers.ready()
            monkeypatch.setattr(keeper, "WORKER_MODULE", "this")  # prints some lines and ends
            (worker,) = children()
            os.kill(worker, signal.SIGKILL)
            while restarts(caplog) <= keeper.MAX_FAILED_STARTS:  # noqa: ASYNC110 - nothing tells of a failed start
                await asyncio.sleep(0.01)
            monkeypatch.setattr(keeper, "WORKER_MODULE", real)
            await workers.ready()
            assert workers.is_ready(BASE)

    run(scenario)


def test_a_worker_that_never_becomes_ready_is_started_ever_more_slowly_and_then_given_up(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "WORKER_MODULE", "this")  # prints some lines and ends
    monkeypatch.setattr(keeper, "MAX_PAUSE_SECONDS", 0.03)

    async def scenario() -> None:
        async with processes(tmp_path, tiny_folder) as workers:
            with pytest.raises(ConfigError, match="cannot be loaded: its process ended with exit status 0"):
                await workers.ready()

    run(scenario)
    pauses = [record.args[-1] for record in caplog.records if "starting it again" in record.msg and record.args]
    assert pauses == [0.01, 0.02, 0.03, 0.03]
