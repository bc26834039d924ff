"""A server of the Tinker API as a process of its own, and a tenant who sends it plain HTTP requests.

The requests are JSON, as the oldest clients send them, because that is the one form that different servers of this API
understand. Each has a connection of its own: some servers close idle ones while a request is on its way.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from harness import KEY

BASE_MODEL = "tiny/model"
RANK = 32
START_SECONDS = 180
STOP_SECONDS = 20
REQUEST_SECONDS = 300
HEADERS = {"content-type": "application/json", "accept": "application/json", "x-api-key": KEY}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- the process -----------------------------------------------------------------------------------------------------


class Server:
    """Started and ended by `with`; its log is `<name>.log` in the folder it runs in."""

    def __init__(self, name: str, folder: Path, port: int, command: Sequence[str], environment: Mapping[str, str]):
        self.name = name
        self.port = port
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        family = self._family()
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        finally:
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def wait_until_open(self) -> None:
        """Returns as soon as the port is open, loaded or not."""
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{self.name} did not start:\n{self._log.read_text()[-4000:]}") from None
                time.sleep(0.01)

    def peak_mb(self) -> float:
        """The peaks of all its processes, without `uv`, which only starts some."""
        statuses = [_status(pid) for pid in self._family()]
        return sum(int(status["VmHWM"].split()[0]) for status in statuses if status["Name"] != "uv") / 1024

    def _family(self) -> list[int]:
        family = [self._process.pid]
        for pid in family:
            family += _children(pid)
        return family


def _children(pid: int) -> list[int]:
    """Each thread has children of its own, and may end while we look."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, task.read_text().split())
    return children


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


# --- the tenant ------------------------------------------------------------------------------------------------------


class Accepted(NamedTuple):
    tenant: Tenant
    request_id: str

    def result(self) -> Any:
        while True:
            status, answer = self.tenant.exchange("retrieve_future", {"request_id": self.request_id})
            if status == 200 and "error" not in answer:
                return answer
            if status != 408:
                raise RuntimeError(f"The request failed with status {status}: {answer}")


class Tenant:
    """One session with one server."""

    def __init__(self, server: Server) -> None:
        self._port = server.port
        self._numbers = iter(range(1, 1_000_000))
        session = self.post("create_session", {"tags": [], "sdk_version": "0.18.0", "type": "create_session"})
        self._session_id = session["session_id"]

    def exchange(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_SECONDS)
        try:
            connection.request("POST", f"/api/v1/{path}", json.dumps(body), HEADERS)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        status, answer = self.exchange(path, body)
        if status != 200:
            raise RuntimeError(f"{path} was answered with {status}: {answer}")
        return answer

    def submit(self, path: str, body: Mapping[str, Any]) -> Accepted:
        return Accepted(self, self.post(path, body)["request_id"])

    def number(self) -> int:
        return next(self._numbers)

    def create_model(self) -> Model:
        place = {"session_id": self._session_id, "model_seq_id": self.number(), "base_model": BASE_MODEL}
        accepted = self.submit("create_model", {**place, "lora_config": {"rank": RANK}, "type": "create_model"})
        return Model(self, accepted.result()["model_id"])


class Model:
    """An adapter in training."""

    def __init__(self, tenant: Tenant, model_id: str) -> None:
        self._tenant = tenant
        self._model_id = model_id
        self._numbers = iter(range(1, 1_000_000))

    def _submit(self, path: str, body: Mapping[str, Any]) -> Accepted:
        return self._tenant.submit(path, {"model_id": self._model_id, "seq_id": next(self._numbers), **body})

    def forward(self, lengths: Sequence[int]) -> Accepted:
        return self._submit("forward", {"forward_input": _examples(lengths)})

    def forward_backward(self, lengths: Sequence[int]) -> Accepted:
        return self._submit("forward_backward", {"forward_backward_input": _examples(lengths)})

    def optim_step(self) -> Accepted:
        adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        return self._submit("optim_step", {"adam_params": adam, "type": "optim_step"})

    def step(self, lengths: Sequence[int]) -> None:
        """As clients do it: the optimizer step is on its way before the gradients are there."""
        for accepted in [self.forward_backward(lengths), self.optim_step()]:
            accepted.result()

    def create_sampler(self) -> Sampler:
        """Of the weights as they are now."""
        place = {"sampling_session_seq_id": self._tenant.number(), "type": "save_weights_for_sampler"}
        saved = self._submit("save_weights_for_sampler", place).result()
        return Sampler(self._tenant, saved["sampling_session_id"])


class Sampler(NamedTuple):
    tenant: Tenant
    sampling_session_id: str

    def sample(self, prompt_tokens: int, new_tokens: int, samples: int = 1) -> Accepted:
        """Samples that end at their full length, from a prompt not seen before."""
        params = {"max_tokens": new_tokens, "temperature": 1.0, "stop": []}
        place = {"sampling_session_id": self.sampling_session_id, "seq_id": self.tenant.number(), "type": "sample"}
        prompt = _input(_tokens(prompt_tokens))
        return self.tenant.submit(
            "asample", {**place, "prompt": prompt, "num_samples": samples, "sampling_params": params}
        )


def _examples(lengths: Sequence[int]) -> dict[str, Any]:
    return {"data": [_example(_tokens(length + 1)) for length in lengths], "loss_fn": "cross_entropy"}


def _example(tokens: list[int]) -> dict[str, Any]:
    shape = [len(tokens) - 1]
    targets = {"data": tokens[1:], "dtype": "int64", "shape": shape}
    weights = {"data": [1.0] * shape[0], "dtype": "float32", "shape": shape}
    return {"model_input": _input(tokens[:-1]), "loss_fn_inputs": {"target_tokens": targets, "weights": weights}}


def _input(tokens: list[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


def _tokens(count: int) -> list[int]:
    """Ids that every tokenizer has and none uses for a special purpose."""
    return [random.randrange(10, 350) for _ in range(count)]
