"""What the dashboard reads. Times are seconds since 1970; everything is the caller's own, but for the workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from starlette.responses import Response

from tinsmith._version import __version__
from tinsmith.errors import TokenizerError
from tinsmith.server import audit
from tinsmith.server.routes._call import Call, Endpoint, nothing, reply_plain, status_error
from tinsmith.server.routes._found import model_named
from tinsmith.server.routes._paging import number_in, page_of
from tinsmith.server.routes._thinned import thinned
from tinsmith.server.store.keys import KeyRefusedError
from tinsmith.server.store.records import ApiKey, Model, QueueDepth, RecentSample, RunProgress, ShownCompletion
from tinsmith.server.texts import Texts
from tinsmith.types._model import Request

_MOST_POINTS = 10_000
_MOST_SAMPLES = 100
_LONGEST_TEXT = 20_000
_MOST_KEYS = 100

# --- the server ------------------------------------------------------------------------------------------------------


async def overview(call: Call) -> Response:
    """The base models with what they do just now, and what of the caller's waits for them."""
    depths = await call.stored(call.store.jobs.depths, call.owner)
    now = time.time()
    return reply_plain(
        {
            "version": __version__,
            "now": now,
            "owner": call.owner,
            "takes_any_key": call.caller.key is None,
            "models": [_model(call, name) for name in call.services.models],
            "queue": [_queued(depth, now) for depth in depths],
        }
    )


def _model(call: Call, name: str) -> dict[str, Any]:
    workers = call.services.workers
    replay = workers.replay(name)
    return {
        "name": name,
        "is_ready": workers.is_ready(name),
        "problem": workers.problem(name),
        "held_up": workers.held_up(name),
        "workers": [state._asdict() for state in workers.states(name)],
        "replay": replay and {"replayed": replay.replayed, "total": replay.total},
        **call.services.rates.look(name, workers.figures(name))._asdict(),
    }


def _queued(depth: QueueDepth, now: float) -> dict[str, Any]:
    return {
        "base_model": depth.base_model,
        "kind": depth.kind,
        "state": depth.state,
        "count": depth.count,
        "oldest_seconds": max(0.0, now - depth.oldest.timestamp()),
    }


# --- training runs ---------------------------------------------------------------------------------------------------


async def runs_with_progress(call: Call) -> Response:
    """Training runs with their steps and last values, newest first."""
    asked = page_of(call, limit=50)
    page = await call.stored(call.store.models.page, call.owner, limit=asked.limit, offset=asked.offset)
    return reply_plain({"total": page.total, "runs": await _runs(call, page.items)})


async def run_with_progress(call: Call) -> Response:
    """One training run, as it is in the list of all."""
    (run,) = await _runs(call, [await model_named(call, call.part("run_id"))])
    return reply_plain(run)


async def _runs(call: Call, runs: Sequence[Model]) -> list[dict[str, Any]]:
    ids = [run.model_id for run in runs]
    await call.stored(call.store.curves.gather, ids)
    progress = await call.stored(call.store.curves.progress, ids)
    sessions = {run.session_id for run in runs if run.session_id is not None}
    names = await call.stored(call.store.sessions.display_names, sessions)
    active = await call.stored(call.store.sessions.active, sessions)
    at_work = await call.stored(call.store.jobs.at_work, ids)
    return [
        {
            **_run(run, progress.get(run.model_id, RunProgress())),
            "session_name": names.get(run.session_id or ""),
            "is_open": run.trainable and run.session_id in active,
            "is_at_work": run.model_id in at_work,
        }
        for run in runs
    ]


def _run(run: Model, progress: RunProgress) -> dict[str, Any]:
    return {
        "run_id": run.model_id,
        "base_model": run.base_model,
        "rank": run.lora.rank,
        "created": run.created.timestamp(),
        "last_request": run.last_request.timestamp(),
        "corrupted": run.corrupted,
        "is_removed": run.removed is not None,
        "steps": progress.steps,
        "last": progress.last,
    }


async def run_series(call: Call) -> Response:
    """The names of a training run's curves."""
    run = await _gathered_run(call)
    return reply_plain({"names": await call.stored(call.store.curves.names, run.model_id)})


async def run_points(call: Call) -> Response:
    """A curve of a training run, or what was added to it after a cursor; of many points, those that show its shape."""
    run = await _gathered_run(call)
    name = call.request.query_params.get("name")
    if not name:
        raise status_error(422, "name is missing; send that of a curve, such as name=loss.")
    most = number_in(call, "max", 2000, 4, _MOST_POINTS)
    after = number_in(call, "after", 0, 0, 2**62)
    curve = await call.stored(call.store.curves.points, run.model_id, name, after=after)
    points = await call.stored(thinned, curve.points, most)
    return reply_plain({"points": points, "cursor": curve.cursor})


async def _gathered_run(call: Call) -> Model:
    run = await model_named(call, call.part("run_id"))
    await call.stored(call.store.curves.gather, [run.model_id])
    return run


# --- samples ---------------------------------------------------------------------------------------------------------


async def recent_samples(call: Call) -> Response:
    """Some of what was sampled lately, as text, newest first."""
    run_id = call.request.query_params.get("run_id") or None
    limit = number_in(call, "limit", 20, 1, _MOST_SAMPLES)
    if run_id is not None:
        await model_named(call, run_id)
    found = await call.stored(call.store.recent_samples.newest, call.owner, limit=limit, run_id=run_id)
    return reply_plain({"samples": await call.stored(_as_text, found, call.services.texts)})


def _as_text(samples: Sequence[RecentSample], texts: Texts) -> list[dict[str, Any]]:
    def text(sample: RecentSample, tokens: Sequence[int]) -> str:
        try:
            return texts.of(sample.base_model).decode(tokens, skip_special=False)[:_LONGEST_TEXT]
        except (KeyError, TokenizerError):  # not served any more, or without a tokenizer: the ids are all there is
            return str(list(tokens))[:_LONGEST_TEXT]

    def completion(sample: RecentSample, shown: ShownCompletion) -> dict[str, Any]:
        return {
            "text": text(sample, shown.tokens),
            "stop_reason": shown.stop_reason,
            "tokens": len(shown.tokens),
        }

    return [
        {
            "request_id": sample.request_id,
            "time": sample.time.timestamp(),
            "base_model": sample.base_model,
            "model_path": sample.model_path,
            "run_id": sample.run_id,
            "prompt": text(sample, sample.prompt),
            "completions": [completion(sample, shown) for shown in sample.completions],
            "reward": sample.reward,
        }
        for sample in samples
    ]


# --- keys ------------------------------------------------------------------------------------------------------------


class _NewKey(Request):
    name: str


async def list_keys(call: Call) -> Response:
    """The caller's API keys, oldest first, revoked ones included."""
    current = _current_key(call)
    found = await call.stored(call.store.keys.all, call.owner)
    return reply_plain({"keys": [_key(key, current) for key in found]})


async def create_key(call: Call) -> Response:
    """One more API key for the caller's own things; it is shown this once."""
    current = _current_key(call)
    request = await call.read(_NewKey)
    call.services.paperwork.charge(call.owner, len(request.name))
    create = partial(call.store.keys.create, address=audit.address(call), made_by=current.key_id, most=_MOST_KEYS)
    try:
        made = await call.stored(create, call.owner, request.name)
    except KeyRefusedError as error:
        raise status_error(409, error.message) from None
    return reply_plain({"key": _key(made.key, current), "plain": made.plain})


async def revoke_key(call: Call) -> Response:
    """Refuse one of the caller's API keys from now on."""
    _current_key(call)
    key_id = call.part("key_id")
    known = await call.stored(call.store.keys.all, call.owner)
    key = next((key for key in known if str(key.key_id) == key_id and key.revoked is None), None)
    if key is None:
        raise status_error(404, f"There is no key {key_id[:40]!r} that could be revoked.")
    await call.stored(call.store.keys.revoke, key.key_id, address=audit.address(call))
    return nothing()


def _current_key(call: Call) -> ApiKey:
    if call.caller.key is None:
        raise status_error(
            409,
            "This server works without keys: it takes any, and all that is on it is everybody's. To change that, run "
            "`tinsmith keys create NAME` where the server is.",
        )
    return call.caller.key


def _key(key: ApiKey, current: ApiKey) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "name": key.name,
        "note": key.note,
        "hint": key.hint,
        "created": key.created.timestamp(),
        "revoked": _seconds(key.revoked),
        "is_current": key.key_id == current.key_id,
    }


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


ENDPOINTS = (
    Endpoint("GET", "/dashboard/api/overview", overview),
    Endpoint("GET", "/dashboard/api/runs", runs_with_progress),
    Endpoint("GET", "/dashboard/api/runs/{run_id}", run_with_progress),
    Endpoint("GET", "/dashboard/api/runs/{run_id}/series", run_series),
    Endpoint("GET", "/dashboard/api/runs/{run_id}/points", run_points),
    Endpoint("GET", "/dashboard/api/samples", recent_samples),
    Endpoint("GET", "/dashboard/api/keys", list_keys),
    Endpoint("POST", "/dashboard/api/keys", create_key),
    Endpoint("DELETE", "/dashboard/api/keys/{key_id}", revoke_key),
)
