"""What is asked for: read, checked, and made into a conversation or prompts, and sampling parameters.

Parameters that would change the answer and that there is nothing for here are refused by name. Others that are not
known are ignored, as clients of OpenAI's API send many that change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tinsmith.server.checks import MAX_SAMPLES
from tinsmith.server.openai.errors import Refused, invalid
from tinsmith.types import SamplingParams
from tinsmith.types._model import Response

MAX_TOP = 20
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_SCORES = 2**20
"""Log-probabilities in one answer: each takes some hundred bytes to tell."""
DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_ANSWER_TOKENS = 4096
"""Of a chat that sets no limit. Room is kept for all of them, so that an answer once begun can end."""

_ROLES = ("system", "user", "assistant", "tool")
_ALSO = {"developer": "system"}

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "reasoning_effort": (),
    "verbosity": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "prompt_embeds": (),
}
"""Parameters that are understood as far as they ask for nothing: by these values, or null."""

_INSTEAD: Mapping[str, str] = {
    "functions": "; send tools",
    "function_call": "; send tools",
    "reasoning_effort": "; what the chat template of a model understands can be sent in chat_template_kwargs",
    "best_of": "; ask for n and choose by logprobs",
}

_TEMPLATE_OWN = {"messages", "tools", "tokenize", "add_generation_prompt", "tokenizer"}


class StreamOptions(Response):
    include_usage: bool | None = None


class _Sampling(Response):
    """What both kinds of requests have. Null stands for what is left out."""

    model: str
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    """Notes of the client's own, of which the reward of the answer is shown beside it."""

    @property
    def reward(self) -> float | None:
        given = (self.metadata or {}).get("reward")
        return None if given is None else float(given)

    @property
    def count(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """At the end of a stream; an answer in one piece has it always."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        for name, neutral in _NEUTRAL.items():
            value = self.extra.get(name)
            if value is not None and value not in neutral:
                raise invalid(name, f"is not possible here; leave it out{_INSTEAD.get(name, '')}", "unsupported_value")
        if not 1 <= self.count <= MAX_SAMPLES:
            raise invalid("n", f"is {self.n}, but must lie between 1 and {MAX_SAMPLES}")
        if len(self.stops) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in self.stops):
            possible = f"up to {MAX_STOPS} texts, none of them empty or longer than {MAX_STOP_LENGTH} characters"
            raise invalid("stop", f"must be a text or {possible}")
        self._check_reward()

    def _check_reward(self) -> None:
        try:
            is_number = self.reward is None or math.isfinite(self.reward)
        except (TypeError, ValueError, OverflowError):
            is_number = False
        if not is_number:
            raise invalid("metadata", "has a reward that is no number; give one such as 0.5 or '0.5', or leave it out")

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            stop=self.stops or None,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=-1 if self.top_k is None else self.top_k,
        )


class ChatCompletionRequest(_Sampling):
    """A conversation that is to be continued."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's template, such as enable_thinking."""

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        """How many of the most likely tokens are wanted beside each; `None` for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        return self.tools if self.tools and self.tool_choice != "none" else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        _check_top("top_logprobs", self.top_logprobs)
        if self.tool_choice not in (None, "auto", "none"):
            raise invalid("tool_choice", "must be 'auto' or 'none': a model cannot be made to call a tool here")
        if taken := _TEMPLATE_OWN & (self.chat_template_kwargs or {}).keys():
            raise invalid("chat_template_kwargs", f"holds {min(taken)!r}, which is not a variable of a template")

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them."""
        if not self.messages:
            raise invalid("messages", "is empty: a conversation needs at least one message")
        return [_message(f"messages[{number}]", message) for number, message in enumerate(self.messages)]


class CompletionRequest(_Sampling):
    """Text that is to be continued."""

    prompt: Any
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    logprobs: int | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        _check_top("logprobs", self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """Each of them a text or token ids."""
        several = _as_prompts(self.prompt)
        if several is None or not several:
            raise invalid("prompt", "must be a text, a list of texts, a list of token ids, or a list of such lists")
        if len(several) > MAX_PROMPTS or len(several) * self.count > MAX_SAMPLES:
            raise invalid(
                "prompt",
                f"holds {len(several)} prompts with {self.count} samples each; at most {MAX_PROMPTS} prompts and "
                f"{MAX_SAMPLES} samples are taken at once. Send them in several requests",
            )
        return several


def _as_prompts(prompt: object) -> list[str | list[int]] | None:
    if isinstance(prompt, str):
        return [prompt]
    for kind in (list[str], list[list[int]]):
        try:
            return msgspec.convert(prompt, kind)  # type: ignore[return-value]
        except msgspec.ValidationError:
            continue
    try:
        return [msgspec.convert(prompt, list[int])]
    except msgspec.ValidationError:
        return None


def _check_top(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_TOP:
        raise invalid(name, f"is {count}, but must lie between 0 and {MAX_TOP}")


# --- messages --------------------------------------------------------------------------------------------------------


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    role = _ALSO.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"is {role!r}, but must be one of {', '.join(_ROLES)}")
    said = {**message, "role": role, "content": _content(f"{where}.content", role, message.get("content"))}
    if calls := message.get("tool_calls"):
        said["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return said


def _content(where: str, role: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":  # who only calls tools says nothing
        return ""
    if not isinstance(content, list):
        raise invalid(where, "must be a text or a list of parts")
    return "".join(_part(f"{where}[{number}]", part) for number, part in enumerate(content))


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind == "text" and isinstance(text, str):
        return text
    if kind not in (None, "text"):
        problem = f"{where} is of type {kind!r}, but the models served here take text only. Leave it out."
        raise Refused(400, problem, where, "unsupported_content")
    raise invalid(where, "must be an object with the type 'text' and a text")


def _calls(where: str, calls: object) -> list[dict[str, Any]]:
    """Arguments come as JSON in a text, and templates write JSON themselves."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, dict) for call in calls):
        raise invalid(where, "must be a list of objects")
    return [{**call, "function": _function(call.get("function"))} for call in calls]


def _function(function: object) -> object:
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return function
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function
