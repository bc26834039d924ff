"""A model hub that takes uploads: as much of its API as one commit of small files needs."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "5" * 40


@dataclass
class Hub:
    """Repositories by name, each with its files, and whether everybody may see them."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    public: set[str] = field(default_factory=set)
    messages: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        match method, path.strip("/").split("/"):
            case _, ["api", "whoami-v2"]:
                return _json({"name": "ann", "type": "user", "orgs": []})
            case "POST", ["api", "validate-yaml"]:
                return _json({"errors": [], "warnings": []})
            case "POST", ["api", "repos", "create"]:
                return self._create(json.loads(body))
            case "POST", ["api", "models", owner, name, "preupload", _]:
                files = [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in json.loads(body)["files"]]
                return _json({"files": files, "commitOid": COMMIT})
            case "POST", ["api", "models", owner, name, "commit", _]:
                return self._commit(f"{owner}/{name}", body)
            case _, ["api", "models", owner, name, *_]:
                return self._repository(f"{owner}/{name}")
            case _, [owner, name, "resolve", _, file]:
                return self._file(f"{owner}/{name}", file)
        return 404, {}, b"{}"

    def _create(self, asked: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        repository = f"{asked.get('organization') or 'ann'}/{asked['name']}"
        status, headers, facts = _json({"url": f"{self.url}/{repository}", "name": repository, "id": repository})
        if repository in self.repositories:
            return 409, headers, facts
        self.repositories[repository] = {}
        if not asked.get("private") and asked.get("visibility") != "private":
            self.public.add(repository)
        return status, headers, facts

    def _commit(self, repository: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            elif line["key"] == "file":
                self.repositories[repository][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return _json({"commitUrl": f"{self.url}/{repository}/commit/{COMMIT}", "commitOid": COMMIT})

    def _repository(self, repository: str) -> tuple[int, dict[str, str], bytes]:
        if repository not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        siblings = [{"rfilename": name} for name in self.repositories[repository]]
        facts = {"id": repository, "sha": COMMIT, "siblings": siblings, "private": repository not in self.public}
        return _json(facts)

    def _file(self, repository: str, file: str) -> tuple[int, dict[str, str], bytes]:
        if file not in self.repositories.get(repository, {}):
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        return 200, {"ETag": f'"{file}"', "X-Repo-Commit": COMMIT}, self.repositories[repository][file]

    @contextmanager
    def served(self) -> Iterator[str]:
        """Its address, while it can be reached."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                status, headers, answer = hub.answer(self.command, self.path.partition("?")[0], body)
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(answer))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer)

            def do_GET(self) -> None:
                self.do_POST()

            def do_HEAD(self) -> None:
                self.do_POST()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self.url
            finally:
                server.shutdown()
                thread.join()


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
