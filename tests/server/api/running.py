"""The API on a loopback port, served by uvicorn in a thread, with the stand-in worker behind it."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.server.api.stand_in import StandInWorkers
from tinsmith.server.app import create_app
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.config import ServerConfig
from tinsmith.server.models import ModelFacts, ModelSource
from tinsmith.server.serve import ApiServer, listen
from tinsmith.server.store import Store

MODELS = ("tiny/model-1", "tiny/model-2")
KEY = "tml-any"
_STOP_SECONDS = 10.0
_RESULT_SECONDS = 60.0


def facts(name: str, max_context: int = 512) -> ModelFacts:
    return ModelFacts(
        name=name,
        folder=Path("/nowhere"),
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        max_context=max_context,
        eos_token_ids=(0,),
        bos_token_id=None,
        tokenizer_id=name,
        num_parameters=3,
    )


class Answer(NamedTuple):
    status: int
    headers: Any
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class RunningServer:
    def __init__(self, state: Path, **settings: Any) -> None:
        self.config = ServerConfig(
            models=tuple(ModelSource(name, "/nowhere") for name in MODELS), state=state, **settings
        )
        self.store = Store(self.config.database_url)
        self.app_models = {name: facts(name) for name in MODELS}

    def __enter__(self) -> Self:
        self.workers = StandInWorkers(
            self.store, CheckpointFolders(self.config.checkpoints), MODELS, self.config.max_checkpoint_bytes
        )
        self.app = create_app(self.config, self.store, self.app_models, self.workers)
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._api = ApiServer(self.app)
        self._thread = threading.Thread(target=self._api.run, kwargs={"sockets": [listener]}, name="api")
        self._thread.start()
        while not self._api.started:
            assert self._thread.is_alive()
            threading.Event().wait(0.005)
        return self

    def __exit__(self, *exception: object) -> None:
        self._api.should_exit = True
        self._thread.join(_STOP_SECONDS)
        assert not self._thread.is_alive(), "the API did not stop"
        self.store.close()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = KEY,
        headers: dict[str, str] | None = None,
        timeout: float = 30.0,
    ) -> Answer:
        """One request by hand. Anything but bytes is sent as JSON."""
        sent = {"content-type": "application/json", **(headers or {})}
        if key is not None:
            sent["x-api-key"] = key
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return Answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())

    def post(self, endpoint: str, body: Any = None, **options: Any) -> Answer:
        return self.call("POST", f"/api/v1/{endpoint}", body, **options)

    def get(self, endpoint: str, **options: Any) -> Answer:
        return self.call("GET", f"/api/v1/{endpoint}", **options)

    # The usual beginnings

    def session(self, **options: Any) -> str:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", "type": "create_session"}
        return str(self.post("create_session", body, **options).json()["session_id"])

    def model(self, session_id: str | None = None, number: int = 0, **options: Any) -> str:
        session_id = session_id or self.session(**options)
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": MODELS[0],
            "lora_config": {"rank": 8},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        }
        return str(self.result(self.post("create_model", body, **options), **options)["model_id"])

    def sampler(self, session_id: str | None = None, number: int = 0, **options: Any) -> str:
        body = {
            "session_id": session_id or self.session(**options),
            "sampling_session_seq_id": number,
            "base_model": MODELS[0],
        }
        return str(self.post("create_sampling_session", body, **options).json()["sampling_session_id"])

    def result(self, acknowledged: Answer, **options: Any) -> Any:
        """What became of an accepted request, as JSON."""
        assert acknowledged.status == 200, acknowledged
        body, end = {"request_id": acknowledged.json()["request_id"]}, time.monotonic() + _RESULT_SECONDS
        while (answer := self.post("retrieve_future", body, **options)).status == 408:
            assert time.monotonic() < end, answer.body
        return answer.json()
