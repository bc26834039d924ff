"""Chat templates render as transformers renders them, and only when asked."""

from __future__ import annotations

import copy
import enum
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_tokenizer import CHATML_CONFIG, byte_level_bpe, write_folder
from tinsmith.errors import InvalidInputError, InvalidTypeError, MissingExtraError, TokenizerError
from tinsmith.text import chat_template as module
from tinsmith.text.chat_template import apply_chat_template
from tinsmith.text.fast_tokenizer import Tokenizer
from tinsmith.text.tokenizer_folder import read_tokenizer

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last_query < 0 and message.role == "user" %}
        {%- set ns.last_query = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content is string and loop.index0 > ns.last_query %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

HEADERS_AND_DATE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%C") %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{% endif %}
"""

STRICT_TURNS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '

' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {{ '<turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '
' + (prefix if loop.first else "") }}
    {%- if message['content'] is iterable and message['content'] is not string -%}
        {%- for item in message['content'] -%}
            {{ '<image>' if item['type'] == 'image' else item['text'] | trim }}
        {%- endfor -%}
    {%- else -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end>
' }}
{%- endfor -%}
{{ '<turn>model
' if add_generation_prompt }}
"""

MACROS_AND_MARKS = """\
{%- macro say(message, index) %}
{{ index }}: {{ message.role|upper }}{% if message.thinking %} ({{ message.thinking }}){% endif %}

{%- endmacro %}
{% for message in messages %}
    {% if loop.index > 4 %}{% break %}{% endif %}
    {% if message.role == "assistant" %}
{{ say(message, loop.index) }}
        {% generation %}
{{ message.content }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
{{ say(message, loop.index) }} {{ message.content }}
    {% endif %}
{% endfor %}
{% if documents is not none %}{{ documents | tojson(separators=(",", ":"), sort_keys=true) }}{% endif %}
{{ dict(a=1, b="é") | tojson(ensure_ascii=true) }}
"""

TEMPLATES = {
    "chatml": CHATML,
    "headers and date": HEADERS_AND_DATE,
    "strict turns": STRICT_TURNS,
    "macros and marks": MACROS_AND_MARKS,
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wéather <now> & "then", it\'s 你好',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
USER = {"role": "user", "content": "  What is the weather in Köln? <b>\n"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [USER],
    "a system prompt": [{"role": "system", "content": "Be brief."}, USER],
    "several turns": [USER, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And you?"}],
    "a tool": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3 °C"}],
    "reasoning": [USER, {"role": "assistant", "content": "Rain.", "reasoning_content": "It is November."}],
    "reasoning as older code names it": [USER, {"role": "assistant", "content": "Rain.", "thinking": "November."}],
    "reasoning as servers name it": [USER, {"role": "assistant", "content": "Rain.", "reasoning": "November."}],
    "parts": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What is this? "}]}],
    "five turns": [USER, {"role": "assistant", "content": "a"}, USER, {"role": "assistant", "content": "b"}, USER],
    "roles out of order": [USER, USER],
}

FAILED = "the template refused the conversation"


def theirs(tokenizer: PreTrainedTokenizerFast, *args: Any, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(*args, return_dict=False, **options)
    except Exception:  # noqa: BLE001 - whatever it raises, ours must raise too
        return FAILED


def ours(tokenizer: Tokenizer, *args: Any, **options: Any) -> Any:
    try:
        return apply_chat_template(tokenizer, *args, **options)
    except InvalidInputError:
        return FAILED


def both(folder: Path, files: dict[str, Any]) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    write_folder(folder, byte_level_bpe(["<s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>"]), files)
    return read_tokenizer(folder / "tokenizer.json", name=str(folder)), PreTrainedTokenizerFast.from_pretrained(folder)


def tiny(template: str | dict[str, str] | None) -> Tokenizer:
    return Tokenizer(byte_level_bpe(), name_or_path="tiny", chat_template=template)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_and_the_ids_equal_those_of_transformers(template: str, tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": TEMPLATES[template]}
    light, full = both(tmp_path, {"tokenizer_config.json": config})

    rendered = 0
    for conversation in CONVERSATIONS.values():
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": True, "tools": TOOLS},
            {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 Jan", "bos_token": "<other>"},
            {"add_generation_prompt": False, "documents": [{"title": "t", "text": "é"}], "tools": []},
        ):
            text = theirs(full, conversation, tokenize=False, **options)
            assert text == ours(light, conversation, tokenize=False, **options)
            assert theirs(full, conversation, **options) == ours(light, conversation, **options)
            rendered += text != FAILED
    assert rendered >= 20


def test_the_generation_prompt_is_on_by_default() -> None:
    prompt = apply_chat_template(tiny(CHATML), [USER], tokenize=False)

    assert prompt.endswith("<|im_start|>assistant\n")


def test_no_special_token_is_added_to_what_the_template_wrote() -> None:
    tokenizer = Tokenizer(byte_level_bpe(["<s>"], bos="<s>"), chat_template="<s>{{ messages[0].content }}")

    assert apply_chat_template(tokenizer, [{"role": "user", "content": "fox"}]) == tokenizer.encode("fox")


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {**CHATML_CONFIG, "chat_template": "from the configuration"}},
        {"chat_template.jinja": "from the file"},
        {
            "tokenizer_config.json": {"chat_template": "from the configuration"},
            "chat_template.jinja": "from the file",
        },
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "default", "template": "default"},
                    {"name": "tool_use", "template": "tool use"},
                ]
            }
        },
        {"chat_template.jinja": "default", "additional_chat_templates/tool_use.jinja": "tool use"},
        {"chat_template.jinja": "default", "additional_chat_templates/rag.jinja": "rag"},
    ],
)
def test_the_template_is_found_where_transformers_finds_it(files: dict[str, Any], tmp_path: Path) -> None:
    light, full = both(tmp_path, files)

    assert light.chat_template == full.chat_template
    for tools in (None, TOOLS):
        assert theirs(full, [USER], tools=tools, tokenize=False) == ours(light, [USER], tools=tools, tokenize=False)


def test_the_template_of_a_processor_is_used_where_there_is_no_other(tmp_path: Path) -> None:
    light, _ = both(tmp_path, {"chat_template.json": {"chat_template": "from the processor"}})

    assert apply_chat_template(light, [USER], tokenize=False) == "from the processor"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "it has none"),
        ({}, "it has none"),
        ({"rag": "x", "tool_use": "y"}, r"it has \['rag', 'tool_use'\], none of them called 'default'"),
    ],
)
def test_a_missing_template_is_reported_with_the_way_out(template: Any, problem: str) -> None:
    with pytest.raises(TokenizerError, match=rf"no chat template .*'tiny': {problem}\. Assign .* tokenizer\.encode"):
        apply_chat_template(tiny(template), [USER])


def test_a_template_that_is_no_jinja_is_reported_with_its_line() -> None:
    with pytest.raises(TokenizerError, match="not valid Jinja, line 2"):
        apply_chat_template(tiny("fine\n{% if %}"), [USER])


def test_what_the_template_says_against_the_messages_reaches_the_user() -> None:
    with pytest.raises(InvalidInputError, match="'tiny' failed on these messages: Only one message, please"):
        apply_chat_template(tiny("{{ raise_exception('Only one message, please') }}"), [USER])


@pytest.mark.parametrize("content", [None, 3, ["a list"]])
def test_a_content_that_the_template_cannot_join_is_refused(content: Any) -> None:
    with pytest.raises(InvalidInputError, match="Check their roles, the order of the roles and the type"):
        apply_chat_template(tiny("{{ 'User: ' + messages[0].content }}"), [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.format.__globals__['os'] }}",
        "{{ raise_exception.__globals__['json'].dumps('x') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    with pytest.raises(InvalidInputError, match="failed on these messages"):
        apply_chat_template(tiny(attack), [USER])


def test_a_tokenizer_with_its_own_method_renders_with_that(tmp_path: Path) -> None:
    light, full = both(tmp_path, {"tokenizer_config.json": {"bos_token": "<s>", "chat_template": STRICT_TURNS}})

    assert apply_chat_template(full, [USER]) == apply_chat_template(light, [USER])
    with pytest.raises(InvalidInputError, match="failed on these messages: Conversation roles must alternate"):
        apply_chat_template(full, [USER, USER])


def test_a_tokenizer_that_knows_no_templates_is_reported() -> None:
    class Foreign:
        name_or_path = "foreign"

    with pytest.raises(TokenizerError, match="no chat template to use for the tokenizer 'foreign'"):
        apply_chat_template(Foreign(), [USER])  # type: ignore[call-overload]


def test_messages_are_not_changed() -> None:
    conversation = copy.deepcopy(CONVERSATIONS["reasoning as servers name it"])
    before = copy.deepcopy(conversation)

    apply_chat_template(tiny(CHATML), conversation, tools=TOOLS)

    assert conversation == before


def test_enums_and_numbers_of_arrays_are_taken_by_their_value() -> None:
    class Role(str, enum.Enum):  # noqa: UP042 - str() of a StrEnum would be its value anyway
        USER = "user"

    messages = [{"role": Role.USER, "content": "x"}]
    template = "{{ messages[0].role }} {{ count }} {{ flag is false }} {{ share }}"

    rendered = apply_chat_template(
        tiny(template), messages, tokenize=False, count=numpy.int64(3), flag=False, share=torch.tensor(0.5)
    )

    assert rendered == "user 3 True 0.5"


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([{"role": "user", "content": numpy.zeros(3)}], "messages[0].content is a ndarray"),
        (
            [USER, {"role": "user", "content": [{"type": "text", "text": b"x"}]}],
            "messages[1].content[0].text is a bytes",
        ),
        ([{"role": "user", "content": "x", "when": datetime(2025, 1, 1)}], "messages[0].when is a datetime"),
    ],
)
def test_objects_that_are_no_plain_data_are_refused_with_their_place(messages: Any, place: str) -> None:
    with pytest.raises(InvalidTypeError) as caught:
        apply_chat_template(tiny(CHATML), messages)

    assert str(caught.value).startswith(place)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("Hello", "messages must be a list of dicts"),
        (USER, "messages must be a list of dicts"),
        (None, "messages must be a list of dicts"),
        (["Hello"], r"messages\[0\] is a str; messages must be a list of dicts"),
        ([[USER]], r"messages\[0\] is a list"),
    ],
)
def test_messages_must_be_a_list_of_dicts(messages: Any, problem: str) -> None:
    with pytest.raises(InvalidTypeError, match=problem):
        apply_chat_template(tiny(CHATML), messages)


def test_a_conversation_needs_a_message() -> None:
    with pytest.raises(InvalidInputError, match="at least one message"):
        apply_chat_template(tiny(CHATML), [])


def test_a_function_is_no_tool() -> None:
    with pytest.raises(InvalidTypeError, match=r"tools\[0\] is a function; .*get_json_schema"):
        apply_chat_template(tiny(CHATML), [USER], tools=[lambda city: city])  # type: ignore[list-item]


@pytest.mark.parametrize("option", ["return_tensors", "chat_template", "continue_final_message", "max_length"])
def test_options_of_transformers_are_not_swallowed_as_variables(option: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'{option}'.* are options of transformers"):
        apply_chat_template(tiny(CHATML), [USER], **{option: "x"})


def test_a_missing_jinja_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    module._environment.cache_clear()
    module._compile.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)

    with pytest.raises(MissingExtraError, match=r"Rendering a chat template needs the package 'jinja2'"):
        apply_chat_template(tiny(CHATML), [USER])
