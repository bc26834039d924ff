"""Samples as jobs of the queue: submitted, waited for, and given up as soon as nobody waits for them any more."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tinsmith.server import logs
from tinsmith.server.checks import check_sampling
from tinsmith.server.messages import Drawn, SampleJob
from tinsmith.server.models import ModelFacts
from tinsmith.server.openai.errors import Refused
from tinsmith.server.openai.places import Seat
from tinsmith.server.quotas import OverLimitError
from tinsmith.server.routes._call import ASK_AGAIN_SECONDS, Call
from tinsmith.server.routes._submit import accept, give_up
from tinsmith.server.store import StoreUnavailableError, ids
from tinsmith.server.store.records import Done, Failed, NewJob, Status
from tinsmith.server.streams import Watch
from tinsmith.types import SampleResponse
from tinsmith.wire import json, proto

STOPPING_SECONDS = 5.0


@dataclass(frozen=True)
class Part:
    """The samples of one prompt."""

    job: NewJob
    request: SampleJob
    request_id: str
    num_samples: int
    watch: Watch


class News(NamedTuple):
    number: int
    """Of which part."""
    drawn: list[Drawn]
    response: SampleResponse | None
    """All of it, once it is finished; what was drawn last comes with it."""


class Asking:
    """All samples of one request. Whoever has submitted them closes it, whatever happens."""

    def __init__(self, call: Call, seat: Seat, facts: ModelFacts, requests: Sequence[SampleJob]) -> None:
        self.news = asyncio.Event()
        """Set when tokens were drawn, when samples are finished, and when the server stops."""
        self.too_slow = asyncio.Event()
        """Set when their reader is so far behind that it should be given up."""
        self.parts = [self._part(call, seat, facts, request) for request in requests]
        self._call = call
        self._is_streamed = any(request.is_streamed for request in requests)
        self._submitted: list[Part] = []
        self._outcomes: list[asyncio.Task[SampleResponse]] = []
        self._held = contextlib.ExitStack()
        self._looked_at = time.monotonic()

    def _part(self, call: Call, seat: Seat, facts: ModelFacts, request: SampleJob) -> Part:
        number, sampler = next(seat.numbers), seat.sampler
        job = NewJob(
            kind="sample",
            owner=call.owner,
            payload=json.encode(request),
            session_id=sampler.session_id,
            base_model=sampler.base_model,
            sampler_id=sampler.sampler_id,
            seq_id=number,
            size=check_sampling(request, facts),
            samples=request.num_samples,
        )
        request_id = ids.request_id(sampler.sampler_id, number)
        return Part(job, request, request_id, request.num_samples, Watch(request.num_samples, self.news, self.too_slow))

    @property
    def request_id(self) -> str:
        """The first of them stands for all."""
        return self.parts[0].request_id

    async def submit(self) -> None:
        logs.about(request_id=self.request_id)
        try:
            self._hold()
            self._submitted = self.parts
            # All of them, even if one fails: what is under way can only be given up when it has arrived.
            submitting = (accept(self._call, part.job, sample=part.request) for part in self.parts)
            results = await asyncio.gather(*submitting, return_exceptions=True)
            failed = {number: each for number, each in enumerate(results) if isinstance(each, BaseException)}
            self._submitted = [part for number, part in enumerate(self.parts) if number not in failed]
            for error in failed.values():
                raise error
        except BaseException:
            await self.close()
            raise
        self._outcomes = [asyncio.create_task(self._outcome(part.request_id)) for part in self.parts]
        for outcome in self._outcomes:
            outcome.add_done_callback(lambda _: self.news.set())

    def _hold(self) -> None:
        """What is held until the end. A stream is one of its owner's open requests for longer than others are."""
        services, owner = self._call.services, self._call.owner
        if self._is_streamed:
            self._held.enter_context(services.open_requests.one_more(owner))
        self._held.enter_context(services.places.in_use(owner))
        for part in self.parts:  # before they are submitted, as their worker may be quicker than we are
            self._held.enter_context(services.streams.watching(part.request_id, part.watch))

    async def close(self) -> None:
        """Give up what is not finished; its room in the batch is free at once."""
        self._held.close()
        waited_for = zip(self.parts, self._outcomes, strict=False)  # for none, if not all were accepted
        ended = {part.request_id for part, outcome in waited_for if _has_ended(outcome)}
        for outcome in self._outcomes:
            outcome.cancel()
        await asyncio.gather(*self._outcomes, return_exceptions=True)
        for part in self._submitted:
            if part.request_id in ended:
                continue
            with contextlib.suppress(OverLimitError):  # a place that stays taken would cost more than a record
                self._call.services.paperwork.charge(self._call.owner, 0)
            with contextlib.suppress(StoreUnavailableError):  # then it goes on to its own end
                await give_up(self._call, part.request_id, part.job.base_model)

    # What becomes of them

    async def responses(self) -> list[SampleResponse]:
        """Those of all parts. If the client goes away before, nobody needs them."""
        leaving = asyncio.create_task(has_gone(self._call.request.receive))
        try:
            pending = set(self._outcomes)
            while pending:
                done, _ = await asyncio.wait(
                    {*pending, leaving}, timeout=ASK_AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if leaving in done:
                    raise ClientDisconnect
                pending -= done
                for outcome in done:
                    outcome.result()  # the first that fails is enough
                await self.check_key()
            return [outcome.result() for outcome in self._outcomes]
        finally:
            leaving.cancel()

    async def check_key(self) -> None:
        """It may have been revoked since the request came. What cannot be asked now is asked again."""
        if time.monotonic() - self._looked_at < ASK_AGAIN_SECONDS:
            return
        with contextlib.suppress(StoreUnavailableError, TimeoutError):
            await self._call.check_again()
        self._looked_at = time.monotonic()

    async def drawn(self, patience: float) -> AsyncIterator[News | None]:
        """What is new, as it comes; `None` if nothing comes for long."""
        open_parts = set(range(len(self.parts)))
        while open_parts:
            try:
                async with asyncio.timeout(patience):
                    await self.news.wait()
            except TimeoutError:
                yield None
                continue
            self.news.clear()
            for number in sorted(open_parts):
                outcome, watch = self._outcomes[number], self.parts[number].watch
                response = await outcome if outcome.done() else None
                if response is not None:
                    open_parts.discard(number)
                    _hear_whole(watch, self.parts[number].request_id, response)
                if (drawn := watch.take()) or response is not None:
                    yield News(number, drawn, response)

    async def _outcome(self, request_id: str) -> SampleResponse:
        status = await self._finished(request_id)
        match status.outcome:
            case Done(result=result):
                return await self._call.decoded(proto.decode_sample_response, result)
            case Failed(error=error, category="user"):
                raise Refused(400, error)
            case Failed(error=error):
                raise Refused(500, error)
        raise Refused(409, "The request was cancelled, or its session ended. Send it again.")

    async def _finished(self, request_id: str) -> Status:
        waiting, seconds = self._call.services.waiting, self._call.services.config.long_poll_seconds
        while not self._call.services.streams.is_draining:
            status = await waiting.until_done(request_id, self._call.owner, seconds)
            try:
                status = status or await waiting.status(request_id)
            except TimeoutError:  # the database is away
                continue
            if status is None:
                raise Refused(500, "The server has lost this request. Send it again.")
            if status.outcome is not None:
                return status
        raise Refused(503, "The server stops. Send the request again.", retry_after=STOPPING_SECONDS)


async def has_gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _has_ended(outcome: asyncio.Task[SampleResponse]) -> bool:
    """Whether its job has; one that was not waited for any longer may go on."""
    if not outcome.done() or outcome.cancelled():
        return False
    error = outcome.exception()
    return not (isinstance(error, Refused) and error.status_code == 503)


def _hear_whole(watch: Watch, request_id: str, response: SampleResponse) -> None:
    for index, sequence in enumerate(response.sequences):
        topk = [row or [] for row in sequence.topk_logprobs or ()]
        watch.hear(Drawn(request_id, index, 0, sequence.tokens, sequence.logprobs or [], topk))
