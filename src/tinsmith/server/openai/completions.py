"""The endpoints of OpenAI's API, each of them at two places."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.responses import Response

from tinsmith.server.openai import sources
from tinsmith.server.openai.answers import Answer, ChatAnswer, CompletionAnswer
from tinsmith.server.openai.asking import Asking
from tinsmith.server.openai.errors import refusal
from tinsmith.server.openai.events import EventStream
from tinsmith.server.openai.plan import Plan, plan_chat, plan_completion
from tinsmith.server.openai.requests import ChatCompletionRequest, CompletionRequest
from tinsmith.server.routes._call import Call, Endpoint, reply_plain
from tinsmith.types._model import Model

PREFIX, ALSO = "/v1/", "/oai/api/v1/"
"""Where they are, and where the hosted service has them."""

_MOST_BYTES = 16 * 2**20
_BYTES_OF_A_TOKEN = 16
"""A guess at the work that it makes to tell it."""


async def list_models(call: Call) -> Response:
    """The base models, and the training runs and checkpoints of the caller, by the names that `model` takes."""
    return reply_plain({"object": "list", "data": await sources.listed(call)})


async def retrieve_model(call: Call) -> Response:
    """One model: a base model, a training run, or a checkpoint of the caller's or a published one."""
    return reply_plain(await sources.described(call, call.part("model")))


async def chat_completions(call: Call) -> Response:
    """Continue a conversation, by the model's own chat template; with `stream`, as server-sent events."""
    asked = await call.read(ChatCompletionRequest, _MOST_BYTES)
    asked.check()
    plan = await plan_chat(call, asked)
    asking = await _submitted(call, plan)
    return await _answered(call, plan, asking, ChatAnswer(call, plan, asking, asked), is_streamed=bool(asked.stream))


async def completions(call: Call) -> Response:
    """Continue texts, or tokens; with `stream`, as server-sent events."""
    asked = await call.read(CompletionRequest, _MOST_BYTES)
    asked.check()
    plan = await plan_completion(call, asked)
    asking = await _submitted(call, plan)
    answer = CompletionAnswer(call, plan, asking, asked)
    return await _answered(call, plan, asking, answer, is_streamed=bool(asked.stream))


async def _submitted(call: Call, plan: Plan) -> Asking:
    seat = await call.services.places.seat(call, plan.source)
    asking = Asking(call, seat, plan.facts, plan.jobs)
    await asking.submit()
    return asking


async def _answered(call: Call, plan: Plan, asking: Asking, answer: Answer, *, is_streamed: bool) -> Response:
    if is_streamed:
        return EventStream(answer.events(), asking.too_slow, asking.close, asking.request_id)
    try:
        responses = await asking.responses()
    finally:
        await asking.close()
    await call.check_again()
    sampled = sum(len(each.tokens) for response in responses for each in response.sequences)
    size = _BYTES_OF_A_TOKEN * plan.num_told(sampled)
    response = await call.worked(size, lambda: reply_plain(answer.whole(responses)))
    response.headers["x-request-id"] = asking.request_id
    return response


def _endpoint(
    method: str, path: str, answer: Callable[[Call], Awaitable[Response]], takes: type[Model] | None = None
) -> Endpoint:
    return Endpoint(method, PREFIX + path, answer, takes, also_at=ALSO + path, refusal=refusal)


ENDPOINTS = (
    _endpoint("GET", "models", list_models),
    _endpoint("GET", "models/{model:path}", retrieve_model),
    _endpoint("POST", "completions", completions, CompletionRequest),
    _endpoint("POST", "chat/completions", chat_completions, ChatCompletionRequest),
)


def no_such_endpoint(status: int, detail: str, error: Exception | None = None) -> Response:
    """OpenAI's API has more of them than there are here."""
    known = ", ".join(f"{each.method} {each.path.replace(':path}', '}')}" for each in ENDPOINTS)
    return refusal(status, f"{detail} The endpoints are: {known}.", error)
