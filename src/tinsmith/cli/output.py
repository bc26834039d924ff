"""The only way to stdout: tables for people, JSON for programs. Notes to the person at the terminal go to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from tinsmith.cli.errors import ClosedPipe, CommandFailed

_UNLIMITED_WIDTH = 10_000
"""A pipe has no width, and whoever reads from one wants whole ids."""


def emit(text: str) -> None:
    """Writes and flushes: what cannot be written must be noticed here, not when the interpreter exits."""
    if sys.stdout is None:  # closed before we were started
        return
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        abandon_stdout()
        raise ClosedPipe from None
    except OSError as error:
        abandon_stdout()
        raise CommandFailed(
            f"The output could not be written: {error.strerror}",
            remedy="Make room, or write somewhere else, and run the command again.",
        ) from error


def _write(stream: TextIO, text: str) -> None:
    """All of it. Under PYTHONUNBUFFERED, Python's own streams forget what a pipe did not take at once."""
    rest = text.encode(stream.encoding or "utf-8", "replace")
    while rest:
        rest = rest[stream.buffer.write(rest) :]
    stream.buffer.flush()


def emit_text(text: str) -> None:
    """Text of a model: as it is for programs, and unable to steer a terminal."""
    emit(printable(text) if _is_terminal() else text)


def abandon_stdout() -> None:
    """What is still in the buffer can go nowhere; without this the interpreter would try again when it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """A line for the person, if there is one."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()


def emit_json(value: Mapping[str, Any]) -> None:
    emit(json.dumps(value, indent=2) + "\n")


def emit_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """On a terminal that is too narrow, the lines of one row follow those of another."""
    cells = [[printable(cell) for cell in row] for row in rows]
    text = _table(columns, cells)
    if text is None:
        text = "\n".join(_lines(list(zip(columns, row, strict=True))) for row in cells)
    emit(f"{printable(title)}\n{text}" if title else text)


def emit_properties(title: str, properties: Iterable[tuple[str, str]]) -> None:
    cells = [(printable(name), printable(value)) for name, value in properties]
    text = _table(("Property", "Value"), cells)
    if text is None:
        text = _lines(cells)
    emit(f"{printable(title)}\n{text}" if title else text)


def _lines(properties: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in properties)
    return "".join(f"{name:{width}}  {value}\n" for name, value in properties)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str | None:
    """`None` where it is too wide: cells that are cut off or folded cannot be copied. Mere headings can be folded."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if _is_terminal() else _UNLIMITED_WIDTH)
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(Text(column), style="bright_cyan" if number == 0 else "")
    for row in rows:
        table.add_row(*map(Text, row))
    unlimited = console.options.update(width=_UNLIMITED_WIDTH)
    if rows and Measurement.get(console, unlimited, table).maximum > console.width:
        return None
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def printable(text: str) -> str:
    """Names, metadata and reasons are other people's texts, and shall not steer the terminal."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)
