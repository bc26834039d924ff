"""The REST client: look at, publish, download and delete what the account owns."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
import warnings
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

from tinsmith.client.admin import AdminClient, AuditEventType
from tinsmith.client.checks import check_choice, check_count, check_id, check_text, parse_checkpoint_path
from tinsmith.client.connection import Call, Connection
from tinsmith.client.conversions import SLOWEST_BYTES_PER_SECOND, AdapterUpload, OnBytes, receive_export
from tinsmith.client.download import GetUrls, ProgressCallback, download_files
from tinsmith.client.futures import APIFuture
from tinsmith.client.paging import Page, Pages, next_offset
from tinsmith.client.rest_calls import RestCalls, query_string, sdk_headers
from tinsmith.client.transport import Traffic
from tinsmith.errors import (
    InvalidInputError,
    InvalidTypeError,
    NoProgressError,
    NotFoundError,
    UnsupportedByServerError,
)
from tinsmith.types import (
    AuditLogResponse,
    BillingUsageResponse,
    Checkpoint,
    CheckpointsListResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    CurrentCheckpointStorageUsageResponse,
    ExternalWeightsUrlsResponse,
    GetSamplerResponse,
    GetServerCapabilitiesResponse,
    GetSessionResponse,
    HealthResponse,
    ImportWeightsResponse,
    ListSessionsResponse,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionSummary,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
    WhoamiResponse,
)
from tinsmith.types._model import Response
from tinsmith.wire import json as wire_json
from tinsmith.wire import tar

AccessScope = Literal["owned", "accessible"]
ExportForm = Literal["peft", "merged", "gguf"]

TRACE_POLL_SECONDS = 5.0
RUNS_PER_PAGE = 100
CHECKPOINTS_PER_PAGE = 1000
SESSIONS_PER_PAGE = 100


class ExperimentalWarning(FutureWarning):
    """This call may change or disappear."""


class RestClient(RestCalls):
    """Needs no session. Synchronous methods return a future; twins with `_async` return the value."""

    # The server

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """Which models can be trained and sampled."""
        return self._get(GetServerCapabilitiesResponse, "/api/v1/get_server_capabilities", "get_server_capabilities")

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        return await self.get_server_capabilities()

    # Training runs

    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> APIFuture[TrainingRun]:
        path = f"/api/v1/training_runs/{_id('training_run_id', training_run_id)}"
        return self._get(TrainingRun, path, "get_training_run", _scope(access_scope))

    async def get_training_run_async(self, training_run_id: str, access_scope: AccessScope = "owned") -> TrainingRun:
        return await self.get_training_run(training_run_id, access_scope)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        run = parse_checkpoint_path("tinker_path", tinker_path).training_run_id
        path = f"/api/v1/training_runs/{_id('training_run_id', run)}"
        return self._get(TrainingRun, path, "get_training_run_by_tinker_path", _scope(access_scope))

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> TrainingRun:
        return await self.get_training_run_by_tinker_path(tinker_path, access_scope)

    def list_training_runs(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> APIFuture[TrainingRunsResponse]:
        query = {**_page(limit, offset), **_scope(access_scope), "project_id": project_id}
        return self._get(TrainingRunsResponse, "/api/v1/training_runs", "list_training_runs", query)

    async def list_training_runs_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> TrainingRunsResponse:
        return await self.list_training_runs(limit, offset, access_scope, project_id)

    def iter_training_runs(
        self, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> Pages[TrainingRun, int]:
        """All runs, for `for` or `async for`; pages are fetched as they are needed."""
        scope = _scope(access_scope)

        async def fetch(offset: int) -> Page[TrainingRun, int]:
            query = {**_page(RUNS_PER_PAGE, offset), **scope, "project_id": project_id}
            answer = await self._fetch(TrainingRunsResponse, "/api/v1/training_runs", "list_training_runs", query)
            runs = answer.training_runs
            return Page(runs, next_offset(offset, RUNS_PER_PAGE, len(runs), answer.cursor.total_count))

        return Pages(lambda offset: self._connection.run(functools.partial(fetch, offset)), 0)

    # Checkpoints

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        path = f"/api/v1/training_runs/{_id('training_run_id', training_run_id)}/checkpoints"
        return self._get(CheckpointsListResponse, path, "list_checkpoints")

    async def list_checkpoints_async(self, training_run_id: str) -> CheckpointsListResponse:
        return await self.list_checkpoints(training_run_id)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointsListResponse]:
        query = _page(limit, offset)
        return self._get(CheckpointsListResponse, "/api/v1/checkpoints", "list_user_checkpoints", query)

    async def list_user_checkpoints_async(self, limit: int = 100, offset: int = 0) -> CheckpointsListResponse:
        return await self.list_user_checkpoints(limit, offset)

    def iter_user_checkpoints(self) -> Pages[Checkpoint, int]:
        """All checkpoints of the user, newest first."""

        async def fetch(offset: int) -> Page[Checkpoint, int]:
            query = _page(CHECKPOINTS_PER_PAGE, offset)
            answer = await self._fetch(CheckpointsListResponse, "/api/v1/checkpoints", "list_user_checkpoints", query)
            total = answer.cursor.total_count if answer.cursor else None
            found = answer.checkpoints
            return Page(found, next_offset(offset, CHECKPOINTS_PER_PAGE, len(found), total))

        return Pages(lambda offset: self._connection.run(functools.partial(fetch, offset)), 0)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        parse_checkpoint_path("tinker_path", tinker_path)
        body = wire_json.encode({"tinker_path": tinker_path})
        return self._post(WeightsInfoResponse, "/api/v1/weights_info", "get_weights_info_by_tinker_path", body)

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """Links to the files of an exported checkpoint."""
        path = f"{_checkpoint_path(tinker_path, only='external')}/external_weights_urls"
        return self._get(ExternalWeightsUrlsResponse, path, "get_external_weights_urls")

    async def get_external_weights_urls_async(self, tinker_path: str) -> ExternalWeightsUrlsResponse:
        return await self.get_external_weights_urls(tinker_path)

    def download_external_weights(
        self, tinker_path: str, folder: str | Path, on_progress: ProgressCallback | None = None
    ) -> APIFuture[list[Path]]:
        """Fetches the files of an exported checkpoint into a folder; called again, it goes on where it stopped.

        `on_progress` is called with a `Progress` after every piece, on a thread of the SDK.
        """
        get_urls = link_signer(self._connection, tinker_path)
        return self._connection.run(
            lambda: download_files(self._connection, get_urls, Path(folder), label=tinker_path, on_progress=on_progress)
        )

    async def download_external_weights_async(
        self, tinker_path: str, folder: str | Path, on_progress: ProgressCallback | None = None
    ) -> list[Path]:
        return await self.download_external_weights(tinker_path, folder, on_progress)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        run = check_id("training_run_id", training_run_id)
        path = _checkpoint_path(f"tinker://{run}/{check_text('checkpoint_id', checkpoint_id)}")
        return self._change("DELETE", path, "delete_checkpoint")

    async def delete_checkpoint_async(self, training_run_id: str, checkpoint_id: str) -> None:
        await self.delete_checkpoint(training_run_id, checkpoint_id)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        return self._change("DELETE", _checkpoint_path(tinker_path), "delete_checkpoint_from_tinker_path")

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.delete_checkpoint_from_tinker_path(tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Makes a checkpoint readable for everyone. Publishing twice is a `ConflictError`."""
        path = f"{_checkpoint_path(tinker_path)}/publish"
        return self._change("POST", path, "publish_checkpoint_from_tinker_path")

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.publish_checkpoint_from_tinker_path(tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        path = f"{_checkpoint_path(tinker_path)}/publish"
        return self._change("DELETE", path, "unpublish_checkpoint_from_tinker_path")

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.unpublish_checkpoint_from_tinker_path(tinker_path)

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> APIFuture[None]:
        """Lets a checkpoint expire after so many seconds; None keeps it for ever."""
        if ttl_seconds is not None:
            check_count("ttl_seconds", ttl_seconds, minimum=1)
        body = wire_json.encode({"ttl_seconds": ttl_seconds})
        path = f"{_checkpoint_path(tinker_path)}/ttl"
        return self._change("PUT", path, "set_checkpoint_ttl_from_tinker_path", body)

    async def set_checkpoint_ttl_from_tinker_path_async(self, tinker_path: str, ttl_seconds: int | None) -> None:
        await self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copies a checkpoint into a project and gives the new path."""
        project = destination_project_id or self._connection.config.project_id
        if not project:
            raise InvalidInputError(
                "copy_weights needs a project: pass destination_project_id or set TINKER_PROJECT_ID.",
                field="destination_project_id",
            )
        parse_checkpoint_path("path", path)
        request = CopyWeightsRequest(source_path=path, destination_project_id=project, ttl_seconds=ttl_seconds)
        headers = {**sdk_headers("RestClient", "copy_weights"), "X-Idempotency-Key": str(uuid.uuid4())}
        if weights_access_token is not None:
            headers["X-Tinker-Weights-Access-Token"] = weights_access_token
        call = Call("POST", "/api/v1/copy_weights", wire_json.encode(request), Traffic.REST, headers=headers)

        async def copy() -> str:
            return (await self._connection.call_for(CopyWeightsResponse, call)).tinker_path

        return self._connection.run(copy)

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> str:
        return await self.copy_weights(
            path, destination_project_id, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        )

    # Other tools

    def export_checkpoint(
        self,
        tinker_path: str,
        folder: str | Path,
        to: ExportForm = "peft",
        *,
        data_note: str = "",
        force: bool = False,
        on_bytes: OnBytes | None = None,
    ) -> APIFuture[list[Path]]:
        """Makes a folder that other tools load: a PEFT adapter, a merged model, or GGUF for llama.cpp.

        The server merges, with its own base model. The folder appears when it is complete; with `force` it replaces
        what is there. `data_note` goes into the model card. Only Tinsmith's own server can do this.
        """
        check_choice("to", to, get_args(ExportForm))
        query = query_string({"to": to, "data_note": data_note or None})
        path = f"{_checkpoint_path(tinker_path)}/export{query}"
        call = Call("GET", path, traffic=Traffic.REST, headers=sdk_headers("RestClient", "export_checkpoint"))
        target = Path(folder).expanduser().absolute()

        async def export() -> list[Path]:
            from tinsmith.export.folders import new_folder

            with new_folder(target, force=force) as unfinished:
                files = await receive_export(self._connection, call, unfinished, on_bytes)
            return [target / file.relative_to(unfinished) for file in files]

        return self._connection.run(export)

    async def export_checkpoint_async(
        self,
        tinker_path: str,
        folder: str | Path,
        to: ExportForm = "peft",
        *,
        data_note: str = "",
        force: bool = False,
        on_bytes: OnBytes | None = None,
    ) -> list[Path]:
        return await self.export_checkpoint(
            tinker_path, folder, to, data_note=data_note, force=force, on_bytes=on_bytes
        )

    def import_adapter(self, folder: str | Path, base_model: str, name: str = "imported") -> APIFuture[str]:
        """Makes a checkpoint of a PEFT adapter that was trained elsewhere and gives its path.

        It can be trained further (`create_training_client_from_state`), sampled from and exported. Only Tinsmith's own
        server can do this.
        """
        check_text("base_model", base_model)
        check_text("name", name)
        upload = AdapterUpload(Path(folder).expanduser())
        call = Call(
            "POST",
            f"/api/v1/import_weights{query_string({'base_model': base_model, 'name': name})}",
            traffic=Traffic.REST,
            content_type=tar.CONTENT_TYPE,
            headers={
                **sdk_headers("RestClient", "import_adapter"),
                "X-Idempotency-Key": str(uuid.uuid4()),
                "Content-Length": str(upload.num_bytes),
            },
            timeout=self._connection.config.timeout + upload.num_bytes / SLOWEST_BYTES_PER_SECOND,
            upload=upload.pieces,
        )

        async def send() -> str:
            try:
                return (await self._connection.call_for(ImportWeightsResponse, call)).tinker_path
            except NotFoundError as error:
                server = self._connection.config.base_url
                raise UnsupportedByServerError(f"The server at {server} takes no adapters.") from error

        return self._connection.run(send)

    async def import_adapter_async(self, folder: str | Path, base_model: str, name: str = "imported") -> str:
        return await self.import_adapter(folder, base_model, name)

    # Sessions

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> APIFuture[GetSessionResponse]:
        path = f"/api/v1/sessions/{_id('session_id', session_id)}"
        return self._get(GetSessionResponse, path, "get_session", _scope(access_scope))

    async def get_session_async(self, session_id: str, access_scope: AccessScope = "owned") -> GetSessionResponse:
        return await self.get_session(session_id, access_scope)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        query = {**_page(limit, offset), **_scope(access_scope)}
        return self._get(ListSessionsResponse, "/api/v1/sessions", "list_sessions", query)

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> ListSessionsResponse:
        return await self.list_sessions(limit, offset, access_scope)

    def iter_sessions(self, access_scope: AccessScope = "owned") -> Pages[str, int]:
        """The ids of all sessions."""
        scope = _scope(access_scope)

        async def fetch(offset: int) -> Page[str, int]:
            query = {**_page(SESSIONS_PER_PAGE, offset), **scope}
            found = (await self._fetch(ListSessionsResponse, "/api/v1/sessions", "list_sessions", query)).sessions
            return Page(found, next_offset(offset, SESSIONS_PER_PAGE, len(found), None))

        return Pages(lambda offset: self._connection.run(functools.partial(fetch, offset)), 0)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Files a session under a project. It can be moved later, but not back to no project."""
        body = wire_json.encode({"project_id": check_text("project_id", project_id)})
        return self._change(
            "PUT", f"/api/v1/sessions/{_id('session_id', session_id)}/project", "assign_session_project", body
        )

    async def assign_session_project_async(self, session_id: str, project_id: str) -> None:
        await self.assign_session_project(session_id, project_id)

    def export_session_trace(self, session_id: str) -> APIFuture[str]:
        """A link to the session's trace; waits until the server has made it."""
        path = f"/api/v1/sessions/{_id('session_id', session_id)}/trace_export"

        async def export() -> str:
            deadline = time.monotonic() + self._connection.config.progress_timeout
            while True:
                answer = await self._fetch(_TraceExport, path, "export_session_trace")
                if answer.status == "ready" and answer.url:
                    return answer.url
                if answer.status != "pending":
                    raise UnsupportedByServerError(
                        f"The trace of session {session_id} could not be exported: {answer.error or answer.status}."
                    )
                if time.monotonic() > deadline:
                    raise NoProgressError(
                        message=f"The trace of session {session_id} is still being made. Ask again later, or raise "
                        "progress_timeout in the Config."
                    )
                await asyncio.sleep(TRACE_POLL_SECONDS)

        return self._connection.run(export)

    async def export_session_trace_async(self, session_id: str) -> str:
        return await self.export_session_trace(session_id)

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """Experimental: one page of sessions; the next one starts at `next_cursor`."""
        warnings.warn("search_sessions is experimental and may change.", ExperimentalWarning, stacklevel=2)
        return self._search(request)

    async def search_sessions_async(self, request: SessionSearchRequest) -> SessionSearchResponse:
        warnings.warn("search_sessions is experimental and may change.", ExperimentalWarning, stacklevel=2)
        return await self._search(request)

    def iter_search_sessions(
        self, request: SessionSearchRequest
    ) -> Pages[SessionSummary, SessionSearchCursor | Literal["first"]]:
        """All sessions that a search finds."""
        warnings.warn("search_sessions is experimental and may change.", ExperimentalWarning, stacklevel=2)

        async def fetch(
            cursor: SessionSearchCursor | Literal["first"],
        ) -> Page[SessionSummary, SessionSearchCursor | Literal["first"]]:
            page = request if cursor == "first" else request.model_copy(update={"cursor": cursor})
            answer = await self._search(page)
            return Page(answer.sessions, answer.next_cursor)

        return Pages(lambda cursor: self._connection.run(functools.partial(fetch, cursor)), "first")

    def _search(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        _check_search(request)
        body = wire_json.encode(request)
        return self._post(SessionSearchResponse, "/api/v1/sessions/search", "search_sessions", body)

    # The rest

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        return self._get(GetSamplerResponse, f"/api/v1/samplers/{_id('sampler_id', sampler_id)}", "get_sampler")

    async def get_sampler_async(self, sampler_id: str) -> GetSamplerResponse:
        return await self.get_sampler(sampler_id)

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Who the credential belongs to. Known only on servers that exchange it for a token."""

        async def ask() -> WhoamiResponse:
            claims = await self._connection.claims()
            if claims is None:
                raise UnsupportedByServerError("This server takes plain API keys, which do not say whose they are.")
            return _whoami(claims)

        return self._connection.run(ask)

    def health(self) -> APIFuture[HealthResponse]:
        """Whether the server is up. Asked once, without retries."""
        call = Call(
            "GET", "/api/v1/healthz", traffic=Traffic.REST, headers=sdk_headers("RestClient", "health"), retries=False
        )
        return self._connection.run(lambda: self._connection.call_for(HealthResponse, call))

    async def health_async(self) -> HealthResponse:
        return await self.health()

    # Moved to AdminClient

    def get_audit_log(self, event_type: AuditEventType = "all", day: date | None = None) -> APIFuture[AuditLogResponse]:
        """Deprecated: use `AdminClient`."""
        return self._admin("get_audit_log").get_audit_log(event_type, day)

    async def get_audit_log_async(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> AuditLogResponse:
        return await self._admin("get_audit_log").get_audit_log(event_type, day)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Deprecated: use `AdminClient`."""
        return self._admin("get_billing_usage").get_billing_usage(starting_on, ending_before)

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> BillingUsageResponse:
        return await self._admin("get_billing_usage").get_billing_usage(starting_on, ending_before)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use `AdminClient`."""
        admin = self._admin("get_current_checkpoint_storage_usage")
        return admin.get_current_checkpoint_storage_usage(project_id)

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        admin = self._admin("get_current_checkpoint_storage_usage")
        return await admin.get_current_checkpoint_storage_usage(project_id)

    def _admin(self, method: str) -> AdminClient:
        warnings.warn(f"RestClient.{method} has moved to AdminClient.", FutureWarning, stacklevel=3)
        return AdminClient(self._connection)


def link_signer(connection: Connection, tinker_path: str) -> GetUrls:
    """What signs links to the files of an export, again and again if need be."""
    path = f"{_checkpoint_path(tinker_path, only='external')}/external_weights_urls"
    call = Call("GET", path, traffic=Traffic.REST, headers=sdk_headers("RestClient", "get_external_weights_urls"))
    return lambda: connection.call_for(ExternalWeightsUrlsResponse, call)


class _TraceExport(Response):
    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


def _check_search(request: Any) -> None:
    if not isinstance(request, SessionSearchRequest):
        raise InvalidTypeError(
            f"request is {request!r}; it must be a SessionSearchRequest.", field="request", value=request
        )


def _id(field: str, value: str) -> str:
    """An id as part of a URL; colons stay as they are, as servers expect."""
    return quote(check_id(field, value), safe=":")


def _page(limit: int, offset: int) -> dict[str, int]:
    check_count("limit", limit, minimum=1)
    check_count("offset", offset)
    return {"limit": limit, "offset": offset}


def _scope(access_scope: AccessScope) -> dict[str, str]:
    check_choice("access_scope", access_scope, get_args(AccessScope))
    return {"access_scope": access_scope}


def _checkpoint_path(tinker_path: str, only: str | None = None) -> str:
    parsed = parse_checkpoint_path("tinker_path", tinker_path)
    if only is not None and parsed.checkpoint_type != only:
        raise InvalidInputError(
            f"{tinker_path} is a {parsed.checkpoint_type} checkpoint; only exported ones (external_weights) have files "
            "to fetch. Make one with TrainingClient.save_weights_external().",
            field="tinker_path",
            value=tinker_path,
        )
    run, checkpoint = quote(parsed.training_run_id, safe=":"), quote(parsed.checkpoint_id, safe=":/")
    return f"/api/v1/training_runs/{run}/checkpoints/{checkpoint}"


def _whoami(claims: Mapping[str, object]) -> WhoamiResponse:
    email = claims.get("email")
    return WhoamiResponse(
        user_urn=str(claims.get("sub", "")),
        org_urn=f"tml:organization:{claims.get('org_id', '')}",
        email=str(email) if email else None,
    )
