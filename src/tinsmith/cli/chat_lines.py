"""What a person types, or a program pipes in: one message after the other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tinsmith.cli.output import note

PROMPT, GOES_ON_PROMPT = "> ", ". "
GOES_ON = "\\"
KEPT = 1000


def is_interactive() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def messages(*, keep_history: bool) -> Iterator[str]:
    """Each message of the input, until it ends. A line that ends with a backslash goes on in the next."""
    if sys.stdin is None:
        return
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # a stray byte is no reason to end
    read = _from_a_person(keep_history) if is_interactive() else _from_a_program
    while (text := _message(read)) is not None:
        yield text


def _message(read: Callable[[str], str | None]) -> str | None:
    line = read(PROMPT)
    text = line
    while text is not None and line is not None and text.endswith(GOES_ON):
        line = read(GOES_ON_PROMPT)
        text = text.removesuffix(GOES_ON) + ("" if line is None else f"\n{line}")
    return text


def _from_a_program(prompt: str) -> str | None:
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


def _from_a_person(keep_history: bool) -> Callable[[str], str | None]:
    history = History(_history_file()) if keep_history else None
    if history is not None:
        history.recall()

    def read(prompt: str) -> str | None:
        try:
            line = input(prompt)
        except EOFError:
            return None
        if history is not None:
            history.add(line)
        return line

    return read


def _history_file() -> Path:
    from tinsmith.client.local import DEFAULT_STATE

    return Path(os.environ.get("TINSMITH_STATE") or DEFAULT_STATE).expanduser() / "chat_history"


class History:
    """Earlier lines, for the arrow keys: one JSON text per line, in a file that only its owner can read.

    Written line by line and by ourselves: libraries for editing lines differ in their formats, and one that writes at
    the end would lose what another chat wrote in the meantime.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_usable = True

    def recall(self) -> None:
        """Makes the latest lines known to the editor, and forgets the oldest."""
        with suppress(ImportError, OSError, ValueError):
            import readline

            lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
            if len(lines) > 2 * KEPT:
                self._write("w", "".join(f"{line}\n" for line in lines[-KEPT:]))
            for line in lines[-KEPT:]:
                readline.add_history(json.loads(line))

    def add(self, line: str) -> None:
        if not (line.strip() and self._is_usable):
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._write("a", json.dumps(line) + "\n")
        except OSError as error:
            self._is_usable = False
            note(f"The history of this chat is not kept: {error.strerror}: {self._file}")

    def _write(self, mode: str, text: str) -> None:
        with open(self._file, mode, encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(text)
