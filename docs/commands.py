"""Writes `reference/commands.md`: every command with its options, as the program itself tells them."""

from collections.abc import Iterator
from pathlib import Path

import click

from tinsmith.cli.main import cli

PAGE = Path(__file__).parent / "reference" / "commands.md"
INTRODUCTION = """# Commands

`pip install '.[cli]'` in a checkout brings the program `tinsmith`. Options of all commands stand before the command,
as in `tinsmith --format json run list`. Written by `python docs/commands.py` from the commands themselves.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | failed; also if only some of several checkpoints could be deleted |
| 2 | wrong usage, such as an unknown column; nothing was sent |
| 130 | interrupted by Ctrl-C |
| 141 | whoever read the output closed it, such as `head` |

- Results go to standard output, everything else to standard error: notes, questions, progress bars (on a terminal
  only), and errors as `Error:` with the reason and what to do next. `TINKER_LOG=debug` adds the traceback.
- JSON is indented by two, with times in ISO 8601. Lists that `--limit` may cut say `total` and `shown`.
- A server that does not answer is given up after `--timeout` seconds, retries included. Transfers are more patient once
  the server has answered. Interrupted downloads go on where they stopped when the same command is run again.
- What cannot be undone is asked for first. Without a terminal to ask at, such commands refuse to work without `--yes`.
- Server and key come from the options, else from the [environment](settings.md), else from `tinsmith auth login`.

Commands, options and values complete with the tab key after `eval "$(tinsmith completion bash)"`; put that line into
`~/.bashrc`. For other shells see [tinsmith completion](#tinsmith-completion).
"""


def render() -> str:
    root = click.Context(cli, info_name="tinsmith")
    return "\n".join([INTRODUCTION, *_sections(root)])


def _sections(context: click.Context) -> Iterator[str]:
    """This command and those below it."""
    command = context.command
    yield _section(context)
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(context)):
            below = command.get_command(context, name)
            assert below is not None
            yield from _sections(click.Context(below, info_name=name, parent=context))


def _section(context: click.Context) -> str:
    command = context.command
    lines = [f"## {context.command_path}\n", *(f"{paragraph}\n" for paragraph in _paragraphs(command.help or ""))]
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    options = [each for each in command.params if isinstance(each, click.Option)]
    usage = [context.command_path, *(["[OPTIONS]"] if options else []), *map(_argument, arguments)]
    usage += ["COMMAND ..."] if isinstance(command, click.Group) else []
    lines.append(f"```text\n{' '.join(usage)}\n```\n")
    if options:
        lines += ["| option | |", "| --- | --- |", *map(_row, options), ""]
    return "\n".join(lines)


def _argument(argument: click.Argument) -> str:
    name = argument.name.upper() if argument.name else ""
    shown = name if argument.required else f"[{name}]"
    return f"{shown} ..." if argument.nargs == -1 else shown


def _row(option: click.Option) -> str:
    """Written here and not by click, whose releases differ in how they write it."""
    # In braces, because a bar would end the cell in some readers of Markdown and stand with its backslash in others.
    choices = f"{{{','.join(option.type.choices)}}}" if isinstance(option.type, click.Choice) else None
    value = "" if option.is_flag else f" {option.metavar or choices}"
    default = f" Default: {option.default:g}." if isinstance(option.default, float) else f" Default: {option.default}."
    text = (option.help or "") + (default if option.show_default else " Required." if option.required else "")
    return f"| `{', '.join(option.opts)}{value}` | {' '.join(text.split())} |"


def _paragraphs(text: str) -> Iterator[str]:
    """As click reads them: a paragraph that begins with a backspace character keeps its lines."""
    for paragraph in text.strip().split("\n\n"):
        lines = [line.strip() for line in paragraph.strip().splitlines()]
        if lines[0] == "\b":
            yield "\n".join(["```text", *lines[1:], "```"])
        else:
            yield " ".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
