"""A client without a package: it sees each acknowledgement itself, and sends everything twice."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from itertools import count
from typing import Any

from tests.chaos.ledger import Ledger
from tests.chaos.programs import MODEL, RESULT_SECONDS
from tests.end_to_end.serving import KEY

STEPS = 10
PAUSE_SECONDS = 0.1
_NOT_YET = {408, 429, 500, 502, 503, 504}


class Model:
    """One model and the numbers of its operations."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self._url, self._ledger = url, ledger
        session = self._post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"})["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4, "seed": 5}}
        request_id = self._twice("create_model", asked)
        self.model_id = str(self._result(request_id)["model_id"])
        self._ledger.note("called", model=self.model_id, kind="create_model")
        self._numbers = count(1)

    def do(self, kind: str, **fields: Any) -> str:
        """The id of the request that was acknowledged."""
        self._ledger.note("called", model=self.model_id, kind=kind)
        return self._twice(kind, {"model_id": self.model_id, "seq_id": next(self._numbers), **fields})

    def note_result(self, kind: str, request_id: str, field: str) -> None:
        result = self._result(request_id)
        value = result["metrics"][field] if "metrics" in result else result[field]
        self._ledger.note("result", kind=kind, value=value)

    def _twice(self, endpoint: str, body: Any) -> str:
        first, second = (str(self._post(endpoint, body)["request_id"]) for _ in range(2))
        assert first == second, f"{endpoint} was taken twice: {first}, {second}"
        self._ledger.note("acknowledged", request_id=first)
        return first

    def _result(self, request_id: str) -> Any:
        result = self._post("retrieve_future", {"request_id": request_id})
        assert "error" not in result, result
        return result

    def _post(self, endpoint: str, body: Any) -> Any:
        """Again and again, until there is an answer that does not ask for another try."""
        end = time.monotonic() + RESULT_SECONDS
        while True:
            try:
                return self._posted(endpoint, body)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in _NOT_YET or time.monotonic() > end:
                        raise RuntimeError(f"{endpoint}: {error.code} {error.read()!r}") from error
            except (OSError, HTTPException):  # no answer, or half of one
                if time.monotonic() > end:
                    raise
            time.sleep(PAUSE_SECONDS)

    def _posted(self, endpoint: str, body: Any) -> Any:
        headers = {"content-type": "application/json", "x-api-key": KEY}
        request = urllib.request.Request(f"{self._url}/api/v1/{endpoint}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=45) as response:
            return json.loads(response.read())


def by_hand(url: str, ledger: Ledger) -> None:
    model = Model(url, ledger)
    for step in range(STEPS):
        asked = {"data": [_datum(step)], "loss_fn": "cross_entropy"}
        losses = model.do("forward_backward", forward_backward_input=asked)
        norms = model.do("optim_step", adam_params={"learning_rate": 1e-3, "eps": 1e-6, "grad_clip_norm": 1.0})
        model.note_result("forward_backward", losses, "loss:sum")
        model.note_result("optim_step", norms, "grad_norm")
    model.note_result("save_weights", model.do("save_weights", path="end"), "path")


def _datum(first: int, length: int = 12) -> Any:
    tokens = [(first + 11 * place) % 250 for place in range(length + 1)]
    inputs = {
        "target_tokens": {"data": tokens[1:], "dtype": "int64"},
        "weights": {"data": [1.0] * length, "dtype": "float32"},
    }
    return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]}, "loss_fn_inputs": inputs}
