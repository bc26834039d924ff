"""A worker without an engine: it takes jobs from the real store and answers them with the toy model of `tests.support`.

It runs inside the API process, so that a test can hold it, look into it and let it go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from tests.support import codec
from tests.support.engine import Policy, run_loss, sample
from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.messages import Drawn, Figure, Replay, SampleJob
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.records import (
    CheckpointKey,
    CheckpointKind,
    Done,
    Failed,
    Job,
    NewCheckpoint,
    NewJob,
    NewSampler,
    Outcome,
    Sampled,
    Shown,
    ShownCompletion,
    Stepped,
    TrainedOn,
)
from tinsmith.server.worker_metrics import WorkerState
from tinsmith.types import SampleRequest
from tinsmith.wire import json, proto
from tinsmith.wire import tinker_pb2 as pb

PROTOBUF, JSON = "application/x-protobuf", "application/json"
FILES = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": bytes(range(256)) * 256}


class StandInWorkers:
    """Satisfies `tinsmith.server.waiting.Workers` for every base model at once."""

    leads = True

    def __init__(
        self,
        store: Store,
        folders: CheckpointFolders,
        base_models: Sequence[str],
        max_checkpoint_bytes: int | None = None,
    ) -> None:
        self.ready = True
        self.trouble: str | None = None
        self.replaying: Replay | None = None
        self.woken: Counter[str] = Counter()
        self.executed: list[Job] = []
        self.is_silent = False
        """Finish jobs without saying so, as if every message were lost."""

        self._store = store
        self._folders = folders
        self._base_models = base_models
        self._max_checkpoint_bytes = max_checkpoint_bytes
        self._held: set[str] = set()
        self._policies: dict[str, Policy] = {}
        self._notices: list[Callable[[Sequence[str]], None]] = []
        self._drawn_notices: list[Callable[[Sequence[Drawn]], None]] = []

    # What the API sees

    def wake(self, base_model: str, replica: str | None = None) -> None:
        self.woken[base_model] += 1
        self._work.set()

    def choose_replica(self, job: NewJob, request: SampleRequest) -> str:
        return ""

    def are_over(self, request_ids: Sequence[str]) -> None:
        pass

    def is_ready(self, base_model: str, lane: str | None = None) -> bool:
        return self.ready

    def problem(self, base_model: str) -> str | None:
        return None

    def held_up(self, base_model: str, stream: str = "", lane: str | None = None) -> str | None:
        return self.trouble

    def replay(self, base_model: str, lane: str | None = None) -> Replay | None:
        return self.replaying

    def figures(self, base_model: str) -> Sequence[Figure]:
        return ()

    def states(self, base_model: str) -> Sequence[WorkerState]:
        return [WorkerState("worker", "both", "", 0, self.ready, None, None)]

    def on_done(self, notice: Callable[[Sequence[str]], None]) -> None:
        self._notices.append(notice)

    def on_drawn(self, notice: Callable[[Sequence[Drawn]], None]) -> None:
        self._drawn_notices.append(notice)

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # What a test does

    def hold(self, *kinds: str) -> None:
        """Leave jobs of these kinds alone until `release`."""
        self._held.update(kinds)

    def release(self) -> None:
        self._held.clear()
        self.loop.call_soon_threadsafe(self._work.set)

    def draw(self, *drawn: Drawn) -> None:
        """Tell tokens of a sample that is held, as they would be drawn."""
        for notice in self._drawn_notices:
            self.loop.call_soon_threadsafe(notice, drawn)

    # The loop

    async def _run(self) -> None:
        waiting: list[Job] = []
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                for base_model in self._base_models:
                    waiting += await asyncio.to_thread(self._claim, base_model)
                ready = [job for job in waiting if job.kind not in self._held]
                done = await asyncio.to_thread(self._execute, ready) if ready else []
            except StoreUnavailableError:  # a real worker would not die of it either
                await asyncio.sleep(0.05)
                self._work.set()
                continue
            waiting = [job for job in waiting if job not in ready]
            if not self.is_silent:
                for notice in self._notices:
                    notice(done)

    def _claim(self, base_model: str) -> Sequence[Job]:
        return self._store.jobs.claim(base_model, "stand-in", train=1000, sample=1000)

    def _execute(self, jobs: Sequence[Job]) -> list[str]:
        cancelled = {job for name in self._base_models for job in self._store.jobs.cancel_asked(name, "stand-in")}
        outcomes = {job.request_id: self._outcome(job, job.request_id in cancelled) for job in jobs}
        return self._store.jobs.complete("stand-in", outcomes)

    def _outcome(self, job: Job, is_cancelled: bool) -> Outcome:
        if is_cancelled:
            return Failed(error="cancelled", category="user")
        self.executed.append(job)
        try:
            result = getattr(self, f"_{job.kind}")(job)
        except InvalidInputError as error:
            return Failed(error=error.message, category="user")
        if isinstance(result, bytes):
            return Done(result=result, content_type=PROTOBUF, shown=self._shown(job, result))
        shown, publishes = self._shown(job, result), self._published(job, result)
        return Done(result=msgspec.json.encode(result), content_type=JSON, shown=shown, publishes=publishes)

    def _published(self, job: Job, result: Any) -> str | None:
        is_inflight = (
            job.kind == "save_weights_for_sampler" and msgspec.json.decode(job.payload).get("kind") == "inflight"
        )
        return result["sampling_session_id"] if is_inflight else None

    def _shown(self, job: Job, result: Any) -> Shown | None:
        match job.kind:
            case "forward_backward":
                return TrainedOn(loss=2.0 * job.size, weight=job.size, tokens=job.size)
            case "optim_step":
                return Stepped(metrics=result["metrics"])
            case "sample":
                response = proto.decode_sample_response(result)
                return Sampled(
                    owner=job.owner,
                    base_model=job.base_model,
                    prompt=json.decode(SampleJob, job.payload).prompt.to_ints(),
                    completions=[
                        ShownCompletion(tokens=[*one.tokens], stop_reason=one.stop_reason) for one in response.sequences
                    ],
                )
            case _:
                return None

    # The jobs

    def _create_model(self, job: Job) -> Any:
        self._policies[_model(job)] = Policy()
        return {"model_id": job.model_id, "type": "create_model"}

    def _unload_model(self, job: Job) -> Any:
        return {**msgspec.json.decode(job.payload), "type": "unload_model"}

    def _forward_backward(self, job: Job) -> Any:
        message = pb.ForwardBackwardRequest()
        message.ParseFromString(job.payload)
        asked = codec.loss_request_from_message(message)
        policy = self._policies[_model(job)]
        output, gradient = run_loss(policy, asked.examples, asked.loss, asked.config, job.seq_id)
        if not asked.forward_only:
            self._policies[_model(job)] = policy.plus_gradient(gradient)
        return codec.loss_output_message(output)

    def _optim_step(self, job: Job) -> Any:
        gradient = self._policies[_model(job)].gradient
        policy = self._policies[_model(job)] = self._policies[_model(job)].stepped()
        return {"metrics": {"grad_norm": abs(gradient), "moment": policy.moment, "step": policy.steps}}

    def _save_weights(self, job: Job) -> Any:
        return {"path": self._save(job, "weights"), "type": "save_weights"}

    def _save_weights_external(self, job: Job) -> Any:
        path = self._save(job, "external_weights")
        return {"path": path, "size_bytes": self._folders.size_bytes(path), "type": "save_weights_external"}

    def _save_weights_for_sampler(self, job: Job) -> Any:
        asked = msgspec.json.decode(job.payload)
        if asked.get("path") is not None:
            return {"path": self._save(job, "sampler_weights"), "type": "save_weights_for_sampler"}
        sampler = self._store.samplers.create(
            NewSampler(
                session_id=job.session_id,
                sampling_session_seq_id=asked["sampling_session_seq_id"],
                owner=job.owner,
                base_model=job.base_model,
                model_id=job.model_id,
                model_seq_id=job.seq_id,
            )
        )
        self._policies[sampler.sampler_id] = self._policies[_model(job)]
        return {"sampling_session_id": sampler.sampler_id, "type": "save_weights_for_sampler"}

    def _save(self, job: Job, kind: CheckpointKind) -> str:
        asked = msgspec.json.decode(job.payload)
        key = CheckpointKey(run_id=_model(job), kind=kind, name=asked["path"])
        model = self._store.models.get(_model(job), job.owner)
        assert model is not None
        ttl = asked.get("ttl_seconds")

        def enter(size: int) -> None:
            self._store.checkpoints.save(
                NewCheckpoint(
                    key=key,
                    owner=job.owner,
                    base_model=job.base_model,
                    lora=model.lora,
                    optimizer_config=model.optimizer_config,
                    size_bytes=size,
                    request_id=job.request_id,
                    user_metadata=asked.get("user_metadata"),
                    expires=None if ttl is None else datetime.now(UTC) + timedelta(seconds=ttl),
                ),
                overwrite=asked.get("overwrite", False),
                most_bytes=self._max_checkpoint_bytes,
            )

        with self._folders.writing(key.tinker_path, enter) as folder:
            for name, content in FILES.items():
                (folder / name).write_bytes(content)
            policy = self._policies[_model(job)]
            (folder / "policy.json").write_bytes(msgspec.json.encode([policy.steps, policy.moment]))
        return key.tinker_path

    def _load_weights(self, job: Job) -> Any:
        asked = msgspec.json.decode(job.payload)
        policy = self._saved_policy(asked["path"])
        self._policies[_model(job)] = policy if asked["optimizer"] else policy.without_optimizer()
        return {"path": asked["path"], "model_id": job.model_id, "type": "load_weights"}

    def _saved_policy(self, path: str) -> Policy:
        steps, moment = msgspec.json.decode(self._folders.files(path)["policy.json"].read_bytes())
        return Policy(steps, 0.0, moment)

    def _sample(self, job: Job) -> Any:
        asked = msgspec.json.decode(job.payload)
        options = codec.sample_options(asked)
        return codec.sampled_message(sample(self._sampler_policy(job), codec.prompt_tokens(asked["prompt"]), options))

    def _sampler_policy(self, job: Job) -> Policy:
        assert job.sampler_id is not None
        if job.sampler_id in self._policies:
            return self._policies[job.sampler_id]
        sampler = self._store.samplers.get(job.sampler_id, job.owner)
        assert sampler is not None
        return Policy() if sampler.model_path is None else self._saved_policy(sampler.model_path)


def _model(job: Job) -> str:
    assert job.model_id is not None
    return job.model_id
