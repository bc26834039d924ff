"""Render a conversation with the chat template that the model's authors published.

Nothing in Tinsmith calls this by itself. The text equals that of `transformers`; one default differs:
`add_generation_prompt` is on, because the usual next step is to sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from tinsmith.errors import InvalidInputError, InvalidTypeError, MissingExtraError, TinkerError, TokenizerError
from tinsmith.text.fast_tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

# Options of the method of the same name in transformers. Taken as template variables they would silently do nothing.
_NOT_VARIABLES = frozenset(
    {
        "chat_template",
        "continue_final_message",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenizer_kwargs",
        "truncation",
    }
)

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


@overload
def apply_chat_template(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    tokenize: Literal[True] = True,
    **template_variables: Any,
) -> list[int]: ...
@overload
def apply_chat_template(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    tokenize: Literal[False],
    **template_variables: Any,
) -> str: ...
def apply_chat_template(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    tokenize: bool = True,
    **template_variables: Any,
) -> list[int] | str:
    """The conversation as ids, or as text with `tokenize=False`.

    `messages` are dicts with a `role` and mostly a `content`, `tools` are JSON schemas. What else the template
    understands, such as `enable_thinking`, is passed by its name.
    """
    _check(messages, tools, template_variables)
    options = {"add_generation_prompt": add_generation_prompt} | template_variables
    try:
        if isinstance(tokenizer, Tokenizer):
            text = _render(tokenizer, messages, tools, options)
            return tokenizer.encode(text, add_special_tokens=False) if tokenize else text
        return _render_with_own_code(tokenizer, list(messages), tools=tools, tokenize=tokenize, **options)
    except TinkerError:
        raise
    except Exception as error:  # a template can fail in every way a Python expression can
        raise InvalidInputError(
            f"The chat template of {_name(tokenizer)!r} failed on these messages: {error}. "
            "Check their roles, the order of the roles and the type of each content.",
            field="messages",
        ) from error


def _render_with_own_code(tokenizer: Any, messages: list[Mapping[str, Any]], **options: Any) -> list[int] | str:
    """A tokenizer that brings its code may format messages and tools there, before or instead of a template."""
    if not hasattr(tokenizer, "apply_chat_template"):
        raise _no_template(tokenizer, "it has none")
    rendered: list[int] | str = tokenizer.apply_chat_template(messages, return_dict=False, **options)
    return rendered


def _check(messages: object, tools: object, variables: Mapping[str, Any]) -> None:
    _check_mappings("messages", messages, "dicts with a 'role', such as {'role': 'user', 'content': 'Hello'}")
    if not messages:
        raise InvalidInputError("A conversation needs at least one message.", field="messages", value=messages)
    if tools is not None:
        _check_mappings("tools", tools, "JSON schemas; transformers.utils.get_json_schema makes one of a function")
    if refused := _NOT_VARIABLES & variables.keys():
        raise InvalidInputError(
            f"{sorted(refused)} are options of transformers, not of this function, which returns a plain list or str. "
            "To use another template, assign it to tokenizer.chat_template.",
            field=min(refused),
        )


def _check_mappings(field: str, value: object, wanted: str) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidTypeError(f"{field} must be a list of {wanted}.", field=field, value=value)
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise InvalidTypeError(
                f"{field}[{index}] is a {type(item).__name__}; {field} must be a list of {wanted}.",
                field=f"{field}[{index}]",
                value=item,
            )


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    template = _compile(_template_text(tokenizer, has_tools=tools is not None))
    names: dict[str, Any] = {"documents": None} | tokenizer.special_tokens_map
    names |= {name: _plain(value, name) for name, value in variables.items()}
    names["messages"] = [_with_reasoning_names(message) for message in _plain(list(messages), "messages")]
    names["tools"] = None if tools is None else _plain(list(tools), "tools")
    text: str = template.render(names)
    return text


def _template_text(tokenizer: Tokenizer, *, has_tools: bool) -> str:
    template = tokenizer.chat_template
    if isinstance(template, str):
        return template
    if not template:
        raise _no_template(tokenizer, "it has none")
    name = "tool_use" if has_tools and "tool_use" in template else "default"
    if name not in template:
        raise _no_template(tokenizer, f"it has {sorted(template)}, none of them called 'default'")
    return template[name]


def _no_template(tokenizer: Any, reason: str) -> TokenizerError:
    return TokenizerError(
        f"There is no chat template to use for the tokenizer {_name(tokenizer)!r}: {reason}. Assign a Jinja template "
        "to tokenizer.chat_template, or build the prompt yourself and call tokenizer.encode."
    )


def _name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__))


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = _environment()
    from jinja2 import TemplateSyntaxError

    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise TokenizerError(f"The chat template is not valid Jinja, line {error.lineno}: {error}") from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Jinja as chat templates expect it. They come from the network, hence the sandbox."""
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError("jinja2", "tokenizers", "Rendering a chat template") from error

    class GenerationBlock(Extension):  # type: ignore[misc]
        """`{% generation %}` marks what the assistant wrote, for training masks; the text is the same without it."""

        tags = frozenset({"generation"})

        def parse(self, parser: Parser) -> nodes.Node:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=lineno)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys, which no model has seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _plain(value: Any, place: str) -> Any:
    """A copy made of JSON types only, so that a template can neither call methods of rich objects nor print them."""
    if value is None or isinstance(value, bool):
        return value
    for scalar in (str, int, float):
        if isinstance(value, scalar):  # of an enum member: its value, which is not what str() gives
            return getattr(scalar, f"__{scalar.__name__}__")(value)
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = (_plain(item, f"{place}[{index}]") for index, item in enumerate(value))
        return list(items) if isinstance(value, list) else tuple(items)
    if getattr(value, "shape", None) == ():  # one number of numpy or torch
        return value.item()
    raise InvalidTypeError(
        f"{place} is a {type(value).__name__}; a chat template takes str, numbers, bool, None, lists and dicts. "
        "Turn the object into a dict first; a picture can be named by a str.",
        field=place,
        value=value,
    )


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning has three names in use; templates read one of the first two, so a message gets both."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
