"""Numbers of the user's own, sent beside the training they are about. Servers that do not take them are left alone."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping

from tinsmith.client.connection import Call, Connection
from tinsmith.client.futures import APIFuture
from tinsmith.client.transport import Traffic
from tinsmith.errors import InvalidInputError, InvalidTypeError
from tinsmith.types import LogMetricsRequest
from tinsmith.wire import json

logger = logging.getLogger(__name__)

UNKNOWN = (404, 405, 501)
"""What servers without this endpoint answer."""
MOST_WAITING = 1000
"""Calls that wait while a server is slow or away; more than that would only fill the memory."""


class MetricsLog:
    """Of one model. Calls are sent one after the other, in their order, and nothing waits for them but the close."""

    def __init__(self, connection: Connection, model_id: Callable[[], Awaitable[str]]) -> None:
        self._connection = connection
        self._model_id = model_id
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._sent = 0
        self._is_taken = True

    def log(self, metrics: Mapping[str, float], step: int | None) -> APIFuture[None]:
        numbers = _checked(metrics)
        finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
        for name in numbers.keys() - finite.keys():
            logger.warning("The metric %r is %s at %s, and is left out.", name, numbers[name], _words(step))
        request = LogMetricsRequest(model_id="", metrics=finite, step=step)
        return self._connection.run(lambda: self._send_in_turn(request))

    async def _send_in_turn(self, request: LogMetricsRequest) -> None:
        if self._waiting >= MOST_WAITING:
            logger.warning("Metrics of %s are left out: %d calls wait already.", _words(request.step), self._waiting)
            return
        self._waiting += 1
        try:
            with self._connection.outlasting():
                async with self._turn:
                    if self._is_taken and request.metrics:
                        await self._send(request)
        except Exception as error:  # whoever does not look at the future shall still learn why a curve has holes
            logger.warning("Metrics of %s were not logged: %s", _words(request.step), error)
            raise
        finally:
            self._waiting -= 1

    async def _send(self, request: LogMetricsRequest) -> None:
        self._sent += 1
        model_id = await self._model_id()
        body = json.encode(request.model_copy(update={"model_id": model_id, "seq_id": self._sent}))
        call = Call("POST", "/api/v1/log_metrics", body, Traffic.REST, expected=UNKNOWN)
        answer = await self._connection.call(call)
        if answer.status in UNKNOWN:
            self._is_taken = False
            logger.warning(
                "This server takes no metrics of clients (it answered %d), so log_metrics() does nothing for %s.",
                answer.status,
                model_id,
            )


def _words(step: int | None) -> str:
    return "the next step" if step is None else f"step {step}"


def _checked(metrics: Mapping[str, float]) -> dict[str, float]:
    """Plain numbers, also of what can be turned into one, such as a scalar of numpy or torch."""
    if not isinstance(metrics, Mapping):
        raise InvalidTypeError(
            f'metrics must map names to numbers, as in {{"reward": 0.5}}, not be a {type(metrics).__name__}.',
            field="metrics",
            value=metrics,
        )
    if not metrics:
        raise InvalidInputError("metrics is empty; log at least one number.", field="metrics", value=metrics)
    return {_checked_name(name): _number(name, value) for name, value in metrics.items()}


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidTypeError(f"metrics has the name {name!r}; names are texts.", field="metrics", value=name)
    return name


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, str | bytes):  # which float() would read
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidTypeError(
            f"metrics[{name!r}] is {value!r}, which is no number; log a mean or a sum of it.",
            field=f"metrics[{name!r}]",
            value=value,
        ) from None
