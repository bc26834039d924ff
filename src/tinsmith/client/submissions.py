"""Training requests on their way to the server: encoded before their turn, numbered at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinsmith.client.connection import NO_RETRIES, PROTOBUF, Call, Connection
from tinsmith.client.retry import Action, Retry, classify, is_empty_400
from tinsmith.client.threads import run_coding
from tinsmith.errors import APIError, APIStatusError
from tinsmith.types import Datum, LossFnType, UntypedAPIFuture
from tinsmith.types._model import Request
from tinsmith.wire import json as wire_json
from tinsmith.wire import proto as wire_proto
from tinsmith.wire.zstd import can_compress

LossConfig = Mapping[str, float | str]

DIFFERENT_EACH_TIME = ("seq_id", "sampling_session_seq_id")
"""Numbers that do not make a repeated operation another one."""


class JsonSubmission:
    """A small request whose number is set at the turn."""

    def __init__(self, connection: Connection, path: str, request: Request) -> None:
        self._connection = connection
        self._path = path
        self._request = request

    @property
    def fingerprint(self) -> object:
        fields = self._request.to_builtins()
        return self._path, {name: value for name, value in fields.items() if name not in DIFFERENT_EACH_TIME}

    async def send(self, seq_id: int, retry: Retry) -> UntypedAPIFuture:
        body = wire_json.encode({**self._request.to_builtins(), "seq_id": seq_id})
        return await self._connection.call_for(UntypedAPIFuture, Call("POST", self._path, body), retry)


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
            self._encode_json()
            return
        self._protobuf = wire_proto.prepare_forward_backward(
            self._data,
            self._loss_fn,
            self._loss_fn_config,
            forward_only=self._forward_only,
            compress=self._compress and can_compress(),
        )

    @property
    def fingerprint(self) -> object:
        return self._path, self._protobuf or self._json

    async def send(self, seq_id: int, retry: Retry) -> UntypedAPIFuture:
        account = self._connection.account
        if self._protobuf is None or account.dialect == "json":
            return await self._send_json(seq_id, retry)
        if account.dialect == "protobuf":
            return await self._send_protobuf(self._protobuf, seq_id, retry)
        retry.is_final = _may_mean_json_only
        try:
            answer = await self._send_protobuf(self._protobuf, seq_id, retry)
        except APIStatusError as error:
            if not _may_mean_json_only(error):
                raise
            return await self._try_json(self._protobuf, seq_id, retry, error)
        account.dialect = "protobuf"
        return answer

    async def _try_json(
        self, prepared: wire_proto.PreparedBody, seq_id: int, retry: Retry, refusal: APIStatusError
    ) -> UntypedAPIFuture:
        """Says the same in JSON, once. If that is no better, the dialect was not the matter, and the refusal counts.

        The number is the same both times, so a server that took the first one recognises the second.
        """
        try:
            answer = await self._send_json(seq_id, Retry(NO_RETRIES))
        except APIError:
            if classify(refusal).action is not Action.RETRY:
                raise refusal from None
            retry.is_final = lambda error: False
            return await self._send_protobuf(prepared, seq_id, retry)
        self._connection.account.dialect = "json"
        return answer

    async def _send_protobuf(self, prepared: wire_proto.PreparedBody, seq_id: int, retry: Retry) -> UntypedAPIFuture:
        headers = {"Content-Encoding": prepared.content_encoding} if prepared.content_encoding else {}
        body = prepared.finish(self._model_id, seq_id)
        call = Call("POST", "/api/v1/forward_backward", body, content_type=PROTOBUF, headers=headers)
        return await self._connection.call_for(UntypedAPIFuture, call, retry)

    async def _send_json(self, seq_id: int, retry: Retry) -> UntypedAPIFuture:
        """The older form of the request, which has a path of its own for forward-only."""
        if self._json is None:  # encoded before it was known what the server speaks
            await run_coding(self._encode_json)
        assert self._json is not None
        body = wire_json.encode_forward_backward(
            self._json, model_id=self._model_id, seq_id=seq_id, forward_only=self._forward_only
        )
        return await self._connection.call_for(UntypedAPIFuture, Call("POST", self._path, body), retry)

    @property
    def _path(self) -> str:
        return "/api/v1/forward" if self._forward_only else "/api/v1/forward_backward"

    def _encode_json(self) -> None:
        self._json = wire_json.encode_forward_backward_parts(self._data, self._loss_fn, self._loss_fn_config)


def _may_mean_json_only(error: APIStatusError) -> bool:
    """How a server that knows only JSON answers to protobuf.

    Some fail with a bare 500, because they cannot quote the body in their own complaint.
    """
    if error.status_code == 500:
        return isinstance(error.body, str)
    return error.status_code in (400, 415, 422) and not is_empty_400(error)
