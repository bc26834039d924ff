"""A model hub on the loopback address, with one repository, for code that runs in a process of its own.

`huggingface_hub` reads its variables when it is imported, so `run_python` starts a fresh interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOWHERE = "http://127.0.0.1:9"
"""The address of a hub that is not there."""


@dataclass
class Hub:
    """Knows `repository` with its files, the gated `org/gated`, and nothing else."""

    repository: str
    files: Mapping[str, bytes]
    fetched: set[str] = field(default_factory=set)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/api/models/org/gated"):
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if path.startswith(f"/api/models/{self.repository}/tree/"):
            return self._json([{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in self.files.items()])
        if path.startswith(f"/api/models/{self.repository}"):
            siblings = [{"rfilename": name} for name in self.files]
            return self._json({"id": self.repository, "sha": "5" * 40, "siblings": siblings})
        name = re.sub(rf"^/{re.escape(self.repository)}/resolve/[^/]+/", "", path)
        if name not in self.files:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        self.fetched.add(name)
        return 200, {"ETag": f'"{name.replace("/", "-")}"', "X-Repo-Commit": "5" * 40}, self.files[name]

    def _json(self, content: object) -> tuple[int, dict[str, str], bytes]:
        return 200, {}, json.dumps(content).encode()

    @contextmanager
    def served(self) -> Iterator[str]:
        """Its address, while it can be reached."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, headers, body = hub.answer(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def do_HEAD(self) -> None:
                self.do_GET()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()


def clean_environment(**variables: str) -> dict[str, str]:
    """Ours, with only those variables of the hub that a test names."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"} | variables


def run_python(code: str, **variables: str) -> str:
    """What a fresh interpreter prints."""
    environment = clean_environment(**variables)
    finished = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()
