"""What goes back: samples as an object of OpenAI's API, in one piece or as events."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from tinsmith.errors import APIStatusError, InvalidInputError
from tinsmith.server.openai import errors, tool_calls
from tinsmith.server.openai.asking import Asking, News
from tinsmith.server.openai.choices import Choice, Ending, Piece, Scored
from tinsmith.server.openai.events import END, KEEP_ALIVE, event
from tinsmith.server.openai.plan import Plan
from tinsmith.server.openai.requests import ChatCompletionRequest, CompletionRequest
from tinsmith.server.routes._call import Call
from tinsmith.server.streams import RedrawnError
from tinsmith.types import SampledSequence, SampleResponse

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 10.0
_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


class Answer(ABC):
    """The answer to one request, whose samples are being drawn."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(
        self, call: Call, plan: Plan, asking: Asking, asked: ChatCompletionRequest | CompletionRequest
    ) -> None:
        self._call = call
        self._plan = plan
        self._asking = asking
        self._wants_usage = asked.wants_usage
        self._choices = plan.choices()
        self._begun: set[int] = set()
        """The choices of which something was told."""
        self._token_texts: dict[int, str] = {}
        self._head = {
            "id": f"{self.prefix}-{asking.request_id}",
            "created": int(time.time()),
            "model": asked.model,
        }

    @abstractmethod
    def _whole(self, index: int, piece: Piece, sequence: SampledSequence, response: SampleResponse) -> dict[str, Any]:
        """A choice in one piece."""

    @abstractmethod
    def _delta(self, index: int, piece: Piece, *, is_first: bool) -> dict[str, Any]:
        """What is new of a choice."""

    @abstractmethod
    def _end(self, index: int, finish_reason: str) -> dict[str, Any]:
        """That a choice has ended."""

    # In one piece

    def whole(self, responses: Sequence[SampleResponse]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for response, of_prompt in zip(responses, self._choices, strict=True):
            for sequence, choice in zip(response.sequences, of_prompt, strict=True):
                choice.add(sequence.tokens, sequence.logprobs or (), sequence.topk_logprobs or ())
                choice.end()
                choices.append(self._whole(len(choices), choice.take(), sequence, response))
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(responses)}

    def _usage(self, responses: Iterable[SampleResponse]) -> dict[str, Any]:
        answers = list(responses)
        prompt = sum(map(len, self._plan.prompts))
        sampled = sum(len(sequence.tokens) for response in answers for sequence in response.sequences)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": sum(each.prompt_cache_hit_tokens for each in answers)},
        }

    # As events

    async def events(self) -> AsyncIterator[bytes]:
        """An error in the middle is an event too."""
        try:
            async for each in self._chunks():
                yield each
        except RedrawnError:
            message = "The weights changed while the server began this answer anew after a fault. Send it again."
            yield event(errors.described(500, message))
        except (APIStatusError, InvalidInputError) as error:
            status = error.status_code if isinstance(error, APIStatusError) else 400
            yield event(errors.described(status, error.message, error))
        except Exception:
            log.exception("a stream failed")
            yield event(errors.described(500, "The server failed. Its log says why; the request may be sent again."))
        yield END

    async def _chunks(self) -> AsyncIterator[bytes]:
        responses: list[SampleResponse] = []
        async for news in self._asking.drawn(KEEP_ALIVE_SECONDS):
            await self._asking.check_key()
            if news is None:
                yield KEEP_ALIVE
                continue
            for choice in self._new(news):
                yield self._chunk(choice)
            if news.response is not None:
                responses.append(news.response)
        if self._wants_usage:
            yield event({**self._head, "object": self.chunk_kind, "choices": [], "usage": self._usage(responses)})

    def _new(self, news: News) -> Iterator[dict[str, Any]]:
        """Of each choice that has changed, what is certain by now."""
        choices = self._choices[news.number]
        for drawn in news.drawn:
            choices[drawn.index].add(drawn.tokens, drawn.logprobs, drawn.topk)
        changed: Iterable[int] = sorted({drawn.index for drawn in news.drawn})
        if news.response is not None:
            changed = range(len(choices))
            for choice in choices:
                choice.end()
        for place in changed:
            index = news.number * len(choices) + place
            yield from self._deltas(index, choices[place].take())
            if news.response is not None:
                yield self._end(index, news.response.sequences[place].stop_reason)

    def _deltas(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        is_first = index not in self._begun
        if is_first or piece.text or piece.scored:
            self._begun.add(index)
            yield self._delta(index, piece, is_first=is_first)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._wants_usage else {}
        return event({**self._head, "object": self.chunk_kind, "choices": [choice], **usage})

    # Tokens

    def _token(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self._plan.text.decode([token], skip_special=False)
        return self._token_texts[token]


class ChatAnswer(Answer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, call: Call, plan: Plan, asking: Asking, asked: ChatCompletionRequest) -> None:
        super().__init__(call, plan, asking, asked)
        self._has_tools = asked.offered is not None

    def _whole(self, index: int, piece: Piece, sequence: SampledSequence, response: SampleResponse) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        finish_reason: str = sequence.stop_reason
        if self._has_tools:
            text, calls = tool_calls.find(piece.text, f"{self._asking.request_id}_{index}")
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
                finish_reason = "tool_calls"
        return {"index": index, "message": message, "finish_reason": finish_reason, "logprobs": self._scores(piece)}

    def _delta(self, index: int, piece: Piece, *, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        delta = {**role, "content": piece.text}
        return {"index": index, "delta": delta, "finish_reason": None, "logprobs": self._scores(piece)}

    def _end(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "finish_reason": finish_reason, "logprobs": None}

    def _scores(self, piece: Piece) -> dict[str, Any] | None:
        if not self._plan.is_scored:
            return None
        return {"content": [self._score(each) for each in piece.scored], "refusal": None}

    def _score(self, scored: Scored) -> dict[str, Any]:
        top = [self._entry(*each) for each in scored.top]
        return {**self._entry(scored.token, scored.logprob or 0.0), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token that is only a part of a character has no bytes that could be told from its text."""
        text = self._token(token)
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": known}


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, call: Call, plan: Plan, asking: Asking, asked: CompletionRequest) -> None:
        super().__init__(call, plan, asking, asked)
        self._is_echoed = bool(asked.echo)
        self._has_top = bool(asked.logprobs)
        self._echoes: dict[int, Piece] = {}
        """By the number of the prompt."""

    def _whole(self, index: int, piece: Piece, sequence: SampledSequence, response: SampleResponse) -> dict[str, Any]:
        echoed = self._echo(index, response) if self._is_echoed else Piece("", [])
        moved = [each._replace(offset=each.offset + len(echoed.text)) for each in piece.scored]
        whole = Piece(echoed.text + piece.text, [*echoed.scored, *moved])
        return self._choice(index, whole, sequence.stop_reason)

    def _delta(self, index: int, piece: Piece, *, is_first: bool) -> dict[str, Any]:
        if is_first and self._is_echoed:
            piece = Piece(self._echo(index).text + piece.text, piece.scored)
        return self._choice(index, piece, None)

    def _end(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "finish_reason": finish_reason, "logprobs": None}

    def _choice(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "finish_reason": finish_reason,
            "logprobs": self._scores(piece.scored) if self._plan.is_scored else None,
        }

    def _echo(self, index: int, response: SampleResponse | None = None) -> Piece:
        """What a choice begins with: the same for all of its prompt."""
        number = index // len(self._choices[0])
        if number not in self._echoes:
            self._echoes[number] = self._as_sampled(self._plan.prompts[number], response)
        return self._echoes[number]

    def _as_sampled(self, prompt: list[int], response: SampleResponse | None) -> Piece:
        """The prompt as if it had been sampled. Nothing foretells its first token."""
        if response is None or not self._plan.is_scored:
            return Piece(self._plan.text.decode(prompt), [])
        logprobs = response.prompt_logprobs or [None] * len(prompt)
        topk = response.topk_prompt_logprobs or [None] * len(prompt)
        told = Choice(self._plan.text, Ending(), is_scored=True)
        told.add(prompt, logprobs, topk)
        told.end()
        return told.take()

    def _scores(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return {
            "tokens": [self._token(each.token) for each in scored],
            "token_logprobs": [self._number(each.logprob) for each in scored],
            "top_logprobs": [self._top(each) for each in scored] if self._has_top else None,
            "text_offset": [each.offset for each in scored],
        }

    def _top(self, scored: Scored) -> dict[str, float] | None:
        """With the token itself, as that API has it."""
        if scored.logprob is None:
            return None
        tokens = [*scored.top, (scored.token, scored.logprob)]
        return {self._token(token): max(logprob, _LEAST_LOGPROB) for token, logprob in tokens}

    def _number(self, logprob: float | None) -> float | None:
        return None if logprob is None else max(logprob, _LEAST_LOGPROB)
