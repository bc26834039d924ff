"""The worker of one base model: claims jobs, runs them, writes down what became of them.

Training and sampling share the engine by time: whoever has had less of it lately is next, a batch or a step at a time.

A worker may die at any moment: what it had claimed and not completed is put back into the queue by its successor.
Jobs that kill their worker are dealt with in `suspects.py`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from tinsmith.errors import InvalidInputError
from tinsmith.server import audit
from tinsmith.server.bell import Bell
from tinsmith.server.checks import check_sampler
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.generate import SampleDone
from tinsmith.server.engine.running import SampleWork
from tinsmith.server.engine.stopping import Decode
from tinsmith.server.full_disk import WaitError, WaitingForRoom, is_full
from tinsmith.server.memory import give_back_memory
from tinsmith.server.messages import Drawn, Replay, SampleJob, WorkerSettings
from tinsmith.server.recovery import put_back
from tinsmith.server.sampling_weights import SamplingWeights
from tinsmith.server.schedule import Served, TrainingJob, note_begun, note_served, note_spent, schedule
from tinsmith.server.shown import ShownSamples
from tinsmith.server.storage import open_storage
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.jobs import PLACE_END
from tinsmith.server.store.records import Cancelled, Done, Job, Outcome
from tinsmith.server.suspects import together
from tinsmith.server.token_news import TokenNews
from tinsmith.server.trainer import PROTOBUF, Trainer, refused, server_failure
from tinsmith.server.watchdog import Watchdog
from tinsmith.server.weights_exchange import PublishedWeights, ReceivedWeights
from tinsmith.server.weights_sources import OwnWeights, SentWeights, WeightsSource, check_source, publish_wanted
from tinsmith.server.worker_metrics import WorkerMetrics
from tinsmith.types import SamplingParams
from tinsmith.wire import json, proto

T = TypeVar("T")

LOOK_AGAIN_SECONDS = 1.0
MAX_CLAIMED_TRAINING = 64
MAX_CLAIMED_SAMPLES = 256
MAX_CLAIMED_SAMPLES_ON_GPU = 1024
"""Twice as many as it decodes at once, so that there is always somebody to take the place of those that end. A request
may ask for many of them, and no other worker can draw what this one has taken."""
MOST_OF_OWNER = 3 / 4
"""Of the samples that it takes, so that another's need not wait until one of them ends."""
MAX_CLAIMED_BYTES = 256 * 2**20
"""Of the payloads of each kind together; decoded they may be several times as large."""


class Worker:
    """Hears of new jobs by `bell`, and lets those who wait know what is done by `tell_done`, and what is done again.

    `tell_no_room` hears which models and samplers wait for room on the disk, or for the storage of their files, and
    `tell_held_up` that all work waits for room.
    `tell_drawn` hears tokens as they are drawn, where that was asked for.

    A worker that only trains sends the weights of samplers to others, as `published`; one that only samples has them
    from there, as `received`.

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
        tell_replay: Callable[[Replay], None] = lambda replay: None,
        tell_no_room: Callable[[Mapping[str, str]], None] = lambda reasons: None,
        tell_held_up: Callable[[Exception], None] = lambda error: None,
        metrics: WorkerMetrics | None = None,
        tell_drawn: Callable[[Sequence[Drawn]], None] = lambda drawn: None,
        published: PublishedWeights | None = None,
        received: ReceivedWeights | None = None,
    ) -> None:
        name = f"worker-{uuid4().hex[:12]}"
        self._place = settings.place
        self._name = f"{settings.place}{PLACE_END}{name}" if settings.place else name
        self._trains, self._samples = settings.role != "sample", settings.role != "train"
        self._replica = settings.place if settings.role == "sample" else ""
        self._base_model = settings.base_model
        self._last_status = settings.last_status
        self._store = store
        self._engine = engine
        self._max_samples = MAX_CLAIMED_SAMPLES_ON_GPU if engine.model.device.type == "cuda" else MAX_CLAIMED_SAMPLES
        self._bell = bell
        self._tell_done = tell_done
        state = Path(settings.state)
        storage = open_storage(state, settings.storage, settings.cache_bytes, store)
        folders, snapshots = storage.checkpoints, storage.snapshots
        self._published = published
        copies = SamplingWeights(
            engine,
            folders,
            storage.spilled,
            on_copy=published.publish if published else None,
            check_source=partial(check_source, store),
        )
        self._metrics = metrics or WorkerMetrics()
        self._tell_replay = tell_replay
        self._tell_held_up = tell_held_up
        self._no_room = WaitingForRoom(state, tell_no_room)
        self._trainer = Trainer(engine, store, folders, snapshots, copies, settings, self._note_replay)
        self._trainer.live.metrics = self._metrics
        self._own_weights = OwnWeights(store, copies, self._trainer.live)
        self._weights: WeightsSource = self._own_weights
        if received is not None:
            self._weights = SentWeights(engine, store, copies, storage.spilled, received)
        self._decode = tokenizer_decode(Path(settings.folder))
        self._training: dict[str, Job] = {}
        self._to_sample: dict[str, Job] = {}
        self._sampling: dict[str, Job] = {}
        self._shown_samples = ShownSamples()
        self._token_news = TokenNews(engine.generator, tell_drawn)
        self._by_owner: dict[str, float] = {}
        self._by_model: dict[str, float] = {}
        self._to_finish: dict[str, int] = {}
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
            now, rang = time.monotonic(), self._bell.rang()
            if self._bell.is_closed:  # whoever comes after us may be at work already
                break
            if rang or self._may_claim or now >= look_again:
                self._may_claim, look_again = False, now + LOOK_AGAIN_SECONDS
                self._look()
            if not self._step() and not self._may_claim:
                self._watchdog.rest()
                self._may_claim = self._bell.rang(within_seconds=LOOK_AGAIN_SECONDS)
                if not self._may_claim:
                    give_back_memory()
            self._tell_figures()
        self._watchdog.rest()
        self._store.jobs.release(self._base_model, self._name, begun=self._begun)
        self._trainer.live.put_away_all()

    def _tell_figures(self) -> None:
        if self._metrics.is_due:
            self._metrics.look(len(self._trainer.live), self._engine.usage())
            self._metrics.tell()

    def _note_replay(self, replay: Replay) -> None:
        self._metrics.replaying(replay.replayed < replay.total)
        self._tell_replay(replay)

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
        self._store.jobs.take_post(self._base_model, self._place)
        recovered = put_back(self._store, self._base_model, self._last_status, place=self._place, forgiven=self._begun)
        self._begun.clear()
        self._tell_done(recovered.over)
        self._metrics.gave_up(recovered.num_given_up)

    def _look(self) -> None:
        """Takes new jobs from the store, and drops what nobody wants any more."""
        if self._published is not None:
            publish_wanted(self._published, self._own_weights, self._store, self._engine)
        held = _num_samples(self._to_sample, self._sampling)
        most = math.ceil(MOST_OF_OWNER * self._max_samples)
        claim = partial(
            self._store.jobs.claim,
            self._base_model,
            self._name,
            train=self._trains * (MAX_CLAIMED_TRAINING - len(self._training)),
            # A request may ask for more than there is room for; the part of other owners is theirs all the same.
            sample=self._samples * max(0, self._max_samples - sum(min(count, most) for count in held.values())),
            sample_of_owner=most,
            held=held,
            train_bytes=MAX_CLAIMED_BYTES - _payload_bytes(self._training),
            sample_bytes=MAX_CLAIMED_BYTES - _payload_bytes(self._to_sample) - _payload_bytes(self._sampling),
            without=self._no_room.look(),
            replica=self._replica,
        )
        claimed = self._written(claim)
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
            kind, operation = "training", self._train()
        else:
            kind, operation = "sampling", "sample"
            self._sample()
        seconds = time.perf_counter() - started
        note_spent(self._spent, kind, seconds)
        self._metrics.worked(operation, seconds)
        return True

    # Training

    def _train(self) -> str:
        """Gives back the kind of the operations that were done."""
        waiting = [
            TrainingJob(
                job.request_id, job.kind, job.owner, job.model_id or "", job.seq_id, job.size, job.created.timestamp()
            )
            for job in together(self._training.values())
        ]
        served = Served(self._by_owner, self._by_model, self._to_finish)
        batch = schedule(waiting, served, self._engine.batch_token_budget)
        jobs = self._trainer.live.that_fit([self._training[job.request_id] for job in batch])
        self._begin(jobs)
        started = time.perf_counter()
        try:
            outcomes = self._trainer.run(jobs)
        except WaitError as error:
            self._wait_for_room(jobs, error)
            return jobs[0].kind
        for job in jobs:
            del self._training[job.request_id]
        note_served(self._by_owner, [(job.owner, job.size) for job in jobs])
        note_served(self._by_model, [(job.model_id or "", job.size) for job in jobs])
        ran = {job.request_id for job in jobs}
        note_begun(self._to_finish, [job for job in batch if job.request_id in ran])
        accepted = self._complete(outcomes, jobs)
        self._trainer.finished(jobs, accepted, time.perf_counter() - started)
        self._may_claim = True  # the next jobs of these models
        return jobs[0].kind

    def _wait_for_room(self, jobs: Sequence[Job], error: WaitError) -> None:
        """Puts back all jobs of those models that cannot go on: where there is none in memory yet, those; or else all.

        The others of the batch were begun for nothing, and stay.
        """
        models = {job.model_id or "" for job in jobs}
        stopped = {model_id for model_id in models if model_id not in self._trainer.live} or models
        self._put_back(jobs, [key for key, job in self._training.items() if job.model_id in stopped])
        self._training = {key: job for key, job in self._training.items() if job.model_id not in stopped}
        self._no_room.add(stopped, error)

    def _put_back(self, begun: Sequence[Job], claimed: Collection[str]) -> None:
        """What was claimed waits again in its place, and what was begun counts as not tried."""
        tried = [job.request_id for job in begun]
        release = partial(self._store.jobs.release, self._base_model, self._name, tried, claimed)
        self._tell_done(self._written(release))
        self._begun.difference_update(tried)

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
            self._complete({job.request_id: refused(job, error)})
        except WaitError as error:
            self._put_back([job], [job.request_id])
            self._no_room.add([job.sampler_id or ""], error)
        except StoreUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - our fault, and of this job alone
            self._complete({job.request_id: server_failure(job, error, self._engine)})
        else:
            self._sampling[job.request_id] = job
            self._token_news.begin(job.request_id, work)
            self._engine.generator.add(work)

    def _work(self, job: Job) -> SampleWork:
        request = json.decode(SampleJob, job.payload)
        sampler = self._store.samplers.get(job.sampler_id or "", job.owner)
        if sampler is None:
            raise InvalidInputError(f"There is no sampler {job.sampler_id!r}.", field="sampling_session_id")
        check_sampler(sampler)
        return SampleWork(
            key=job.request_id,
            prompt=request.prompt.to_ints(),
            params=seeded(request.sampling_params, job.request_id),
            num_samples=request.num_samples,
            adapter=self._weights.of(sampler, job.request_id),
            prompt_logprobs=bool(request.prompt_logprobs),
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            topk_sample_logprobs=request.topk_sample_logprobs,
            target_prompt_logprobs=request.target_prompt_logprobs,
            prompt_alt_tokens_k=request.prompt_alt_tokens_k,
            prompt_logprobs_last_n=request.prompt_logprobs_last_n,
            decode=self._decode,
            end_tokens=request.end_tokens,
            is_streamed=request.is_streamed,
            owner=job.owner,
        )

    def _sample(self) -> None:
        try:
            done = self._engine.generator.step()
        except Exception as error:  # noqa: BLE001 - the step failed as a whole, so nobody in it can go on
            self._fail_all_samples(error)
            return
        self._token_news.look()
        if done:
            self._complete({str(each.key): self._sample_outcome(each) for each in done})
            self._may_claim = True  # there is room for more

    def _sample_outcome(self, done: SampleDone) -> Outcome:
        job = self._sampling.pop(str(done.key), None)
        if done.response is not None:
            shown = self._shown_samples.of(job, done.response) if job else None
            return Done(result=proto.encode_sample_response(done.response), content_type=PROTOBUF, shown=shown)
        assert done.error is not None
        assert job is not None
        if isinstance(done.error, InvalidInputError):
            return refused(job, done.error)
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

    def _written(self, write: Callable[[], T]) -> T:
        """As soon as there is room for it: what is in memory would have to be built again, and to be written then."""
        while True:
            try:
                return write()
            except StoreUnavailableError as error:
                if not is_full(error) or self._bell.is_closed:
                    raise
                self._tell_held_up(error)
            self._watchdog.rest()
            time.sleep(LOOK_AGAIN_SECONDS)
            self._may_claim |= self._bell.rang()

    def _begin(self, jobs: Sequence[Job]) -> None:
        request_ids = [job.request_id for job in jobs]
        self._written(partial(self._store.jobs.begin, self._name, request_ids))
        self._metrics.begun(jobs)
        self._begun.update(request_ids)

    def _complete(self, outcomes: dict[str, Outcome], training: Sequence[Job] = ()) -> list[str]:
        """What became of training jobs, or of samples."""
        events = {job.request_id: audit.finished(job, outcomes[job.request_id]) for job in training}
        kept = {request_id: event for request_id, event in events.items() if event is not None}
        accepted = self._written(partial(self._store.jobs.complete, self._name, outcomes, kept))
        kinds = {job.request_id: job.kind for job in training}
        for request_id, outcome in outcomes.items():
            self._metrics.finished(kinds.get(request_id, "sample"), outcome)
        self._begun.difference_update(outcomes)
        self._token_news.end(outcomes)
        self._tell_done(accepted)
        return accepted


def _num_samples(*held: Mapping[str, Job]) -> Counter[str]:
    """By owner."""
    counts: Counter[str] = Counter()
    for jobs in held:
        for job in jobs.values():
            counts[job.owner] += job.samples
    return counts


def _payload_bytes(jobs: Mapping[str, Job]) -> int:
    return sum(len(job.payload) for job in jobs.values())


def seeded(params: SamplingParams, request_id: str) -> SamplingParams:
    """With a seed of its own if the client gave none, so that a sample that is drawn again comes out the same.

    A request's id holds the random id of its session: nobody else has it, and no two requests have the same.
    """
    if params.seed is not None:
        return params
    drawn = blake2b(request_id.encode(), digest_size=8).digest()
    return params.model_copy(update={"seed": int.from_bytes(drawn, "big", signed=True)})


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
