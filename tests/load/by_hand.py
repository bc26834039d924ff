"""A client without a package, so small that a thousand of them fit into a process, and that times its own calls."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.programs import MODEL
from tests.load.records import Records

HEARTBEAT_SECONDS = 10.0
_NOT_YET = 408
_BUSY = {429, 503}


class Wire:
    """One connection at a time, opened again where the server has closed it meanwhile."""

    def __init__(self, url: str, key: str) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._key = key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, endpoint: str, body: Any) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        head = f"POST /api/v1/{endpoint} HTTP/1.1\r\nhost: {self._host}\r\nx-api-key: {self._key}\r\n"
        message = f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        try:
            return await self._sent(message)
        except (asyncio.IncompleteReadError, ConnectionError):  # every request here can be sent twice
            self.close()
            return await self._sent(message)

    async def _sent(self, message: bytes) -> tuple[int, Any]:
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(message)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = head.partition("content-length:")[2].partition("\r\n")[0]
        body = await reader.readexactly(int(length or 0))
        return int(head.split()[1]), body

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


class HandClient:
    """A session, with one connection for what is submitted and asked, and one for heartbeats."""

    def __init__(self, url: str, key: str, records: Records) -> None:
        self._url, self._key, self._records = url, key, records
        self._wire, self._pulse = Wire(url, key), Wire(url, key)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[HandClient]:
        asked = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        self._session_id = (await self._call(self._wire, "create_session", asked))["session_id"]
        beating = asyncio.create_task(self._beat())
        try:
            yield self
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            reason = {"reason": {"type": "success"}, "detail": None}
            await self._wire.post(f"sessions/{self._session_id}/finish", reason)
            self._wire.close()
            self._pulse.close()

    async def _beat(self) -> None:
        """At moments of its own: clients that have nothing to do with each other do not beat in time.

        If each waited after an answer, those that once were answered together would go on together.
        """
        clock = asyncio.get_running_loop()
        due = clock.time() + random.uniform(0, HEARTBEAT_SECONDS)
        while True:
            await asyncio.sleep(due - clock.time())
            due += HEARTBEAT_SECONDS
            await self._call(self._pulse, "session_heartbeat", {"session_id": self._session_id})

    async def sampler(self) -> HandSampler:
        asked = {"session_id": self._session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
        made = await self._call(self._wire, "create_sampling_session", asked)
        return HandSampler(self, made["sampling_session_id"])

    async def model(self) -> HandModel:
        asked = {"session_id": self._session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        request_id = await self.submit("create_model", asked)
        return HandModel(self, json.loads(await self.result(request_id))["model_id"])

    async def submit(self, endpoint: str, body: Any) -> str:
        """The id of the request, which was acknowledged; how long that took is noted."""
        started = time.monotonic()
        answer = await self._call(self._wire, endpoint, body)
        self._records.note("acknowledged", self._key, endpoint, time.monotonic() - started)
        return str(answer["request_id"])

    async def result(self, request_id: str) -> bytes:
        while True:
            status, body = await self._wire.post("retrieve_future", {"request_id": request_id})
            if status not in {_NOT_YET, *_BUSY}:
                assert status == 200, (status, body)
                assert not body.startswith(b'{"error"'), body
                return bytes(body)

    async def _call(self, wire: Wire, endpoint: str, body: Any) -> Any:
        while True:
            status, answer = await wire.post(endpoint, body)
            if status not in _BUSY:
                assert status == 200, (endpoint, status, answer)
                return json.loads(answer)
            await asyncio.sleep(0.5)


class HandSampler:
    def __init__(self, client: HandClient, sampler_id: str) -> None:
        self._client, self._sampler_id = client, sampler_id
        self._numbers = count()

    async def submit(self, prompt: list[int], length: int) -> str:
        chunks = [{"type": "encoded_text", "tokens": prompt}]
        asked = {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": length}, "num_samples": 1}
        numbered = {"sampling_session_id": self._sampler_id, "seq_id": next(self._numbers)}
        return await self._client.submit("asample", {**asked, **numbered})


class HandModel:
    def __init__(self, client: HandClient, model_id: str) -> None:
        self._client, self._model_id = client, model_id
        self._numbers = count(1)

    async def forward_backward(self, tokens: list[int]) -> None:
        inputs = {
            "target_tokens": {"data": tokens[1:], "dtype": "int64"},
            "weights": {"data": [1.0] * (len(tokens) - 1), "dtype": "float32"},
        }
        chunks = [{"type": "encoded_text", "tokens": tokens[:-1]}]
        datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}
        await self._do("forward_backward", forward_backward_input={"data": [datum], "loss_fn": "cross_entropy"})

    async def optim_step(self) -> None:
        await self._do("optim_step", adam_params={"learning_rate": 1e-3})

    async def _do(self, endpoint: str, **fields: Any) -> None:
        numbered = {"model_id": self._model_id, "seq_id": next(self._numbers)}
        await self._client.result(await self._client.submit(endpoint, {**numbered, **fields}))
