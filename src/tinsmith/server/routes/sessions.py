"""Sessions: one per client program, kept alive by its heartbeats."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from tinsmith.server import audit
from tinsmith.server.checks import check_tags, check_text, refuse, text_metadata
from tinsmith.server.routes._call import Call, Endpoint, nothing, reply, reply_plain, shortened, status_error
from tinsmith.server.routes._found import session_named
from tinsmith.server.routes._paging import page_of, scope_of
from tinsmith.server.routes._signed import expiry_of_urls, reader_of, signed_url
from tinsmith.server.routes._trace import session_trace
from tinsmith.server.store.records import (
    Heartbeat,
    NewSession,
    Session,
    SessionCursor,
    SessionQuery,
    StatusFilter,
)
from tinsmith.server.store.records import SessionSummary as StoredSummary
from tinsmith.server.waiting import note_abandoned
from tinsmith.types import (
    AssignSessionProjectRequest,
    ClientSessionFinished,
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishReason,
    ClientSessionFinishSuccess,
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    GetSessionResponse,
    ListSessionsResponse,
    OwnSearchOwner,
    SessionActive,
    SessionCancelled,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionStatus,
    SessionSummary,
    SessionTraceExportResponse,
    UserSearchOwner,
)
from tinsmith.types.service import ClientFinishedSessionStatusQuery, SessionStatusQuery
from tinsmith.wire import json

DEFAULT_PROJECT = "project-default"
MAX_CONDITIONS = 100

_FINISHES: Mapping[str, ClientSessionFinishReason] = {
    "success": ClientSessionFinishSuccess(),
    "errored": ClientSessionFinishErrored(),
    "interrupted": ClientSessionFinishInterrupted(),
}


async def create_session(call: Call) -> Response:
    """Open a session; everything a client makes belongs to one."""
    request = await call.read(CreateSessionRequest)
    check_tags(request.tags)
    for field in ("sdk_version", "project_id", "display_name"):
        check_text(field, getattr(request, field))
    call.services.paperwork.charge(call.owner, len(json.encode(request)))
    session = await call.stored(
        call.store.sessions.create,
        NewSession(
            owner=call.owner,
            tags=tuple(request.tags),
            user_metadata=text_metadata(request.user_metadata) or {},
            sdk_version=request.sdk_version,
            project_id=request.project_id or DEFAULT_PROJECT,
            display_name=request.display_name,
        ),
    )
    return reply(CreateSessionResponse(session_id=session.session_id))


async def session_heartbeat(call: Call) -> Response:
    """The client lives. 410 once the session has ended."""
    request = await call.read(SessionHeartbeatRequest)
    state = await call.services.heartbeats.add(Heartbeat(request.session_id, call.owner))
    if state is None:
        raise status_error(404, f"There is no session {request.session_id!r}.")
    if state != "active":
        raise status_error(410, f"The session {request.session_id!r} has ended.")
    return reply(SessionHeartbeatResponse())


async def finish_session(call: Call) -> Response:
    """The client is done. The first reason given is the one that stays. Nobody waits for samples it broke off from."""
    request = await call.read(FinishSessionRequest)
    session_id = call.part("session_id")
    reason = request.reason.type
    event = audit.done(call, "session_end", session_id=session_id, reason=reason)
    if not await call.stored(
        call.store.sessions.finish, session_id, call.owner, reason, request.detail and shortened(request.detail), event
    ):
        raise status_error(404, f"There is no session {session_id!r}.")
    if reason != "success":
        abandoned = await call.stored(call.store.jobs.cancel_samples, session_id)
        note_abandoned(abandoned, call.services.waiting, call.services.workers)
    return nothing()


async def list_sessions(call: Call) -> Response:
    """The ids of sessions, newest first."""
    page = page_of(call, limit=20)
    found = await call.stored(
        call.store.sessions.page, call.owner, limit=page.limit, offset=page.offset, scope=scope_of(call)
    )
    return reply(ListSessionsResponse(sessions=found))


async def get_session(call: Call) -> Response:
    """What was made in a session."""
    session = await session_named(call, call.part("session_id"), scope_of(call))
    members = await call.stored(call.store.sessions.members, session.session_id, call.owner)
    shown = _shown(session, call.owner)
    return reply(
        GetSessionResponse(
            training_run_ids=members.model_ids,
            sampler_ids=members.sampler_ids,
            user_metadata=shown.user_metadata,
            display_name=shown.display_name,
        )
    )


async def assign_project(call: Call) -> Response:
    """Move a session to another project."""
    request = await call.read(AssignSessionProjectRequest)
    check_text("project_id", request.project_id)
    session_id = call.part("session_id")
    call.services.paperwork.charge(call.owner, 0)
    event = audit.done(call, "session_move", session_id=session_id)
    if not await call.stored(call.store.sessions.set_project, session_id, call.owner, request.project_id, event):
        raise status_error(404, f"There is no session {session_id!r}.")
    return nothing()


async def trace_export(call: Call) -> Response:
    """A signed URL for the timeline of a session."""
    session = await session_named(call, call.part("session_id"))
    url = signed_url(call, _trace_path(session.session_id), expiry_of_urls(call))
    return reply(SessionTraceExportResponse(status="ready", url=url))


async def trace(call: Call) -> Response:
    """The timeline of a session by its signed URL, for Perfetto or Chrome's tracing page."""
    session_id = call.part("session_id")
    reader = await reader_of(call, _trace_path(session_id))
    session = await call.stored(call.store.sessions.get, session_id, reader)
    if session is None:
        raise status_error(404, f"There is no session {session_id!r}.")
    return reply_plain(await call.stored(session_trace, call.store, session))


def _trace_path(session_id: str) -> str:
    return f"api/v1/traces/{session_id}"


async def search_sessions(call: Call) -> Response:
    """Sessions that match, newest first."""
    request = await call.read(SessionSearchRequest)
    found = await call.stored(call.store.sessions.search, _query(request, call.owner))
    next_cursor = None
    if (cursor := found.next_cursor) is not None:
        next_cursor = SessionSearchCursor(
            last_created_at=cursor.last_created_at, last_session_id=cursor.last_session_id
        )
    summaries = [_summary(one, call.owner) for one in found.sessions]
    return reply(SessionSearchResponse(sessions=summaries, next_cursor=next_cursor))


def _query(request: SessionSearchRequest, caller: str) -> SessionQuery:
    _check_breadth(request)
    cursor = None
    if request.cursor is not None:
        asked = request.cursor
        cursor = SessionCursor(last_created_at=asked.last_created_at, last_session_id=asked.last_session_id)
    owner = request.owner
    return SessionQuery(
        reader=caller,
        scope="owned" if isinstance(owner, OwnSearchOwner) else "accessible",
        owners=tuple(owner.owner_urns) if isinstance(owner, UserSearchOwner) else None,
        session_id=request.session_id,
        project_ids=None if request.project_ids is None else tuple(request.project_ids),
        user_metadata=request.user_metadata,
        display_name=request.display_name,
        statuses=None if request.statuses is None else _filters(request.statuses),
        limit=request.limit,
        cursor=cursor,
    )


def _check_breadth(request: SessionSearchRequest) -> None:
    """Every condition makes the database's query longer, and that has a limit; so have patterns, and all names."""
    check_text("display_name", request.display_name)
    parts = {
        "project_ids": request.project_ids or (),
        "statuses": request.statuses or (),
        "user_metadata": request.user_metadata,
        "display_name": (request.display_name or "").split(),
    }
    for name, conditions in parts.items():
        if len(conditions) > MAX_CONDITIONS:
            raise refuse(name, f"has {len(conditions):,} parts; search for at most {MAX_CONDITIONS} at once")


def _filters(statuses: list[SessionStatusQuery]) -> tuple[StatusFilter, ...]:
    """A session of ours never fails as a whole, so that status finds nothing."""
    return tuple(
        StatusFilter(
            state=status.type,
            reasons=tuple(status.reasons or ()) if isinstance(status, ClientFinishedSessionStatusQuery) else (),
        )
        for status in statuses
        if status.type != "failed"
    )


def _shown(session: Session, reader: str) -> Session:
    """To others a session is where published checkpoints come from; what its owner wrote into it stays private."""
    if session.owner == reader:
        return session
    return msgspec.structs.replace(session, display_name=None, project_id=None, user_metadata={}, finish_detail=None)


def _summary(found: StoredSummary, reader: str) -> SessionSummary:
    session = _shown(found.session, reader)
    return SessionSummary(
        session_id=session.session_id,
        created_at=session.created,
        owner=session.owner,
        project_id=session.project_id or DEFAULT_PROJECT,
        status=_status(session),
        checkpoints_count=found.checkpoints_count,
        checkpoint_storage_bytes=found.checkpoint_bytes,
        display_name=session.display_name,
        user_metadata=session.user_metadata,
    )


def _status(session: Session) -> SessionStatus:
    if session.state == "active":
        return SessionActive()
    if session.state == "cancelled":
        return SessionCancelled(detail=session.finish_detail)
    return ClientSessionFinished(reason=_FINISHES[session.finish_reason or "success"], detail=session.finish_detail)


ENDPOINTS = (
    Endpoint("POST", "/api/v1/create_session", create_session, CreateSessionRequest, CreateSessionResponse),
    Endpoint("POST", "/api/v1/session_heartbeat", session_heartbeat, SessionHeartbeatRequest, SessionHeartbeatResponse),
    Endpoint("POST", "/api/v1/sessions/search", search_sessions, SessionSearchRequest, SessionSearchResponse),
    Endpoint("POST", "/api/v1/sessions/{session_id}/finish", finish_session, FinishSessionRequest),
    Endpoint("GET", "/api/v1/sessions", list_sessions, gives=ListSessionsResponse),
    Endpoint("GET", "/api/v1/sessions/{session_id}", get_session, gives=GetSessionResponse),
    Endpoint("PUT", "/api/v1/sessions/{session_id}/project", assign_project, AssignSessionProjectRequest),
    Endpoint("GET", "/api/v1/sessions/{session_id}/trace_export", trace_export, gives=SessionTraceExportResponse),
    Endpoint("GET", "/api/v1/traces/{session_id}", trace, is_open=True),
)
