"""A state folder with a real store and a real engine, a worker in this process, and somebody who submits jobs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from tinsmith.server.bell import Bell
from tinsmith.server.engine.engine import Engine
from tinsmith.server.messages import Drawn, Replay, WorkerSettings
from tinsmith.server.store import Store
from tinsmith.server.store.records import Done, Failed, JobKind, Lora, NewJob, NewModel, NewSampler, Outcome
from tinsmith.server.weights_exchange import PublishedWeights, ReceivedWeights
from tinsmith.server.worker import Worker
from tinsmith.types import Datum, ForwardBackwardOutput, ModelInput, SampleResponse, SamplingClientKind
from tinsmith.wire import proto

BASE = "tiny"
WAIT_SECONDS = 60.0


class Workbench:
    """Jobs are submitted as the API would."""

    def __init__(self, state: Path, folder: Path) -> None:
        self.state = state
        self.settings = WorkerSettings(
            base_model=BASE, folder=str(folder), database=f"sqlite:///{state / 'tinsmith.db'}", state=str(state)
        )
        self.replays: list[Replay] = []
        self.no_room: Mapping[str, str] = {}
        """The models that wait for room on the disk, and why."""
        self.held_up: list[Exception] = []
        self.drawn: list[Drawn] = []
        """What was told while it was drawn."""
        self.store = Store(self.settings.database)
        self.engine = Engine.open(folder, device="cpu", dtype="float32", kv_tokens=2048)
        self.died_of: Exception | None = None
        self._died = threading.Event()
        self._bell: IO[bytes] | None = None

    @contextmanager
    def worker(
        self, published: PublishedWeights | None = None, received: ReceivedWeights | None = None
    ) -> Iterator[Callable[[], None]]:
        """A worker that works; what is given back tells it to end."""
        heard, rung = os.pipe()
        bell = self._bell = os.fdopen(rung, "wb", buffering=0)
        store = Store(self.settings.database)
        worker = Worker(
            self.settings,
            store,
            self.engine,
            Bell(heard),
            lambda done: None,
            tell_replay=self.replays.append,
            tell_no_room=self._note_no_room,
            tell_held_up=self.held_up.append,
            tell_drawn=self.drawn.extend,
            published=published,
            received=received,
        )
        thread = threading.Thread(target=self._run, args=(worker,))
        thread.start()
        try:
            yield bell.close
        finally:
            bell.close()
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
            os.close(heard)

    def _run(self, worker: Worker) -> None:
        try:
            worker.run()
        except Exception as error:  # noqa: BLE001 - a process would end with it
            worker.abandon()
            self.died_of = error
            self._died.set()

    def ring(self) -> None:
        if self._bell is not None and not self._bell.closed:
            self._bell.write(b".")

    def _note_no_room(self, reasons: Mapping[str, str]) -> None:
        self.no_room = reasons

    def wait_for_its_death(self) -> None:
        assert self._died.wait(WAIT_SECONDS)
        self._died.clear()

    def replay_bound(self, seconds: float) -> None:
        """For workers from now on: how much work may be in no snapshot."""
        self.settings = msgspec.structs.replace(self.settings, replay_bound_seconds=seconds)

    def submit(self, kind: JobKind, model_id: str | None = None, *, makes_model: bool = False, **fields: Any) -> str:
        job = NewJob(
            **{"kind": kind, "owner": "ann", "session_id": "s", "base_model": BASE, "payload": b"{}", **fields},
            model_id=model_id,
        )
        model = None
        if makes_model or kind == "create_model":
            model = NewModel(
                model_id=str(model_id), owner=job.owner, base_model=BASE, lora=Lora(rank=2, seed=1), optimizer_config={}
            )
        request_id = self.store.jobs.enqueue(job, model=model).request_id
        self.ring()
        return request_id

    def create(self, model_id: str) -> str:
        self.submit("create_model", model_id, seq_id=0)
        return model_id

    def data(self, model_id: str, seq_id: int, first: int = 1, *, forward_only: bool = False) -> str:
        tokens = list(range(first, first + 6))
        inputs: dict[str, Any] = {"target_tokens": [token + 1 for token in tokens], "weights": [1.0] * 6}
        data = [Datum(ModelInput.from_ints(tokens), inputs)]
        prepared = proto.prepare_forward_backward(data, "cross_entropy", None, forward_only=forward_only)
        payload = prepared.finish(model_id, seq_id)
        return self.submit("forward_backward", model_id, seq_id=seq_id, payload=payload, size=6)

    def step(self, model_id: str, seq_id: int) -> str:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.01}}
        return self.submit("optim_step", model_id, seq_id=seq_id, payload=msgspec.json.encode(body))

    def train(self, model_id: str, seq_ids: range) -> list[str]:
        """Data and steps in turn; the ids of the data jobs."""
        return [
            self.data(model_id, seq_id, first=seq_id) if seq_id % 2 else self.step(model_id, seq_id)
            for seq_id in seq_ids
        ][::2]

    def copy(self, model_id: str, seq_id: int, kind: SamplingClientKind = "snapshot") -> str:
        """A sampler of the model as it is; the job's id."""
        body = {"model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": seq_id, "kind": kind}
        return self.submit("save_weights_for_sampler", model_id, seq_id=seq_id, payload=msgspec.json.encode(body))

    def copied_sampler(self, model_id: str, seq_id: int, kind: SamplingClientKind = "snapshot") -> str:
        """The sampler that such a job makes."""
        sampler_id: str = msgspec.json.decode(self.result(self.copy(model_id, seq_id, kind)))["sampling_session_id"]
        return sampler_id

    def save(self, model_id: str, seq_id: int, name: str, *, overwrite: bool = False) -> str:
        """The path of a checkpoint of the model as it is."""
        body = {"model_id": model_id, "seq_id": seq_id, "path": name, "overwrite": overwrite}
        job = self.submit("save_weights", model_id, seq_id=seq_id, payload=msgspec.json.encode(body))
        path: str = msgspec.json.decode(self.result(job))["path"]
        return path

    def load(self, model_id: str, seq_id: int, path: str, *, optimizer: bool) -> str:
        body = {"model_id": model_id, "seq_id": seq_id, "path": path, "optimizer": optimizer}
        return self.submit("load_weights", model_id, seq_id=seq_id, payload=msgspec.json.encode(body))

    def base_sampler(self) -> str:
        sampler = NewSampler(session_id="s", sampling_session_seq_id=0, owner="ann", base_model=BASE)
        return self.store.samplers.create(sampler).sampler_id

    def following_sampler(self, model_id: str) -> str:
        """One that samples from the model as it is at the time."""
        sampler = NewSampler(
            session_id="s", sampling_session_seq_id=99, owner="ann", base_model=BASE, model_id=model_id
        )
        return self.store.samplers.create(sampler).sampler_id

    def sample(self, sampler_id: str, seq_id: int, *, more: Mapping[str, Any] | None = None, **params: Any) -> str:
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"seed": 1, "stop": [], "max_tokens": 4, **params},
            **(more or {}),
        }
        return self.submit(
            "sample",
            sampler_id=sampler_id,
            seq_id=seq_id,
            payload=msgspec.json.encode(body),
            samples=body.get("num_samples", 1),
        )

    def outcome(self, request_id: str) -> Outcome:
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            outcome = self.store.results.statuses([request_id])[request_id].outcome
            if outcome is not None:
                assert isinstance(outcome, Done | Failed)
                return outcome
            time.sleep(0.005)
        raise AssertionError(f"{request_id} did not finish")

    def result(self, request_id: str) -> bytes:
        outcome = self.outcome(request_id)
        assert isinstance(outcome, Done), outcome
        return outcome.result

    def losses(self, request_ids: list[str]) -> list[float]:
        outputs: list[ForwardBackwardOutput] = [
            proto.decode_forward_backward_output(self.result(request_id)) for request_id in request_ids
        ]
        return [output.metrics["loss:sum"] for output in outputs]

    def tokens(self, request_id: str) -> list[int]:
        response: SampleResponse = proto.decode_sample_response(self.result(request_id))
        return response.sequences[0].tokens


def hold_up(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> tuple[threading.Event, threading.Event]:
    """Whoever calls this method from now on waits: the first event tells of it, the second lets all go on."""
    reached, go_on = threading.Event(), threading.Event()
    real = getattr(owner, name)

    def held_up(*arguments: Any) -> Any:
        reached.set()
        assert go_on.wait(WAIT_SECONDS)
        return real(*arguments)

    monkeypatch.setattr(owner, name, held_up)
    return reached, go_on
