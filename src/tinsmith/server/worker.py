"""The worker process of one base model: claims jobs, runs them, writes down what became of them.

It is started by the API process (`supervise.py`), which writes one line of settings to its standard input and then one
byte whenever there is work; when that input ends, the parent is gone and the worker ends too. What it has to say goes
to standard output, a line of JSON each: `{"ready": true}` and `{"done": [request_id, ...]}`. Messages only save time:
both sides look at the store every second.

Training and sampling share the engine by time: whoever has had less of it lately is next, a batch or a step at a time.

A worker may die at any moment: what it had claimed and not completed is put back into the queue by its successor.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.engine.adapters import Adapter
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.generate import SampleDone, SampleWork
from tinsmith.server.engine.stopping import Decode
from tinsmith.server.sampling_weights import SamplingWeights
from tinsmith.server.schedule import Served, TrainingJob, schedule
from tinsmith.server.store import Store
from tinsmith.server.store.records import Cancelled, Done, Failed, Job, Outcome, Sampler
from tinsmith.server.trainer import PROTOBUF, Trainer, server_failure
from tinsmith.types import SampleRequest
from tinsmith.wire import json, proto

log = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 1.0
MAX_CLAIMED_TRAINING = 64
MAX_CLAIMED_SAMPLES = 256
REMEMBERED = 0.9
"""What was served counts less with every later turn: a long night alone must not cost the whole next day."""
NEGLIGIBLE = 1e-6


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    base_model: str
    folder: str
    database: str
    state: str
    device: str = "auto"
    dtype: str = "auto"
    kv_tokens: int | None = None
    train_token_budget: int | None = None


class Worker:
    def __init__(self, settings: WorkerSettings, store: Store, engine: Engine) -> None:
        self._name = f"worker-{uuid4().hex[:12]}"
        self._base_model = settings.base_model
        self._store = store
        self._engine = engine
        state = Path(settings.state)
        folders = CheckpointFolders(state / "checkpoints")
        self._weights = SamplingWeights(engine, folders, state / "samplers")
        self._trainer = Trainer(engine, store, folders, self._weights, settings.base_model)
        self._decode = tokenizer_decode(Path(settings.folder))
        self._training: dict[str, Job] = {}
        self._sampling: dict[str, Job] = {}
        self._by_owner: dict[str, float] = {}
        self._by_model: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._wake_up = threading.Event()
        self._stopping = False

    def wake(self) -> None:
        self._wake_up.set()

    def stop(self) -> None:
        """Ends the loop after the step in progress; the next worker takes over what was claimed."""
        self._stopping = True
        self._wake_up.set()

    def run(self) -> None:
        # Done at the start alone: a worker that ends late would put back what its successor is working on.
        self._store.jobs.requeue(self._base_model)
        looked_at = 0.0
        while not self._stopping:
            if self._wake_up.is_set() or time.monotonic() - looked_at >= LOOK_AGAIN_SECONDS:
                self._wake_up.clear()
                looked_at = time.monotonic()
                self._look()
            if not self._step():
                self._wake_up.wait(LOOK_AGAIN_SECONDS)

    def _look(self) -> None:
        """Takes new jobs from the store, and drops the samples nobody wants any more."""
        room = MAX_CLAIMED_TRAINING - len(self._training)
        if room > 0:
            for job in self._store.jobs.claim(self._base_model, self._name, "train", room):
                self._training[job.request_id] = job
        room = MAX_CLAIMED_SAMPLES - len(self._sampling)
        if room > 0:
            for job in self._store.jobs.claim(self._base_model, self._name, "sample", room):
                self._admit(job)
        if self._sampling:
            self._drop_unwanted()

    def _step(self) -> bool:
        """One training batch or one sampling step, whichever had less time; False if there is nothing to do."""
        train, sample = bool(self._training), self._engine.generator.has_work()
        if not train and not sample:
            return False
        started = time.perf_counter()
        if train and (not sample or self._spent.get("training", 0.0) <= self._spent.get("sampling", 0.0)):
            kind = "training"
            self._train()
        else:
            kind = "sampling"
            self._sample()
        note_served(self._spent, [(kind, time.perf_counter() - started)])
        return True

    # Training

    def _train(self) -> None:
        waiting = [
            TrainingJob(
                job.request_id, job.kind, job.owner, job.model_id or "", job.seq_id, job.size, job.created.timestamp()
            )
            for job in self._training.values()
        ]
        batch = schedule(waiting, Served(self._by_owner, self._by_model), self._engine.train_token_budget)
        jobs = [self._training.pop(job.request_id) for job in batch]
        note_served(self._by_owner, [(job.owner, job.size) for job in jobs])
        note_served(self._by_model, [(job.model_id or "", job.size) for job in jobs])
        self._complete(self._trainer.run(jobs))
        self._wake_up.set()  # the next jobs of these models may be claimed now

    # Sampling

    def _admit(self, job: Job) -> None:
        try:
            work = self._work(job)
        except InvalidInputError as error:
            self._complete({job.request_id: Failed(error=error.message, category="user")})
        except Exception as error:  # noqa: BLE001 - our fault, and of this job alone
            self._complete({job.request_id: server_failure(job, error)})
        else:
            self._sampling[job.request_id] = job
            self._engine.generator.add(work)

    def _work(self, job: Job) -> SampleWork:
        request = json.decode(SampleRequest, job.payload)
        sampler = self._store.samplers.get(job.sampler_id or "", job.owner)
        if sampler is None:
            raise InvalidInputError(f"There is no sampler {job.sampler_id!r}.", field="sampling_session_id")
        return SampleWork(
            key=job.request_id,
            prompt=request.prompt.to_ints(),
            params=request.sampling_params,
            num_samples=request.num_samples,
            adapter=self._weights.get(sampler, self._rebuilt),
            prompt_logprobs=bool(request.prompt_logprobs),
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            topk_sample_logprobs=request.topk_sample_logprobs,
            target_prompt_logprobs=request.target_prompt_logprobs,
            prompt_alt_tokens_k=request.prompt_alt_tokens_k,
            prompt_logprobs_last_n=request.prompt_logprobs_last_n,
            decode=self._decode,
        )

    def _rebuilt(self, sampler: Sampler) -> Adapter:
        model = self._store.models.get(sampler.model_id or "", sampler.owner)
        if model is None or sampler.model_seq_id is None:
            raise InvalidInputError("The model this sampler was copied from is gone.", field="sampling_session_id")
        return self._trainer.rebuilt(model, before_seq=sampler.model_seq_id)

    def _sample(self) -> None:
        try:
            done = self._engine.generator.step()
        except Exception as error:  # noqa: BLE001 - the step failed as a whole, so nobody in it can go on
            self._fail_all_samples(error)
            return
        if done:
            self._complete({str(each.key): self._sample_outcome(each) for each in done})
            self._wake_up.set()  # there is room for more

    def _sample_outcome(self, done: SampleDone) -> Outcome:
        job = self._sampling.pop(str(done.key), None)
        if done.response is not None:
            return Done(result=proto.encode_sample_response(done.response), content_type=PROTOBUF)
        assert done.error is not None
        if isinstance(done.error, InvalidInputError):
            return Failed(error=done.error.message, category="user")
        assert job is not None
        return server_failure(job, done.error)

    def _fail_all_samples(self, error: Exception) -> None:
        outcomes: dict[str, Outcome] = {}
        for request_id, job in self._sampling.items():
            self._engine.generator.cancel(request_id)
            outcomes[request_id] = server_failure(job, error)
        self._sampling.clear()
        self._complete(outcomes)

    def _drop_unwanted(self) -> None:
        asked = self._store.jobs.cancel_asked(self._base_model, self._name)
        unwanted = [request_id for request_id in asked if request_id in self._sampling]
        for request_id in unwanted:
            self._engine.generator.cancel(request_id)
            del self._sampling[request_id]
        if unwanted:
            self._complete(dict.fromkeys(unwanted, Cancelled()))

    # Both

    def _complete(self, outcomes: dict[str, Outcome]) -> None:
        tell({"done": self._store.jobs.complete(self._name, outcomes)})


def note_served(served: dict[str, float], amounts: Iterable[tuple[str, float]]) -> None:
    """Adds to what each name was served lately, after forgetting a little of what it was served before."""
    for name, amount in list(served.items()):
        served[name] = amount * REMEMBERED
        if served[name] < NEGLIGIBLE:
            del served[name]
    for name, amount in amounts:
        served[name] = served.get(name, 0.0) + amount


def tokenizer_decode(folder: Path) -> Decode | None:
    """Tokens to text, for stop texts; None for a model without a tokenizer file."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def decode(tokens: list[int]) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    return decode


def tell(message: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


def _listen(worker: Worker) -> None:
    """Wakes the worker for every byte, and ends it when there will be none any more."""
    while os.read(0, 4096):
        worker.wake()
    worker.stop()


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # both may reach the whole group, and the parent decides
    settings = msgspec.json.decode(_first_line(), type=WorkerSettings)
    engine = Engine.open(
        settings.folder,
        device=settings.device,
        dtype=settings.dtype,
        train_token_budget=settings.train_token_budget,
        kv_tokens=settings.kv_tokens,
    )
    worker = Worker(settings, Store(settings.database), engine)
    threading.Thread(target=_listen, args=(worker,), daemon=True).start()
    tell({"ready": True})
    worker.run()


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("The worker is started by the server; it expects its settings on standard input.")
        line += byte
    return line


if __name__ == "__main__":
    main()
