"""Training requests on their way to the server: encoded before their turn, numbered at it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tinsmith.client.connection import PROTOBUF, Call, Connection
from tinsmith.client.retry import Action, classify
from tinsmith.errors import APIConnectionError, APIStatusError
from tinsmith.types import Datum, LossFnType, UntypedAPIFuture
from tinsmith.wire import json as wire_json
from tinsmith.wire import proto as wire_proto
from tinsmith.wire.zstd import can_compress

LossConfig = Mapping[str, float | str]

NOT_UNDERSTOOD = (400, 415, 422, 500)
"""How a server that knows only JSON answers to protobuf. FastAPI fails to repeat what it refuses, hence 500."""


class JsonSubmission:
    """A small request whose number is set at the turn."""

    def __init__(self, connection: Connection, path: str, request: Any) -> None:
        self._connection = connection
        self._path = path
        self._request = request

    @functools.cached_property
    def fingerprint(self) -> bytes:
        return self._path.encode() + wire_json.encode(self._request)

    async def send(self, seq_id: int) -> UntypedAPIFuture:
        body = wire_json.encode(msgspec.structs.replace(self._request, seq_id=seq_id))
        return await self._connection.call_for(UntypedAPIFuture, Call("POST", self._path, body))


class ForwardBackwardSubmission:
    """A run of data. Sent as protobuf; a server that does not understand that is asked again in JSON."""

    def __init__(
        self,
        connection: Connection,
        model_id: str,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None,
        forward_only: bool,
        compress: bool,
    ) -> None:
        self._connection = connection
        self._model_id = model_id
        self._data = data
        self._loss_fn = loss_fn
        self._loss_fn_config = loss_fn_config
        self._forward_only = forward_only
        self._compress = compress
        self._protobuf: wire_proto.PreparedBody | None = None
        self._json: bytes | None = None

    def encode(self) -> None:
        """The expensive part; runs in a thread."""
        if self._connection.account.dialect == "json":
            self._json = self._encode_json()
        else:
            self._protobuf = self._encode_protobuf()

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """Compared only after a lost answer, so it may cost an encoding."""
        return self._path.encode() + self._encode_json()

    async def send(self, seq_id: int) -> UntypedAPIFuture:
        account = self._connection.account
        if account.dialect == "unknown":
            answer = await self._find_dialect(seq_id)
            if answer is not None:
                return answer
        if account.dialect == "json":
            return await self._send_json(seq_id)
        answer = await self._send_protobuf(seq_id)
        account.dialect = "protobuf"
        return answer

    async def _find_dialect(self, seq_id: int) -> UntypedAPIFuture | None:
        """One try in each dialect; None means that nothing was learnt and the usual retries are due.

        The number is the same both times, so a server that took the first one recognises the second.
        """
        account = self._connection.account
        try:
            answer = await self._send_protobuf(seq_id, retries=False)
        except APIConnectionError:
            return None
        except APIStatusError as refused:
            if refused.status_code not in NOT_UNDERSTOOD:
                return None
            try:
                answer = await self._send_json(seq_id, retries=False)
            except (APIStatusError, APIConnectionError):
                if classify(refused).action is Action.RETRY:
                    return None
                raise refused from None  # it understands neither: the data is at fault, not the dialect
            account.dialect = "json"
            return answer
        account.dialect = "protobuf"
        return answer

    async def _send_protobuf(self, seq_id: int, *, retries: bool = True) -> UntypedAPIFuture:
        if self._protobuf is None:  # it was encoded for another dialect than the server turned out to speak
            self._protobuf = await asyncio.to_thread(self._encode_protobuf)
        prepared = self._protobuf
        headers = {"Content-Encoding": prepared.content_encoding} if prepared.content_encoding else {}
        body = prepared.finish(self._model_id, seq_id)
        call = Call("POST", "/api/v1/forward_backward", body, content_type=PROTOBUF, headers=headers, retries=retries)
        return await self._connection.call_for(UntypedAPIFuture, call)

    async def _send_json(self, seq_id: int, *, retries: bool = True) -> UntypedAPIFuture:
        """The older form of the request, which has a path of its own for forward-only."""
        if self._json is None:
            self._json = await asyncio.to_thread(self._encode_json)
        body = wire_json.encode_forward_backward(
            self._json, model_id=self._model_id, seq_id=seq_id, forward_only=self._forward_only
        )
        return await self._connection.call_for(UntypedAPIFuture, Call("POST", self._path, body, retries=retries))

    @property
    def _path(self) -> str:
        return "/api/v1/forward" if self._forward_only else "/api/v1/forward_backward"

    def _encode_json(self) -> bytes:
        return wire_json.encode_forward_backward_parts(self._data, self._loss_fn, self._loss_fn_config)

    def _encode_protobuf(self) -> wire_proto.PreparedBody:
        return wire_proto.prepare_forward_backward(
            self._data,
            self._loss_fn,
            self._loss_fn_config,
            forward_only=self._forward_only,
            compress=self._compress and can_compress(),
        )
