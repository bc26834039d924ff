"""A file of examples is read as a whole, or refused with the lines that are bad and why."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tinsmith.errors import InvalidInputError
from tinsmith.recipes.examples import MAX_TOLD, read_examples

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr!"}
GOOD = json.dumps({"messages": [USER, ASSISTANT]})


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def test_conversations_keep_all_that_a_template_may_want(tmp_path: Path) -> None:
    messages = [USER, {**ASSISTANT, "reasoning_content": "Pirates say so."}]
    tools = [{"type": "function", "function": {"name": "sail"}}]
    file = read_examples(write(tmp_path / "data", json.dumps({"messages": messages, "tools": tools, "id": 7})))
    (example,) = file.examples
    assert (example.line, example.messages, example.tools, example.is_chat) == (1, messages, tools, True)
    assert file.sha256 == sha256((tmp_path / "data").read_bytes()).hexdigest()


def test_a_prompt_and_its_completion_are_a_question_and_its_answer(tmp_path: Path) -> None:
    (example,) = read_examples(write(tmp_path / "data", '{"prompt": "Hi", "completion": "Arr!"}')).examples
    assert (example.messages, example.is_chat) == ([USER, ASSISTANT], False)


def test_blank_lines_line_ends_of_windows_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    file = read_examples(write(tmp_path / "data", b"\xef\xbb\xbf" + GOOD.encode() + b"\r", "", "  ", GOOD, ""))
    assert [example.line for example in file.examples] == [1, 4]


def test_an_answer_that_is_a_call_of_a_tool_may_say_nothing(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "sail", "arguments": {}}}]}
    assert read_examples(write(tmp_path / "data", json.dumps({"messages": [USER, call]}))).examples


def messages(*items: object) -> str:
    return json.dumps({"messages": items})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"messages": [', 'is not JSON', ),
        (b'{"prompt": "\xff"}', "byte 13 is no UTF-8. Save the file as UTF-8."),
        ("[1, 2]", "[1, 2] is not a JSON object. Put one object on each line"),
        ('"text"', '"text" is not a JSON object'),
        ("{}", 'its keys are none; it must have "messages", or "prompt" and "completion"'),
        ('{"question": "a", "answer": "b"}', 'its keys are "question", "answer"; it must have "messages"'),
        ('{"messages": [], "prompt": "a"}', 'its keys are "messages", "prompt"; it must have "messages", or'),
        ('{"prompt": "a"}', "completion is missing; it must be a text"),
        ('{"completion": "a"}', "prompt is missing; it must be a text"),
        ('{"prompt": ["a"], "completion": "b"}', 'prompt is ["a"]; it must be a text'),
        ('{"prompt": "a", "completion": " "}', 'completion is " ", which is empty'),
        ('{"messages": "Hi"}', 'messages is "Hi"; it must be a list such as'),
        ('{"messages": []}', "messages is []; it must be a list such as"),
        (messages("Hi"), 'messages[0] is "Hi"; it must be an object with "role" and "content"'),
        (messages(USER, {"content": "a"}), "messages[1].role is missing; it must be one of system,"),
        (messages(USER, {"role": "bot", "content": "a"}), 'messages[1].role is "bot"; it must be one of system,'),
        (messages(USER, {"role": ["user"], "content": "a"}), 'messages[1].role is ["user"]; it must be one of'),
        (messages({"role": "user", "content": 5}, ASSISTANT), "messages[0].content is 5; it must be a text"),
        (messages({"role": "user"}, ASSISTANT), "messages[0].content is missing; it must be a text"),
        (messages(USER, {"role": "assistant", "content": ""}), 'messages[1].content is "", which is empty'),
        (messages(USER, {"role": "assistant", "content": None}), "messages[1].content is null; it must be a text"),
        (messages(USER), "messages has no message of the assistant, so there is nothing to learn"),
        (messages(ASSISTANT, USER), 'messages[0].role is "assistant"; put what it answers'),
        (json.dumps({"messages": [USER, ASSISTANT], "tools": "sail"}), 'tools is "sail"; it must be a list of JSON'),
        ('{"prompt": "a", "completion": "b"}', "it holds a prompt and a completion, but line 1 holds messages"),
        ("[" * 100_000, "is not JSON"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_field_its_value_and_what_to_do(
    tmp_path: Path, line: str | bytes, told: str
) -> None:
    path = write(tmp_path / "data.jsonl", GOOD, "", line)
    with pytest.raises(InvalidInputError) as refused:
        read_examples(path)
    assert str(refused.value).startswith(f"{path}, line 3: ")
    assert told in str(refused.value)
    assert len(str(refused.value)) < 500


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as refused:
        read_examples(write(tmp_path / "data", *["{}"] * (MAX_TOLD + 3)))
    told = str(refused.value).splitlines()
    assert len(told) == MAX_TOLD + 1
    assert told[-1] == "... and 3 more lines."


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_examples_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidInputError, match=r"holds no example\. Put one JSON object on each line"):
        read_examples(write(tmp_path / "data", content))
