"""An API whose models have a tokenizer, and a reader of its streams that looks at every byte."""

from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.end_to_end.serving import wait_until
from tests.server.api.running import KEY, MODELS, RunningServer
from tests.support.tiny_tokenizer import CHATML_CONFIG, write_folder
from tinsmith.server.config import DATABASE_FILE
from tinsmith.server.messages import Drawn
from tinsmith.text.tokenizer_folder import read_tokenizer

MODEL = MODELS[0]
SECONDS = 30.0


class Talking(RunningServer):
    def __init__(self, state: Path, **settings: Any) -> None:
        super().__init__(state, **settings)
        template = "{% for m in messages %}{{ m.content }} {% endfor %}"
        files = {"tokenizer_config.json": {**CHATML_CONFIG, "chat_template": template}}
        folder = write_folder(state / "model", files=files)
        self.app_models = {name: replace(facts, folder=folder) for name, facts in self.app_models.items()}
        self.tokenizer = read_tokenizer(folder / "tokenizer.json", name=MODEL)

    @contextmanager
    def stream(self, **body: Any) -> Iterator[Stream]:
        """A streamed completion, whose sample the worker leaves alone."""
        self.workers.hold("sample")
        known, asked = self.samples(), {"model": MODEL, "prompt": "fox", "stream": True, "max_tokens": 400, **body}
        try:
            with Stream(self.port, asked) as stream:
                wait_until(lambda: len(self.samples()) > len(known), SECONDS, "nothing was submitted")
                stream.request_ids = [name for name in self.samples() if name not in known]
                yield stream
        finally:
            self.workers.release()

    def samples(self) -> list[str]:
        """All that were asked for."""
        with closing(sqlite3.connect(self.config.state / DATABASE_FILE)) as connection:
            rows = connection.execute("SELECT request_id FROM jobs WHERE kind = 'sample' ORDER BY created, request_id")
            return [name for (name,) in rows]

    def state(self, request_id: str) -> str:
        return self.store.results.statuses([request_id])[request_id].state

    def draw(self, request_id: str, text: str, start: int = 0) -> int:
        """As if the worker had drawn this text; gives back where the next one begins."""
        tokens = self.tokenizer.encode(text)
        self.workers.draw(Drawn(request_id, 0, start, tokens, [-1.0] * len(tokens)))
        return start + len(tokens)


class Stream:
    """One request on a connection of its own, read as slowly as a test likes."""

    def __init__(self, port: int, body: Any) -> None:
        self.request_ids: list[str] = []
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that what is not read soon piles up
        self._socket.settimeout(SECONDS)
        self._socket.connect(("127.0.0.1", port))
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
        sizes = f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self._socket.sendall(f"{head}{sizes}".encode() + content)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def lines(self) -> Iterator[str]:
        """Those of the content that are not empty, in the order in which they come."""
        while (line := self._file.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-type"):
                assert b"text/event-stream" in line
        while size := int(self._file.readline() or b"0", 16):
            piece = self._file.read(size)
            self._file.readline()
            yield from filter(None, piece.decode().split("\n"))

    def events(self) -> Iterator[Any]:
        for line in self.lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
