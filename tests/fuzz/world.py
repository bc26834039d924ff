"""What exists on a server before it is fuzzed: things to name in requests, of the caller and of somebody else."""

from __future__ import annotations

import heapq
import itertools
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from tests.support.tiny_tokenizer import CHATML_CONFIG

KEY, OTHER_KEY, DOOMED_KEY = "tml-fuzz-key-0123456789", "tml-bystander-9876543210", "tml-to-be-revoked-55555"
TOKEN = "tml-a-secret-of-somebody"
MODELS = 4
DOOMED = 8
KINDS = ("weights", "sampler_weights", "external_weights")
SAVES = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
TOKENS = [5, 6, 7, 8, 9, 10]
TOKENIZER_FILES = {
    "tokenizer_config.json": CHATML_CONFIG,
    "chat_template.jinja": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools | tojson }}",
}


class Claim(NamedTuple):
    """A number of a model that a request uses."""

    model_id: str
    number: int


class Case(NamedTuple):
    """A request as it goes over the wire."""

    endpoint: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    claim: Claim | None = None


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


Send: TypeAlias = Callable[[Case], Awaitable[Answer]]


class World:
    """Filled by `build`; `base_model` is one that the server trains."""

    def __init__(self, send: Send, base_model: str) -> None:
        self._send = send
        self.base_model = base_model
        self.session_id = ""
        self.spare_sessions: list[str] = []
        self.models: list[str] = []
        self.samplers: list[str] = []
        self.doomed: list[str] = []
        self.files: list[str] = []
        """Signed URLs, without scheme and host."""
        self.losses: list[str] = []
        self.request_ids: list[str] = []
        self.foreign: dict[str, str] = {}
        self.serial: Iterator[int] = itertools.count(1)
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._returned: defaultdict[str, list[int]] = defaultdict(list)

    # Numbers: a model waits for a missing one, so those that were refused are used again.

    def claim(self, model_id: str) -> Claim:
        returned = self._returned[model_id]
        return Claim(model_id, heapq.heappop(returned) if returned else next(self._numbers[model_id]))

    def settle(self, claim: Claim, answer: Answer | None) -> None:
        used = f"{claim.model_id}:{claim.number}".encode()
        if answer is None or answer.status != 200 or used not in answer.body:
            heapq.heappush(self._returned[claim.model_id], claim.number)

    # Building

    async def build(self) -> None:
        self.session_id = await self.session(KEY)
        self.spare_sessions = [await self.session(KEY) for _ in range(DOOMED)]
        self.models = [await self.model(self.session_id, number, KEY) for number in range(MODELS)]
        self.samplers = [await self._sampler(self.session_id, KEY)]
        for kind in KINDS:
            await self._save(self.models[0], kind, "kept", KEY)
        for number in range(DOOMED):
            self.doomed.append(f"doomed{number}")
            await self._save(self.models[0], "weights", self.doomed[-1], KEY)
        self.request_ids = [f"{self.models[0]}:{number}" for number in range(4)]
        await self._signed_urls()
        await self._loss()
        await self._bystander()

    async def session(self, key: str) -> str:
        return str((await self.post("create_session", {"tags": [], "sdk_version": "1"}, key))["session_id"])

    async def model(self, session_id: str, number: int, key: str) -> str:
        body = {"session_id": session_id, "model_seq_id": number, "base_model": self.base_model}
        made = await self.result("create_model", {**body, "lora_config": {"rank": 2, "seed": number}}, key)
        return str(made["model_id"])

    async def _sampler(self, session_id: str, key: str) -> str:
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": self.base_model}
        return str((await self.post("create_sampling_session", body, key))["sampling_session_id"])

    async def _save(self, model_id: str, kind: str, name: str, key: str) -> None:
        body = {"model_id": model_id, "seq_id": self.claim(model_id).number, "path": name}
        saved = await self.result(SAVES.get(kind, "save_weights_external"), body, key)
        assert saved["path"] == self.path(kind, name, model_id)

    async def _signed_urls(self) -> None:
        run = f"/api/v1/training_runs/{self.models[0]}/checkpoints/external_weights/kept"
        urls = (await self.call("GET", f"{run}/external_weights_urls"))["urls"]
        trace = (await self.call("GET", f"/api/v1/sessions/{self.session_id}/trace_export"))["url"]
        self.files = ["/" + url.split("/", 3)[3] for url in (*urls.values(), trace)]

    async def _loss(self) -> None:
        body = {"session_id": self.session_id, "custom_loss_seq_id": 0, **custom_loss()}
        self.losses = [str((await self.result("create_custom_loss", body, KEY))["loss_id"])]

    async def _bystander(self) -> None:
        session_id = await self.session(OTHER_KEY)
        model_id = await self.model(session_id, 0, OTHER_KEY)
        for kind in KINDS:
            await self._save(model_id, kind, "private", OTHER_KEY)
        self.foreign = {
            "session_id": session_id,
            "model_id": model_id,
            "sampling_session_id": await self._sampler(session_id, OTHER_KEY),
            "request_id": f"{model_id}:1",
            "path": self.path("weights", "private", model_id),
        }

    def path(self, kind: str, name: str = "kept", model_id: str = "") -> str:
        return f"tinker://{model_id or self.models[0]}/{kind}/{name}"

    # Calls

    async def post(self, endpoint: str, body: Any, key: str = KEY) -> Any:
        return await self.call("POST", f"/api/v1/{endpoint}", json.dumps(body).encode(), key)

    async def call(self, method: str, target: str, body: bytes = b"", key: str = KEY) -> Any:
        headers = (("content-type", "application/json"), ("x-api-key", key))
        answer = await self._send(Case("set-up", method, target, headers, body))
        assert answer.status == 200, (target, answer)
        return answer.json()

    async def result(self, endpoint: str, body: Any, key: str) -> Any:
        request_id = (await self.post(endpoint, body, key))["request_id"]
        return await self.outcome(request_id, key)

    async def outcome(self, request_id: str, key: str = KEY) -> Any:
        """Waited for as long as it takes; the campaign as a whole has an end."""
        headers = (("content-type", "application/json"), ("x-api-key", key))
        poll = Case("poll", "POST", "/api/v1/retrieve_future", headers, json.dumps({"request_id": request_id}).encode())
        while (answer := await self._send(poll)).status == 408:  # after a while: the server holds the request
            pass
        assert answer.status == 200, answer
        return answer.json()


def custom_loss() -> dict[str, Any]:
    """The sum of the log-probabilities, the other way round."""
    results = {"tuple": [{"ref": "neg"}, {"dict": {"custom/own:sum": {"ref": "neg"}}}]}
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}], "kwargs": {"dim": 0}},
        {"op": "call_function", "name": "neg", "target": "operator.neg", "args": [{"ref": "sum_1"}]},
        {"op": "output", "name": "output", "target": "output", "args": [results]},
    ]
    return {"name": "own", "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"format": 1, "nodes": nodes}}
