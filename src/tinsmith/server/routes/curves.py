"""What clients log about their training themselves."""

from __future__ import annotations

from starlette.responses import Response

from tinsmith.server.checks import refuse
from tinsmith.server.routes._call import Call, Endpoint, nothing
from tinsmith.server.routes._found import model_named
from tinsmith.types import LogMetricsRequest

_BODY_BYTES = 256 * 1024
_MOST_AT_ONCE = 100
_MOST_NAMES = 500
_LONGEST_NAME = 200
_HIGHEST = 2**62


async def log_metrics(call: Call) -> Response:
    """Add a point to each of these curves of a model."""
    request = await call.read(LogMetricsRequest, _BODY_BYTES)
    model = await model_named(call, request.model_id)
    _check(request)
    call.services.logged_metrics.charge(call.owner, sum(map(len, request.metrics)))
    await call.stored(
        call.store.curves.log,
        model.model_id,
        request.metrics,
        request.step,
        request.seq_id,
        most_names=_MOST_NAMES,
    )
    return nothing()


def _check(request: LogMetricsRequest) -> None:
    if not 0 < len(request.metrics) <= _MOST_AT_ONCE:
        raise refuse("metrics", f"has {len(request.metrics)} numbers; log 1 to {_MOST_AT_ONCE} in one call")
    for name in request.metrics:
        if not 0 < len(name) <= _LONGEST_NAME:
            shown = f"{name[:40]}..." if name else ""
            raise refuse("metrics", f"has the name {shown!r} of {len(name)} characters; take 1 to {_LONGEST_NAME}")
        if not name.isprintable():
            raise refuse("metrics", f"has the name {name!r}; leave out what cannot be printed")
    if request.step is not None and not 0 <= request.step <= _HIGHEST:
        raise refuse("step", f"is {request.step}; count from 0, or leave it out for the step that is next")
    if request.seq_id is not None and not 1 <= request.seq_id <= _HIGHEST:
        raise refuse("seq_id", f"is {request.seq_id}; count the calls from 1, or leave it out")


ENDPOINTS = (Endpoint("POST", "/api/v1/log_metrics", log_metrics, LogMetricsRequest),)
