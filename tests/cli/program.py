"""The program as its users meet it: in this process where only words matter, and as a process of its own elsewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

COMMAND = Path(sys.executable).with_name("tinsmith")
ROOT = Path(__file__).parents[2]
KEY = "tml-key-of-the-tests"
SECONDS = 60.0
WAITING = re.compile(r"^Waiting for \S+ \.\.\.\n", re.MULTILINE)
"""What a command says while a server takes its time; on a busy machine every server does."""


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self
        return json.loads(self.out)


InProcess = Callable[..., Done]
"""Runs a command line in this process."""


def environment(home: Path, **variables: str) -> dict[str, str]:
    """A user's environment, with nothing of ours in it but what is given."""
    ours = ("TINKER", "TINSMITH", "HF_", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "HOME": str(home), "TERM": "xterm", **variables}


class Program:
    """Commands as processes, all with the same environment."""

    def __init__(self, home: Path, **variables: str) -> None:
        self.home = home
        self._environment = environment(home, **variables)

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen([COMMAND, *arguments], env=self._environment, cwd=self.home, text=True, **streams)

    def __call__(self, *arguments: str | Path, **options: Any) -> Done:
        given = options.pop("input", None)
        if given is not None:
            options["stdin"] = subprocess.PIPE
        with self.start(*arguments, **options) as process:
            try:
                out, err = process.communicate(given, timeout=SECONDS)
            except BaseException:
                process.kill()
                raise
        return Done(process.returncode, out or "", WAITING.sub("", err or ""))

    @contextmanager
    def at_a_terminal(self, *arguments: str | Path) -> Iterator[Terminal]:
        """Started with a terminal as its input and its standard error; what it prints goes into a pipe."""
        ours, theirs = pty.openpty()
        try:
            with self.start(*arguments, stdin=theirs, stderr=theirs, start_new_session=True) as process:
                os.close(theirs)
                try:
                    yield Terminal(process, ours)
                finally:
                    process.kill()
        finally:
            os.close(ours)


class Terminal:
    """The other end of a terminal: what a person sees and types."""

    def __init__(self, process: subprocess.Popen[str], descriptor: int) -> None:
        self.process = process
        self.seen = ""
        self._descriptor = descriptor

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + SECONDS
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} was not shown, but this was: {self.seen!r}"
            assert self._read(), f"the program ended without {text!r}, but with: {self.seen!r}"

    def type_unseen(self, text: str) -> None:
        """Once nothing is echoed any more: what is typed before that is thrown away."""
        end = time.monotonic() + SECONDS
        while termios.tcgetattr(self._descriptor)[3] & termios.ECHO:
            assert time.monotonic() < end, "the terminal still shows what is typed"
            time.sleep(0.01)
        os.write(self._descriptor, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, until it is heard: one that comes just before a program begins to read a line is not."""
        end = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):  # patiently: a second one would end the program's own end
                self.process.wait(5)

    def end(self) -> Done:
        while self._read():
            pass
        code = self.process.wait(SECONDS)
        assert self.process.stdout is not None
        return Done(code, self.process.stdout.read(), self.seen)

    def _read(self) -> bool:
        """Takes in what is shown next; False when the program has let go of the terminal."""
        if not select.select([self._descriptor], [], [], SECONDS)[0]:
            return False
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # how Linux says that nobody is at the other end
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


def variables_of(url: str, key: str = KEY) -> Mapping[str, str]:
    return {"TINKER_BASE_URL": url, "TINKER_API_KEY": key}
