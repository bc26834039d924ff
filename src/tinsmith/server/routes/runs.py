"""Training runs, as they are looked up later."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from tinsmith.server.routes._call import Call, Endpoint, reply, status_error
from tinsmith.server.routes._paging import page_of, scope_of
from tinsmith.server.routes._shown import shown_checkpoint
from tinsmith.server.store.records import Model
from tinsmith.types import CheckpointsListResponse, TrainingRun, TrainingRunsResponse


async def list_runs(call: Call) -> Response:
    """Training runs, newest first."""
    asked = page_of(call, limit=20)
    page = await call.stored(
        call.store.models.page,
        call.owner,
        limit=asked.limit,
        offset=asked.offset,
        scope=scope_of(call),
        project_id=call.request.query_params.get("project_id"),
    )
    return reply(TrainingRunsResponse(training_runs=await _shown(call, page.items), cursor=asked.cursor(page)))


async def get_run(call: Call) -> Response:
    """One training run."""
    run = await _run(call)
    return reply((await _shown(call, [run]))[0])


async def list_run_checkpoints(call: Call) -> Response:
    """The checkpoints of a training run, newest first."""
    run_id = call.part("run_id")
    found = await call.stored(call.store.checkpoints.of_run, run_id, call.owner)
    if not found and await call.stored(call.store.models.get, run_id, call.owner, "accessible") is None:
        raise status_error(404, f"There is no training run {run_id!r}.")
    return reply(CheckpointsListResponse(checkpoints=[*map(shown_checkpoint, found)]))


async def _run(call: Call) -> Model:
    run_id = call.part("run_id")
    run = await call.stored(call.store.models.get, run_id, call.owner, scope_of(call))
    if run is None:
        raise status_error(404, f"There is no training run {run_id!r}.")
    return run


async def _shown(call: Call, runs: Sequence[Model]) -> list[TrainingRun]:
    ids = [run.model_id for run in runs]
    latest, latest_sampler = [
        await call.stored(call.store.checkpoints.latest, ids, kind, call.owner)
        for kind in ("weights", "sampler_weights")
    ]
    return [
        TrainingRun(
            training_run_id=run.model_id,
            base_model=run.base_model,
            model_owner=run.owner,
            is_lora=True,
            corrupted=run.corrupted is not None or call.services.workers.problem(run.base_model) is not None,
            lora_rank=run.lora.rank,
            last_request_time=run.last_request,
            last_checkpoint=shown_checkpoint(latest[run.model_id]) if run.model_id in latest else None,
            last_sampler_checkpoint=(
                shown_checkpoint(latest_sampler[run.model_id]) if run.model_id in latest_sampler else None
            ),
            user_metadata=run.user_metadata if run.owner == call.owner else None,
        )
        for run in runs
    ]


ENDPOINTS = (
    Endpoint("GET", "/api/v1/training_runs", list_runs, gives=TrainingRunsResponse),
    Endpoint("GET", "/api/v1/training_runs/{run_id}", get_run, gives=TrainingRun),
    Endpoint("GET", "/api/v1/training_runs/{run_id}/checkpoints", list_run_checkpoints, gives=CheckpointsListResponse),
)
