"""The official `openai` client and `litellm`, unmodified, against a real server with a real engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

import tinsmith
from tests.docs.pages import DOCS, blocks
from tests.end_to_end.serving import KEY, OTHER_KEY, ServerProcess, wait_until
from tests.server.tiny_models import save_model
from tests.support.tiny_tokenizer import CHATML_CONFIG, byte_level_bpe, write_folder
from tinsmith import types
from tinsmith.text.chat_template import apply_chat_template
from tinsmith.text.fast_tokenizer import Tokenizer
from tinsmith.text.tokenizer_folder import read_tokenizer

TALKING, MUTE = "tiny/talking", "tiny/mute"
TEMPLATE = """\
{%- if messages[0].content == 'raise' %}{{ raise_exception('Not that word, please.') }}{% endif %}
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HELLO: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, 你好!"}]
LONG = 3000
SECONDS = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with a chat template, and one that has none."""
    root, backend = tmp_path_factory.mktemp("models"), byte_level_bpe()
    configs = {TALKING: {**CHATML_CONFIG, "chat_template": TEMPLATE}, MUTE: CHATML_CONFIG}
    for name, config in configs.items():
        folder = write_folder(root / name, backend, {"tokenizer_config.json": config})
        save_model(folder, "qwen3", vocab_size=backend.get_vocab_size(), max_position_embeddings=4096, eos_token_id=0)
    return {name: root / name for name in configs}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("state"), models) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def stranger(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=OTHER_KEY, max_retries=0, timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def service(server: ServerProcess) -> Iterator[tinsmith.ServiceClient]:
    with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as service:
        yield service


@pytest.fixture(scope="module")
def tokenizer(models: dict[str, Path]) -> Tokenizer:
    return read_tokenizer(models[TALKING] / "tokenizer.json", name=TALKING)


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def chat(client: OpenAI) -> Ask:
    return partial(client.chat.completions.create, model=TALKING, messages=HELLO, max_tokens=40, seed=7)


@pytest.fixture(scope="module")
def complete(client: OpenAI) -> Ask:
    return partial(client.completions.create, model=TALKING, prompt="The quick", max_tokens=40, seed=7)


def close(logprobs: list[float]) -> Any:
    """A prompt that is found in the cache was computed in another order, which shows in the last digit."""
    return pytest.approx(logprobs, abs=1e-4)


# --- what is sampled -------------------------------------------------------------------------------------------------


def test_a_reward_in_the_metadata_is_shown_beside_the_sample(complete: Ask, chat: Ask, server: ServerProcess) -> None:
    asked = openai.DefaultHttpxClient(base_url=server.url, headers={"X-API-Key": KEY})
    complete(max_tokens=1)
    complete(max_tokens=1, extra_body={"metadata": {"reward": 0.5}})
    chat(max_tokens=1, metadata={"reward": "-0.25", "of": "somebody"})
    with asked:
        shown = asked.get("/dashboard/api/samples", params={"limit": 3}).json()["samples"]
    assert [sample["reward"] for sample in shown] == [-0.25, 0.5, None]


def test_a_chat_is_what_asample_gives_for_its_template(
    chat: Ask, service: tinsmith.ServiceClient, tokenizer: Tokenizer
) -> None:
    prompt = apply_chat_template(tokenizer, HELLO)
    params = types.SamplingParams(max_tokens=40, seed=7, stop=[0, tokenizer.eos_token_id or 0])
    sampled = service.create_sampling_client(base_model=TALKING).sample(
        types.ModelInput.from_ints(prompt), 2, params, topk_sample_logprobs=3
    )
    answer = chat(n=2, logprobs=True, top_logprobs=3)
    for choice, sequence in zip(answer.choices, sampled.result(SECONDS).sequences, strict=True):
        ended = sequence.stop_reason == "stop"
        tokens = sequence.tokens[:-1] if ended else sequence.tokens
        assert choice.finish_reason == sequence.stop_reason
        assert choice.message.content == tokenizer.decode(tokens, skip_special_tokens=True)
        scored = choice.logprobs.content
        assert [each.token for each in scored] == [tokenizer.decode([token]) for token in tokens]
        assert [each.logprob for each in scored] == close(sequence.logprobs[: len(tokens)])
        for each, row in zip(scored, sequence.topk_logprobs, strict=False):
            assert [top.logprob for top in each.top_logprobs] == close([logprob for _, logprob in row])
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(each.tokens) for each in sampled.result().sequences)


def test_a_streamed_chat_is_the_same_and_has_only_whole_characters(chat: Ask) -> None:
    whole = chat(n=3, max_tokens=200, logprobs=True)
    texts, scores, usage = ["", "", ""], [[], [], []], None  # type: ignore[var-annotated]
    for chunk in chat(n=3, max_tokens=200, logprobs=True, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            scores[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    for mine, choice in zip(scores, whole.choices, strict=True):
        assert [each.token for each in mine] == [each.token for each in choice.logprobs.content]
        assert [each.logprob for each in mine] == close([each.logprob for each in choice.logprobs.content])
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_stream_comes_while_it_is_drawn(chat: Ask) -> None:
    chunks = list(chat(max_tokens=100, temperature=0, stream=True))
    assert len(chunks) > 3  # more, if neither worker nor API has to wait for a processor
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


def test_completions_of_texts_and_tokens(complete: Ask, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("The quick")
    (whole,) = complete().choices
    assert complete(prompt=tokens).choices[0].text == whole.text
    both = complete(prompt=["The quick", "brown"], n=2).choices
    assert [choice.index for choice in both] == [0, 1, 2, 3]
    assert both[0].text == whole.text
    assert complete(prompt=[tokens, tokenizer.encode("brown")], n=2).choices == both
    texts = ["", "", "", ""]
    for chunk in complete(prompt=["The quick", "brown"], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in both]


def test_stops_are_not_part_of_the_text(complete: Ask) -> None:
    whole = complete(max_tokens=200).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    cut = complete(max_tokens=200, stop=[stop, "never to be seen"]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    streamed = "".join(chunk.choices[0].text for chunk in complete(max_tokens=200, stop=stop, stream=True))
    assert streamed == cut.text


def test_an_echo_scores_the_prompt(complete: Ask, service: tinsmith.ServiceClient, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("The quick brown fox")
    sampler = service.create_sampling_client(base_model=TALKING)
    expected = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result(SECONDS)
    choice = complete(prompt="The quick brown fox", echo=True, logprobs=2, max_tokens=0).choices[0]
    assert choice.text == "The quick brown fox"
    assert choice.logprobs.token_logprobs[0] is expected[0] is None
    assert choice.logprobs.token_logprobs[1:] == close(expected[1:])
    assert choice.logprobs.text_offset == [len(tokenizer.decode(tokens[:end])) for end in range(len(tokens))]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.top_logprobs[0] is None
    assert len(choice.logprobs.top_logprobs[1]) >= 2


def test_tools_and_their_calls_go_through_the_template(chat: Ask, tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "warm?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "22"},
    ]
    answer = chat(messages=messages, tools=tools)
    as_template = [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"city": "Rome"}}}]},
        {"role": "tool", "content": "22"},
    ]
    assert answer.usage.prompt_tokens == len(apply_chat_template(tokenizer, as_template, tools=tools))
    assert chat(messages=messages, tools=tools, tool_choice="none").usage.prompt_tokens < answer.usage.prompt_tokens


# --- which weights ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(service: tinsmith.ServiceClient) -> tinsmith.TrainingClient:
    return service.create_lora_training_client(TALKING, rank=4, seed=1)


def train(trainer: tinsmith.TrainingClient, tokens: list[int]) -> None:
    datum = types.Datum(
        types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    )
    trainer.forward_backward([datum], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=0.3)).result(SECONDS)


def test_a_training_run_is_sampled_as_it_is_now(
    complete: Ask, stranger: OpenAI, trainer: tinsmith.TrainingClient, tokenizer: Tokenizer
) -> None:
    live = partial(complete, model=trainer.model_id, temperature=0, max_tokens=20)
    before = live().choices[0].text
    assert before == complete(temperature=0, max_tokens=20).choices[0].text  # it begins as its base model
    train(trainer, tokenizer.encode("The quick brown fox jumps"))
    after = live().choices[0].text
    assert after != before
    path = trainer.save_weights_for_sampler("now").result(SECONDS).path
    assert complete(model=path, temperature=0, max_tokens=20).choices[0].text == after
    assert "".join(chunk.choices[0].text for chunk in live(stream=True)) == after
    for name in (trainer.model_id, path):
        with pytest.raises(openai.NotFoundError) as anothers:
            stranger.completions.create(model=name, prompt="x")
        with pytest.raises(openai.NotFoundError) as missing:
            stranger.completions.create(model=name.replace(trainer.model_id[:8], "00000000"), prompt="x")
        assert anothers.value.code == missing.value.code == "model_not_found"


def test_a_published_checkpoint_is_everybodys(
    complete: Ask, stranger: OpenAI, trainer: tinsmith.TrainingClient, service: tinsmith.ServiceClient
) -> None:
    path = trainer.save_weights_for_sampler("shared").result(SECONDS).path
    service.rest.publish_checkpoint_from_tinker_path(path).result(SECONDS)
    mine = complete(model=path, temperature=0).choices[0].text
    theirs = stranger.completions.create(model=path, prompt="The quick", max_tokens=40, temperature=0)
    assert theirs.choices[0].text == mine
    assert stranger.models.retrieve(path).id == path


def test_the_list_has_what_can_be_asked_for(
    client: OpenAI, stranger: OpenAI, trainer: tinsmith.TrainingClient, server: ServerProcess
) -> None:
    names = {model.id for model in client.models.list()}
    assert {TALKING, MUTE, trainer.model_id} <= names
    assert {model.id for model in stranger.models.list()} == {TALKING, MUTE}
    assert client.models.retrieve(TALKING).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tiny/no-such-model")
    elsewhere = OpenAI(base_url=f"{server.url}/oai/api/v1", api_key=KEY)
    with elsewhere:
        assert {model.id for model in elsewhere.models.list()} == names


# --- who goes away ---------------------------------------------------------------------------------------------------


def running(server: ServerProcess) -> int:
    """How many samples wait or run."""
    page = server.call("GET", "/metrics").body.decode()
    return sum(int(float(count)) for count in re.findall(r'tinsmith_jobs{[^}]*operation="sample"[^}]*} (\S+)', page))


def test_a_stream_that_is_closed_frees_its_place_at_once(chat: Ask, server: ServerProcess) -> None:
    # Greedy, because it never ends then; what is drawn with a seed may be over in a moment.
    with chat(max_tokens=LONG, temperature=0, stream=True) as stream:
        next(iter(stream))
        assert running(server) == 1
    wait_until(lambda: running(server) == 0, SECONDS, "the sample goes on")


def test_who_leaves_without_having_read_a_word_is_not_sampled_for(server: ServerProcess) -> None:
    # Greedy for the same reason.
    body = f'{{"model": "{TALKING}", "prompt": "x", "max_tokens": {LONG}, "temperature": 0}}'.encode()
    credential = f"authorization: Bearer {KEY}"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{credential}\r\ncontent-length: {len(body)}\r\n"
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        wait_until(lambda: running(server) == 1, SECONDS, "it was not begun")
    wait_until(lambda: running(server) == 0, SECONDS, "the sample goes on")


def test_a_stream_goes_on_where_it_was_when_its_worker_dies(chat: Ask, server: ServerProcess) -> None:
    asked = partial(chat, max_tokens=400, stop="never to be seen", seed=11)
    whole = asked()
    assert whole.usage.completion_tokens == 400, "with this seed the answer is over before its worker dies"
    expected, told = whole.choices[0].message.content, ""
    with asked(stream=True) as stream:
        for number, chunk in enumerate(stream):
            told += chunk.choices[0].delta.content or ""
            if number == 5:
                server.kill_worker("sample")
    assert told == expected


def test_many_at_once_share_the_batch(server: ServerProcess) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:

            async def ask(number: int) -> str:
                stream = await client.chat.completions.create(
                    model=TALKING, messages=HELLO, max_tokens=30, seed=number, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(ask(number % 4) for number in range(16)))

    texts = asyncio.run(ask_all())
    assert texts[:4] * 4 == texts
    assert len(set(texts[:4])) > 1


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a text or a list"),
        ({"messages": [{"role": "user", "content": "raise"}]}, "messages", "Not that word, please."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0]",
            "text only",
        ),
        ({"n": 5000}, "n", "5000"),
        ({"n": 0}, "n", "0"),
        ({"max_tokens": 5000}, "max_tokens", "room for"),
        ({"messages": [{"role": "user", "content": "x y " * 5000}]}, "messages", "shorten"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"temperature": "warm"}, "temperature", "temperature"),
        ({"top_p": 2}, "top_p", "top_p"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"stop": "x" * 300}, "stop", "256"),
        ({"n": 1000, "max_tokens": 1000, "logprobs": True, "top_logprobs": 20}, "logprobs", "21,000,000"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs", "20"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"frequency_penalty": 1.5}, "frequency_penalty", "not possible"),
        ({"logit_bias": {"5": 3}}, "logit_bias", "not possible"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not possible"),
        ({"tool_choice": "required"}, "tool_choice", "auto"),
        ({"model": MUTE}, "model", "chat template"),
        ({"model": "tinker://nonsense"}, "model", "tinker://nonsense"),
    ],
    ids=lambda value: None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_by_name(
    chat: Ask, changes: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(stream=stream, **changes)
    assert refused.value.param == param
    assert words in str(refused.value)
    assert refused.value.type == "invalid_request_error"


def test_what_changes_nothing_is_ignored(chat: Ask) -> None:
    extra = {"top_k": 5, "whatever": 1}
    answer = chat(user="me", frequency_penalty=0, response_format={"type": "text"}, extra_body=extra)
    assert answer.choices[0].message.content == chat(extra_body={"top_k": 5}).choices[0].message.content


def test_keys_and_names_that_are_not_known(server: ServerProcess, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    nobody = client.with_options(api_key="tml-wrong")
    with pytest.raises(openai.AuthenticationError) as unknown:
        nobody.models.list()
    assert unknown.value.code == "invalid_api_key"
    answer = server.call("POST", "/v1/embeddings", {})
    assert (answer.status, answer.json()["error"]["code"]) == (404, "not_found")


# --- litellm ---------------------------------------------------------------------------------------------------------


LITELLM = """
import asyncio, json, sys
import litellm

where, messages = json.loads(sys.argv[1]), json.loads(sys.argv[2])
asked = {"model": "openai/tiny/talking", "messages": messages, **where}
chat = litellm.completion(**asked).choices[0].message.content
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))

async def ask():
    return (await litellm.acompletion(**asked)).choices[0].message.content

later = asyncio.run(ask())
text = litellm.text_completion(model="text-completion-openai/tiny/talking", prompt="The quick", **where).choices[0].text
try:
    litellm.completion(**{**asked, "model": "openai/gpt-4"})
except litellm.NotFoundError:
    print(json.dumps([chat, streamed, later, text]))
"""


def test_litellm_chats_streams_and_completes(server: ServerProcess, chat: Ask, complete: Ask) -> None:
    """In a process of its own, as it leaves connections open."""
    where = {"api_base": f"{server.url}/v1", "api_key": KEY, "max_tokens": 40, "seed": 7, "num_retries": 0}
    done = subprocess.run(
        [sys.executable, "-c", LITELLM, json.dumps(where), json.dumps(HELLO)],
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # else it fetches a list of prices
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = chat().choices[0].message.content
    assert json.loads(done.stdout.splitlines()[-1]) == [expected, expected, expected, complete().choices[0].text]


# --- the page about it -----------------------------------------------------------------------------------------------


def test_the_page_about_it_can_be_followed(server: ServerProcess) -> None:
    page = DOCS / "how-to" / "openai.md"
    env = {**os.environ, "TINKER_API_KEY": KEY, "OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{server.url}/v1"}

    def run(program: list[str], texts: list[str]) -> str:
        text = "\n".join(texts).replace("Qwen/Qwen3-0.6B", TALKING).replace("http://127.0.0.1:8000", server.url)
        done = subprocess.run([*program, text], env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (shell,) = blocks(page, "bash")
    assert json.loads(run(["bash", "-ec"], [shell]))["usage"]["completion_tokens"] == 20
    assert TALKING in run([sys.executable, "-c"], blocks(page, "py"))
