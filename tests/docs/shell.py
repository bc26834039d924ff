"""Shell commands on the pages: taken apart to be checked one by one, or run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from tinsmith.cli.main import cli

PROGRAMS = Path(sys.executable).parent
_HEREDOC = re.compile(r"<<'(\w+)'\n.*?^\1$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    """Every command as its words, assignments before it included."""
    text = _COMMENT.sub("", _HEREDOC.sub("", text).replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if set(word) - set("();|&\n"):
            words.append(word)
        elif words:
            yield words
            words = []


def program(words: list[str]) -> list[str]:
    """The command itself: its name without a folder, and its arguments."""
    rest = [*words]
    while rest and (rest[0] in ("export", "sudo") or _ASSIGNMENT.fullmatch(rest[0])):
        rest.pop(0)
    if rest and rest[0] == "-u":  # of sudo, with the user's name
        rest = rest[2:]
    return [Path(rest[0]).name, *rest[1:]] if rest else []


def assigned(words: list[str]) -> list[str]:
    """The variables that a command sets."""
    return [found[1] for word in words if (found := _ASSIGNMENT.fullmatch(word))]


def check_tinsmith(arguments: list[str]) -> None:
    """Raises unless `tinsmith` takes these arguments."""
    command: click.Command = cli
    context = cli.make_context("tinsmith", [*arguments])
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command = found
        context = command.make_context(name, rest, parent=context)


def run_shell(parts: Sequence[str], env: Mapping[str, str]) -> str:
    """Runs scripts one after the other in one shell, which ends at the first command that fails; gives its output."""
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(parts)],
        env={**os.environ, **env, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
