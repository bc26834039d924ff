"""Where a worker gets the weights of a sampler: from the models it trains, or from whoever trains them."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Protocol

from tinsmith.errors import InvalidInputError
from tinsmith.server.checks import check_sampler
from tinsmith.server.engine import adapter_files
from tinsmith.server.engine.adapters import Adapter, FrozenAdapter
from tinsmith.server.engine.damage import DamagedError
from tinsmith.server.engine.engine import Engine
from tinsmith.server.full_disk import WaitError
from tinsmith.server.live_models import LiveModels
from tinsmith.server.sampling_weights import MAX_IN_MEMORY, SamplingWeights
from tinsmith.server.snapshots import LostError
from tinsmith.server.soundness import check_engine
from tinsmith.server.spilled import Spilled
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.database import utc_now
from tinsmith.server.store.records import CheckpointKey, Model, Sampler
from tinsmith.server.weights_exchange import (
    Answer,
    NotYet,
    Parcel,
    PublishedWeights,
    ReceivedWeights,
    Refusal,
    WeightsWanted,
)

log = logging.getLogger(__name__)

AT_ONCE_SECONDS = 0.1
"""So long others wait while weights are fetched; what takes longer, only the sampler itself waits for."""
ON_THEIR_WAY_SECONDS = 0.01
"""Weights of a new sampler are sent to all replicas; one that the first sample reaches before them waits so long."""
NEW = timedelta(seconds=1)
RETRY_SECONDS = 1.0
MAX_BEGINNINGS = 4096
"""Samples of which a replica remembers when they were to begin."""


class WeightsSource(Protocol):
    def of(self, sampler: Sampler, request_id: str) -> FrozenAdapter | None:
        """For this sample; None for the base model."""


class ComingError(WaitError):
    """The weights are not here yet, and were asked for."""

    promise = "its samples are drawn as soon as they are here"
    is_urgent = True

    def __init__(self, answer: Future[Answer]) -> None:
        super().__init__("the weights of this sampler are on their way from the worker that trains its model")
        self._answer = answer

    @property
    def has_passed(self) -> bool:
        return self._answer.done()


class AwayError(WaitError):
    """The weights are not to be had at the moment."""

    promise = "its samples are drawn when that is over"
    is_urgent = True

    def __init__(self, why: str = "the worker that has the weights of this sampler is being started again") -> None:
        super().__init__(why)
        self._retry_at = time.monotonic() + RETRY_SECONDS

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._retry_at


class OwnWeights(WeightsSource):
    """For the worker that trains the models."""

    def __init__(self, store: Store, weights: SamplingWeights, live: LiveModels) -> None:
        self._store = store
        self._weights = weights
        self._live = live

    def of(self, sampler: Sampler, request_id: str = "") -> FrozenAdapter | None:
        if sampler.model_id is None or sampler.model_seq_id is not None:
            return self._weights.get(self._store.samplers.source(sampler), self._rebuilt)
        model = followed(self._store, sampler)
        seq_id, adapter = self._live.newest(model)
        return self._weights.newest(model.model_id, seq_id, lambda: adapter().frozen_copy())

    def _rebuilt(self, sampler: Sampler) -> Adapter:
        model = self._store.models.get(sampler.model_id or "", sampler.owner)
        if model is None or sampler.model_seq_id is None:
            raise InvalidInputError("The model this sampler was copied from is gone.", field="sampling_session_id")
        try:
            return self._live.rebuilt(model, before_seq=sampler.model_seq_id)
        except InvalidInputError as error:
            raise LostError(
                f"The weights of this sampler are lost with {model.model_id}: {error.message.rstrip('.')}. Make a new "
                "sampling client from a checkpoint.",
                field="sampling_session_id",
            ) from error


def publish_wanted(published: PublishedWeights, own: OwnWeights, store: Store, engine: Engine) -> None:
    """Makes what replicas have asked for. What has to wait for files is asked for again.

    An error of ours is that of the samples that wait, unless the engine is lost with it.
    """
    for wanted in published.wanted():
        try:
            # All that is done is in the weights, since nothing is being done while we are here.
            seq_id = -1 if wanted.model_id is None else store.jobs.first_unfinished(wanted.model_id) - 1
            sampler = store.samplers.get(wanted.sampler_id, wanted.owner)
            if sampler is None:
                raise InvalidInputError(f"There is no sampler {wanted.sampler_id!r}.", field="sampling_session_id")
            check_sampler(sampler)
            frozen = own.of(sampler)
            assert frozen is not None
            published.publish(wanted.name, frozen, seq_id)
        except InvalidInputError as error:
            published.refuse(wanted, Refusal(error.message, is_lost=isinstance(error, LostError)))
        except WaitError as error:
            published.refuse(wanted, NotYet(str(error)))
        except StoreUnavailableError:
            raise
        except Exception as error:
            log.exception("The weights of %s could not be made.", wanted.name)
            check_engine(engine)
            why = f"The server failed to make the weights of this sampler ({type(error).__name__}); see its log."
            published.refuse(wanted, Refusal(why, is_lost=True))


class SentWeights(WeightsSource):
    """For a replica. It keeps what it has used, the most recent."""

    def __init__(
        self, engine: Engine, store: Store, weights: SamplingWeights, spilled: Spilled, received: ReceivedWeights
    ) -> None:
        self._engine = engine
        self._store = store
        self._weights = weights
        self._spilled = spilled
        self._received = received
        self._kept: OrderedDict[str, tuple[int, FrozenAdapter]] = OrderedDict()
        self._coming: OrderedDict[str, Future[Answer]] = OrderedDict()
        """Whoever waits for one may be given up, or go to another replica: then it is not fetched."""
        self._beginnings: OrderedDict[str, tuple[Sampler, WeightsWanted]] = OrderedDict()
        """Of samples that wait: what they wanted when they were to begin. Before it has come, there may be newer."""

    def of(self, sampler: Sampler, request_id: str) -> FrozenAdapter | None:
        if sampler.model_id is None:
            return self._weights.get(sampler, _not_from_a_model)
        if request_id not in self._beginnings:
            source = self._store.samplers.source(sampler)
            self._beginnings[request_id] = source, self._wanted(source)
            _bound(self._beginnings, MAX_BEGINNINGS)
        source, wanted = self._beginnings[request_id]
        kept = self._kept.get(wanted.name)
        if kept is None or kept[0] < wanted.at_least:
            kept = self._kept[wanted.name] = self._fetched(wanted, source)
            _bound(self._kept, MAX_IN_MEMORY)
        self._kept.move_to_end(wanted.name)
        self._beginnings.pop(request_id, None)
        return kept[1]

    def _wanted(self, sampler: Sampler) -> WeightsWanted:
        if sampler.model_seq_id is not None:
            return WeightsWanted(sampler.sampler_id, sampler.owner)
        model = followed(self._store, sampler)
        newest = self._store.jobs.first_unfinished(model.model_id) - 1
        return WeightsWanted(sampler.sampler_id, sampler.owner, model.model_id, newest)

    def _fetched(self, wanted: WeightsWanted, sampler: Sampler) -> tuple[int, FrozenAdapter]:
        answer = self._answer(wanted, ON_THEIR_WAY_SECONDS if _is_new(sampler) else 0.0)
        if answer is None:
            if wanted.model_id is not None or not self._spilled.exists(sampler.sampler_id):
                raise AwayError
            return -1, self._written(sampler)
        if isinstance(answer, NotYet):
            raise AwayError(answer.reason)
        if isinstance(answer, Refusal):
            kind = LostError if answer.is_lost else InvalidInputError
            raise kind(answer.message, field="sampling_session_id")
        return answer.seq_id, adapter_files.unpack(answer.weights, self._engine.model)

    def _answer(self, wanted: WeightsWanted, patience_seconds: float) -> Answer | None:
        """None if the trainer is away. An answer that has come late may be too old for a sample that came after it was
        asked for.
        """
        answer = self._coming.pop(wanted.name, None)
        if answer is None or _is_older(answer, wanted.at_least):
            answer = self._received.get(wanted, patience_seconds)
        if not wait([answer], AT_ONCE_SECONDS).done or _is_older(answer, wanted.at_least):
            self._coming[wanted.name] = answer
            _bound(self._coming, MAX_IN_MEMORY)
            answer.add_done_callback(lambda _: self._received.ring())
            raise ComingError(answer)
        return None if answer.exception() else answer.result()

    def _written(self, sampler: Sampler) -> FrozenAdapter:
        try:
            return adapter_files.read_frozen(self._spilled.path(sampler.sampler_id), self._engine.model)
        except DamagedError as error:
            raise AwayError from error  # who trains the model can make them again


def _is_older(answer: Future[Answer], at_least: int) -> bool:
    if not answer.done() or answer.exception() is not None:
        return False
    found = answer.result()
    return isinstance(found, Parcel) and found.seq_id < at_least


def _bound(kept: OrderedDict[str, Any], most: int) -> None:
    """The oldest go."""
    while len(kept) > most:
        kept.popitem(last=False)


def _is_new(sampler: Sampler) -> bool:
    """Those of a sampler that follows its model are sent to nobody who has not asked."""
    return sampler.model_seq_id is not None and abs(utc_now() - sampler.created) < NEW


def followed(store: Store, sampler: Sampler) -> Model:
    """The model whose weights, as they are just now, a sampler has."""
    model = store.models.get(sampler.model_id or "", sampler.owner)
    if model is None or model.removed is not None:
        raise InvalidInputError(f"The model {sampler.model_id} is not kept any more.", field="model")
    return model


def check_source(store: Store, sampler: Sampler, path: str) -> None:
    """A sampler stands for the weights it was made from, not for what was saved under their name later.

    Nor are they read any more for whoever may not: another owner's checkpoint may have been withdrawn.
    """
    checkpoint = store.checkpoints.get(CheckpointKey.of(path), sampler.owner)
    if checkpoint is None:
        raise InvalidInputError(f"{path} does not exist any more.", field="model_path", value=path)
    if sampler.saved_by not in (None, checkpoint.request_id):
        raise InvalidInputError(
            f"{path} was overwritten after this sampling client was made; make a new one.",
            field="sampling_session_id",
        )


def _not_from_a_model(sampler: Sampler) -> Adapter:
    raise AssertionError(f"{sampler.sampler_id} has no model")
