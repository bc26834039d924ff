"""The worker of one base model: claims jobs, runs them, writes down what became of them.

Training and sampling share the engine by time: whoever has had less of it lately is next, a batch or a step at a time.

A worker may die at any moment: what it had claimed and not completed is put back into the queue by its successor.
Jobs that kill their worker are dealt with in `suspects.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from tinsmith.errors import InvalidInputError
from tinsmith.server.bell import Bell
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.checks import check_sampler
from tinsmith.server.engine.adapters import Adapter
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.generate import SampleDone, SampleWork
from tinsmith.server.engine.stopping import Decode
from tinsmith.server.memory import give_back_memory
from tinsmith.server.messages import WorkerSettings
from tinsmith.server.sampling_weights import SamplingWeights
from tinsmith.server.schedule import Served, TrainingJob, schedule
from tinsmith.server.spilled import SpilledWeights
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.records import Cancelled, CheckpointKey, Done, Failed, Job, Outcome, Sampler
from tinsmith.server.suspects import epitaph, max_attempts, together
from tinsmith.server.trainer import PROTOBUF, Trainer, server_failure
from tinsmith.server.watchdog import Watchdog
from tinsmith.types import SampleRequest
from tinsmith.wire import json, proto

LOOK_AGAIN_SECONDS = 1.0
MAX_CLAIMED_TRAINING = 64
MAX_CLAIMED_SAMPLES = 256
REMEMBERED = 0.9
"""What was served counts less with every later turn: a long night alone must not cost the whole next day."""
NEGLIGIBLE = 1e-6


class Worker:
    """Hears of new jobs by `bell`, and lets those who wait know what is done by `tell_done`.

    `forgiven` are the jobs that the worker before this one had begun and could not end, through no fault of theirs.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        store: Store,
        engine: Engine,
        bell: Bell,
        tell_done: Callable[[Sequence[str]], None],
        forgiven: Collection[str] = (),
    ) -> None:
        self._name = f"worker-{uuid4().hex[:12]}"
        self._base_model = settings.base_model
        self._last_status = settings.last_status
        self._store = store
        self._engine = engine
        self._bell = bell
        self._tell_done = tell_done
        state = Path(settings.state)
        folders = CheckpointFolders(state / "checkpoints")
        self._weights = SamplingWeights(engine, folders, SpilledWeights(state / "samplers"))
        snapshots = CheckpointFolders(state / "snapshots")
        self._trainer = Trainer(engine, store, folders, snapshots, self._weights, settings.base_model)
        self._decode = tokenizer_decode(Path(settings.folder))
        self._training: dict[str, Job] = {}
        self._to_sample: dict[str, Job] = {}
        self._sampling: dict[str, Job] = {}
        self._by_owner: dict[str, float] = {}
        self._by_model: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._begun = set(forgiven)
        self._may_claim = True
        self._watchdog = Watchdog(settings.stall_seconds)
        engine.on_progress = self._watchdog.beat

    def run(self) -> None:
        """Works until the bell is gone, and then ends after the step in progress."""
        if not self._bell.rang() and self._bell.is_closed:
            return
        self._recover()
        look_again = 0.0
        while not self._bell.is_closed:
            now = time.monotonic()
            if self._bell.rang() or self._may_claim or now >= look_again:
                self._may_claim, look_again = False, now + LOOK_AGAIN_SECONDS
                self._look()
            if not self._step() and not self._may_claim:
                self._watchdog.rest()
                self._may_claim = self._bell.rang(within_seconds=LOOK_AGAIN_SECONDS)
                if not self._may_claim:
                    give_back_memory()
        self._watchdog.rest()
        self._store.jobs.release(self._base_model, self._name, begun=self._begun)
        self._trainer.live.put_away_all()

    def abandon(self) -> Collection[str]:
        """Leaves the engine as if it had never worked for this one, whose successor will find its jobs in the store.

        Gives back those whose last try does not count.
        """
        self._watchdog.rest()
        for request_id in self._sampling:
            self._engine.generator.cancel(request_id)
        return self._begun

    def _recover(self) -> None:
        """Done at the start alone: a worker that ends late would put back what its successor is working on."""
        status = self._last_status
        over = self._store.jobs.requeue(
            self._base_model, max_attempts=max_attempts(status), error=epitaph(status), forgiven=self._begun
        )
        self._begun.clear()
        self._tell_done(over)

    def _look(self) -> None:
        """Takes new jobs from the store, and drops what nobody wants any more."""
        claimed = self._store.jobs.claim(
            self._base_model,
            self._name,
            train=MAX_CLAIMED_TRAINING - len(self._training),
            sample=MAX_CLAIMED_SAMPLES - len(self._sampling) - len(self._to_sample),
        )
        for job in claimed:
            (self._training if job.lane == "train" else self._to_sample)[job.request_id] = job
        if self._sampling or self._to_sample:
            self._drop_unwanted()
            self._admit()
        self._trainer.live.put_away_idle()

    def _step(self) -> bool:
        """One training batch or one sampling step, whichever had less time; False if there is nothing to do."""
        train, sample = bool(self._training), self._engine.generator.has_work()
        if not train and not sample:
            return False
        self._watchdog.beat()
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
            for job in together(self._training.values())
        ]
        batch = schedule(waiting, Served(self._by_owner, self._by_model), self._engine.train_token_budget)
        jobs = [self._training.pop(job.request_id) for job in batch]
        note_served(self._by_owner, [(job.owner, job.size) for job in jobs])
        note_served(self._by_model, [(job.model_id or "", job.size) for job in jobs])
        self._begin(jobs)
        started = time.perf_counter()
        accepted = self._complete(self._trainer.run(jobs))
        self._trainer.live.finished(jobs, accepted, time.perf_counter() - started)
        self._may_claim = True  # the next jobs of these models

    # Sampling

    def _admit(self) -> None:
        while admitted := together(self._to_sample.values(), self._sampling.values()):
            self._begin(admitted)
            for job in admitted:
                self._begin_sample(self._to_sample.pop(job.request_id))

    def _begin_sample(self, job: Job) -> None:
        try:
            work = self._work(job)
        except InvalidInputError as error:
            self._complete({job.request_id: Failed(error=error.message, category="user")})
        except StoreUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - our fault, and of this job alone
            self._complete({job.request_id: server_failure(job, error, self._engine)})
        else:
            self._sampling[job.request_id] = job
            self._engine.generator.add(work)

    def _work(self, job: Job) -> SampleWork:
        request = json.decode(SampleRequest, job.payload)
        sampler = self._store.samplers.get(job.sampler_id or "", job.owner)
        if sampler is None:
            raise InvalidInputError(f"There is no sampler {job.sampler_id!r}.", field="sampling_session_id")
        check_sampler(sampler)
        if sampler.sampler_id not in self._weights:
            self._check_source(sampler)
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

    def _check_source(self, sampler: Sampler) -> None:
        """A sampler stands for the weights it was made from, not for what was saved under their name later."""
        if sampler.model_path is None or sampler.saved_by is None:
            return
        checkpoint = self._store.checkpoints.get(CheckpointKey.of(sampler.model_path), sampler.owner)
        if checkpoint is not None and checkpoint.request_id != sampler.saved_by:
            raise InvalidInputError(
                f"{sampler.model_path} was overwritten after this sampling client was made; make a new one.",
                field="sampling_session_id",
            )

    def _rebuilt(self, sampler: Sampler) -> Adapter:
        model = self._store.models.get(sampler.model_id or "", sampler.owner)
        if model is None or sampler.model_seq_id is None:
            raise InvalidInputError("The model this sampler was copied from is gone.", field="sampling_session_id")
        try:
            return self._trainer.live.rebuilt(model, before_seq=sampler.model_seq_id)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"The weights of this sampler are lost with {model.model_id}: {error.message.rstrip('.')}. Make a new "
                "sampling client from a checkpoint.",
                field="sampling_session_id",
            ) from error

    def _sample(self) -> None:
        try:
            done = self._engine.generator.step()
        except Exception as error:  # noqa: BLE001 - the step failed as a whole, so nobody in it can go on
            self._fail_all_samples(error)
            return
        if done:
            self._complete({str(each.key): self._sample_outcome(each) for each in done})
            self._may_claim = True  # there is room for more

    def _sample_outcome(self, done: SampleDone) -> Outcome:
        job = self._sampling.pop(str(done.key), None)
        if done.response is not None:
            return Done(result=proto.encode_sample_response(done.response), content_type=PROTOBUF)
        assert done.error is not None
        if isinstance(done.error, InvalidInputError):
            return Failed(error=done.error.message, category="user")
        assert job is not None
        return server_failure(job, done.error, self._engine)

    def _fail_all_samples(self, error: Exception) -> None:
        outcomes: dict[str, Outcome] = {}
        for request_id, job in self._sampling.items():
            self._engine.generator.cancel(request_id)
            outcomes[request_id] = server_failure(job, error, self._engine)
        self._sampling.clear()
        self._complete(outcomes)
        self._may_claim = True

    def _drop_unwanted(self) -> None:
        asked = self._store.jobs.cancel_asked(self._base_model, self._name)
        unwanted = [request_id for request_id in asked if request_id in self._sampling or request_id in self._to_sample]
        for request_id in unwanted:
            if self._to_sample.pop(request_id, None) is None:
                self._engine.generator.cancel(request_id)
                del self._sampling[request_id]
        if unwanted:
            self._complete(dict.fromkeys(unwanted, Cancelled()))

    # Both

    def _begin(self, jobs: Sequence[Job]) -> None:
        request_ids = [job.request_id for job in jobs]
        self._store.jobs.begin(self._name, request_ids)
        self._begun.update(request_ids)

    def _complete(self, outcomes: dict[str, Outcome]) -> list[str]:
        accepted = self._store.jobs.complete(self._name, outcomes)
        self._begun.difference_update(outcomes)
        self._tell_done(accepted)
        return accepted


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
