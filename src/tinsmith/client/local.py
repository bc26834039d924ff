"""Local mode: `base_url="local"` finds the server of this machine, or starts it.

The server is a child process with a session of its own, so that Ctrl-C in one script does not end it under the others.
It ends by itself when the last script that uses it is gone; `tinsmith/sharing.py` says how it knows.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from tinsmith.errors import APIConnectionError, APITimeoutError, ConfigError, MissingExtraError, TinkerError
from tinsmith.sharing import RunningServer, SharedFolder

if TYPE_CHECKING:
    import filelock

LOCAL_KEY = "tml-local"
"""It takes any key. One for all, so that every script sees the same runs and checkpoints."""
DEFAULT_STATE = Path("~/.tinsmith")

SILENCE_SECONDS = 600.0
"""A server that says nothing for so long during its start is given up."""
QUIET_WAIT_SECONDS = 1.0
GATE_SECONDS = 3600.0
STOP_SECONDS = 10.0
LOOK_AGAIN_SECONDS = 0.1

_NEEDED = (
    "filelock",
    "torch",
    "uvicorn",
    "httptools",
    "starlette",
    "sqlalchemy",
    "alembic",
    "safetensors",
    "tokenizers",
    "jinja2",
)

_one_at_a_time = threading.Lock()
_registrations: dict[tuple[int, Path], filelock.BaseFileLock] = {}
"""What tells servers that this process uses them, by process: a forked child does not own its parent's."""


def local_server(state: Path, model: str = "") -> str:
    """The address of the server of this state folder, which is started if need be.

    `model` is what `tinsmith serve --model` takes, or empty for the embedded model.
    """
    _check_installed()
    state = state.expanduser().absolute()
    progress = _Progress(sys.stderr)
    try:
        folder = SharedFolder(state)
        with _one_at_a_time, _gate_of(folder, progress):
            _register(state, folder)
            server = _running_server(folder, progress)
            if server is None:
                return _start(state, model, folder, progress)
    except TinkerError:  # some of which are OSErrors too
        raise
    except OSError as error:
        raise ConfigError(f"{state} cannot be used: {error}. Set TINSMITH_STATE to a folder of yours.") from error
    finally:
        progress.clear()
    return _checked(server, model, state).url


def _check_installed() -> None:
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "local", "Local mode (base_url='local')")


def _register(state: Path, folder: SharedFolder) -> None:
    me = os.getpid(), state
    if me not in _registrations:
        _registrations[me] = folder.register()


@contextmanager
def _gate_of(folder: SharedFolder, progress: _Progress) -> Iterator[None]:
    import filelock

    gate = folder.gate()
    try:
        gate.acquire(timeout=QUIET_WAIT_SECONDS)
    except filelock.Timeout:
        progress.show("Waiting for another script that starts the local server, or for an old one to end")
        try:
            gate.acquire(timeout=GATE_SECONDS)
        except filelock.Timeout as error:
            message = f"Another process has held {gate.lock_file} for {GATE_SECONDS / 60:g} minutes. End it."
            raise APITimeoutError(None, message) from error
    try:
        yield
    finally:
        gate.release()


def _running_server(folder: SharedFolder, progress: _Progress) -> RunningServer | None:
    """None if there is none. One that is still starting was left behind by a script that ended meanwhile."""
    deadline = time.monotonic() + SILENCE_SECONDS
    while folder.server_lives():
        if (server := folder.announced()) is not None:
            return server
        if time.monotonic() > deadline:
            text = f"A local server has been starting for {SILENCE_SECONDS:g} s. End it; its log is {folder.log}."
            raise APITimeoutError(None, text)
        progress.show("Waiting for the local server")
        time.sleep(LOOK_AGAIN_SECONDS)
    return None


def _checked(server: RunningServer, model: str, state: Path) -> RunningServer:
    elsewhere = f"Set TINSMITH_STATE to another folder than {state}"
    if server.host != platform.node():
        raise ConfigError(f"The local server of this state folder runs on another machine, {server.host}. {elsewhere}.")
    if server.model != model:
        raise ConfigError(
            f"The local server (process {server.pid}) serves {server.model or 'the embedded model'}, not "
            f"{model or 'the embedded model'}. {elsewhere}, or end the scripts that use it."
        )
    return server


# --- starting --------------------------------------------------------------------------------------------------------


class _Message(msgspec.Struct, frozen=True):
    """What the server says while it starts; exactly one of the first three."""

    stage: str = ""
    ready: str = ""
    error: str = ""
    share: float = 0.0


def _start(state: Path, model: str, folder: SharedFolder, progress: _Progress) -> str:
    # -P: a script's neighbours are not the server's libraries.
    command = [sys.executable, "-P", "-m", "tinsmith.server.local", str(state), *([model] if model else [])]
    folder.forget_server()
    with folder.log.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(process, messages), name="tinsmith-local", daemon=True).start()
    try:
        return _wait_until_ready(process, messages, folder, progress)
    except BaseException:
        _end(process)
        raise


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    messages: queue.SimpleQueue[_Message | None],
    folder: SharedFolder,
    progress: _Progress,
) -> str:
    progress.show("Starting the local server")
    while True:
        try:
            message = messages.get(timeout=SILENCE_SECONDS)
        except queue.Empty:
            text = (
                f"The local server has said nothing for {SILENCE_SECONDS:g} s and was ended. Its log is {folder.log}."
            )
            raise APITimeoutError(None, text) from None
        if message is None:
            raise APIConnectionError(None, _last_words(process, folder))
        if message.error:
            raise ConfigError(f"The local server cannot start. {message.error}")
        if message.ready:
            return message.ready
        progress.show(message.stage, message.share)


def _listen(process: subprocess.Popen[bytes], messages: queue.SimpleQueue[_Message | None]) -> None:
    """Passes on what the server says, then waits for its end, so that it does not stay in the process table."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            with suppress(msgspec.DecodeError):  # a library that prints
                messages.put(msgspec.json.decode(line, type=_Message))
    process.wait()
    messages.put(None)


def _last_words(process: subprocess.Popen[bytes], folder: SharedFolder) -> str:
    lines = folder.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = f"; its last words: {lines[-1]}" if lines else ""
    return (
        f"The local server ended with status {process.returncode} before it was ready{said}. Its log is {folder.log}."
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


class _Progress:
    """One line on the terminal that is gone in the end; elsewhere, a line for each stage that takes its time."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._is_terminal = stream is not None and stream.isatty()
        self._stage = ""

    def show(self, stage: str, share: float = 0.0) -> None:
        if self._is_terminal:
            self._write(f"\r\033[K{stage} ... {f'{share:.0%}' if share else ''}")
        elif stage != self._stage:
            self._write(f"{stage} ...\n")
        self._stage = stage

    def clear(self) -> None:
        if self._is_terminal and self._stage:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
