"""A request made ready to be sampled: its weights, its prompts as tokens, and what ends its samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tinsmith.errors import TokenizerError
from tinsmith.server.messages import SampleJob
from tinsmith.server.models import ModelFacts
from tinsmith.server.openai import sources
from tinsmith.server.openai.choices import Choice, Ending
from tinsmith.server.openai.errors import Refused, invalid
from tinsmith.server.openai.requests import (
    DEFAULT_ANSWER_TOKENS,
    DEFAULT_COMPLETION_TOKENS,
    MAX_SCORES,
    ChatCompletionRequest,
    CompletionRequest,
)
from tinsmith.server.openai.sources import Source
from tinsmith.server.routes._call import Call
from tinsmith.server.texts import ModelText
from tinsmith.types import ModelInput, SamplingParams

T = TypeVar("T")

_CHARACTERS_OF_A_TOKEN = 128
"""No text has more for each of its tokens, except for runs of spaces; so what is much longer need not be counted."""
_CHARACTERS_AT_ONCE = 4 * 2**20


@dataclass(frozen=True)
class Plan:
    source: Source
    facts: ModelFacts
    text: ModelText
    ending: Ending
    prompts: list[list[int]]
    jobs: list[SampleJob]
    """One for each prompt."""
    is_scored: bool
    """Whether log-probabilities are wanted."""
    is_echoed: bool = False
    """Whether each choice begins with its prompt."""

    def __post_init__(self) -> None:
        sampled = sum(job.num_samples * (job.sampling_params.max_tokens or 0) for job in self.jobs)
        if self.is_scored and (scores := self.num_told(sampled)) > MAX_SCORES:
            problem = f"may come to {scores:,}, and at most {MAX_SCORES:,} are told at once: lower n, max_tokens or top"
            raise invalid("logprobs", problem)
        if (echoed := self._num_echoed) > MAX_SCORES:
            raise invalid("echo", f"comes to {echoed:,} tokens, and at most {MAX_SCORES:,} are told at once: lower n")

    @property
    def _num_echoed(self) -> int:
        return sum(job.num_samples * job.prompt.length for job in self.jobs) if self.is_echoed else 0

    def num_told(self, num_sampled: int) -> int:
        """Of so many sampled tokens, with the prompts where they are echoed, and those that are told beside each."""
        return (num_sampled + self._num_echoed) * (1 + self.jobs[0].topk_sample_logprobs)

    def choices(self) -> list[list[Choice]]:
        """Those of each prompt, nothing in them yet."""
        return [
            [Choice(self.text, self.ending, is_scored=self.is_scored) for _ in range(job.num_samples)]
            for job in self.jobs
        ]


async def plan_chat(call: Call, asked: ChatCompletionRequest) -> Plan:
    source, facts = await sources.find(call, asked.model)
    text, conversation = call.services.texts.of(facts.name), asked.conversation()

    def render() -> tuple[list[int], int | None]:
        if not text.tokenizer.chat_template:
            raise invalid(
                "model",
                f"has no chat template: {facts.name} was not made for conversations. Use /v1/completions, or have a "
                "chat_template.jinja put among its files",
            )
        rendered = text.render(conversation, asked.offered, asked.chat_template_kwargs or {})
        _check_size("messages", rendered, facts)
        return text.encode(rendered, add_special=False), text.tokenizer.eos_token_id

    prompt, end_of_turn = await in_thread(call, render)
    limit = asked.limit
    if limit is None:
        limit = max(1, min(DEFAULT_ANSWER_TOKENS, facts.max_context + 1 - len(prompt)))
    limited_by = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    _check_length("messages", limited_by, len(prompt), limit, facts)
    ends = {*facts.eos_token_ids, *(() if end_of_turn is None else (end_of_turn,))}
    job = _job(asked, prompt, asked.params(limit), ends, top=asked.top or 0)
    return Plan(source, facts, text, Ending(ends, asked.stops), [prompt], [job], asked.top is not None)


async def plan_completion(call: Call, asked: CompletionRequest) -> Plan:
    source, facts = await sources.find(call, asked.model)
    text, given = call.services.texts.of(facts.name), asked.prompts()
    for each in given:
        _check_size("prompt", each, facts)
    _check_sizes(given, facts)

    limit = DEFAULT_COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens

    def encode() -> Iterator[list[int]]:
        """Each is checked before the next one costs anything."""
        tokenizer = text.tokenizer  # also for tokens: what is sampled is told as text
        for each in given:
            prompt = tokenizer.encode(each) if isinstance(each, str) else each
            _check_length("prompt", "max_tokens", len(prompt), limit, facts)
            yield prompt

    prompts = await in_thread(call, lambda: list(encode()))
    params, top, is_echoed = asked.params(limit), asked.logprobs, bool(asked.echo)
    if is_echoed and asked.stream and top is not None:
        raise invalid("echo", "cannot be streamed together with logprobs: those of the prompt are known at the end")
    jobs = [
        _job(asked, prompt, params, facts.eos_token_ids, top=top or 0, scores_prompt=is_echoed and top is not None)
        for prompt in prompts
    ]
    ending = Ending(facts.eos_token_ids, asked.stops)
    return Plan(source, facts, text, ending, prompts, jobs, top is not None, is_echoed)


def _job(
    asked: ChatCompletionRequest | CompletionRequest,
    prompt: list[int],
    params: SamplingParams,
    ends: Sequence[int] | set[int],
    *,
    top: int,
    scores_prompt: bool = False,
) -> SampleJob:
    return SampleJob(
        prompt=ModelInput.from_ints(prompt),
        sampling_params=params,
        num_samples=asked.count,
        topk_sample_logprobs=top,
        prompt_logprobs=scores_prompt or None,
        topk_prompt_logprobs=top if scores_prompt else 0,
        end_tokens=sorted(ends),
        is_streamed=bool(asked.stream),
        reward=asked.reward,
    )


def _check_size(param: str, given: str | list[int], facts: ModelFacts) -> None:
    """Before it is made into tokens, which takes time and memory."""
    if isinstance(given, str) and len(given) > _CHARACTERS_OF_A_TOKEN * facts.max_context:
        raise invalid(
            param,
            f"has a text of {len(given):,} characters; {facts.name} takes {facts.max_context:,} tokens",
            "context_length_exceeded",
        )


def _check_sizes(given: Sequence[str | list[int]], facts: ModelFacts) -> None:
    """Of all together. Many short ones are as good as a long one, however little the model reads at once."""
    length = sum(len(each) for each in given if isinstance(each, str))
    most = max(_CHARACTERS_AT_ONCE, _CHARACTERS_OF_A_TOKEN * facts.max_context)
    if length > most:
        problem = f"has texts of {length:,} characters; at most {most:,} are taken at once. Send several requests"
        raise invalid("prompt", problem)


def _check_length(prompt: str, max_tokens: str, length: int, limit: int, facts: ModelFacts) -> None:
    room = facts.max_context + 1 - length  # the last token is never read by the model, so it needs no place
    if room < 1:
        problem = f"come to {length:,} tokens, but {facts.name} takes {facts.max_context:,}: shorten them"
        raise invalid(prompt, problem, "context_length_exceeded")
    if limit > room:
        raise invalid(
            max_tokens,
            f"is {limit:,}, but after {length:,} tokens {facts.name} has room for {room:,}: lower it",
            "context_length_exceeded",
        )


async def in_thread(call: Call, work: Callable[[], T]) -> T:
    """A tokenizer is loaded when it is first used, and long texts take their time."""
    try:
        return await asyncio.get_running_loop().run_in_executor(call.services.decoding, work)
    except TokenizerError as error:
        raise Refused(400, str(error), "model") from error
