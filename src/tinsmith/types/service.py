"""The service itself: capabilities, configuration, sessions and who is asking."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from tinsmith.types._model import Request, Response, Secret, SendNull
from tinsmith.types.training import ModelID

# --- the server ------------------------------------------------------------------------------------------------------


class SupportedModel(Response):
    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class GetServerCapabilitiesResponse(Response):
    supported_models: list[SupportedModel]


class HealthResponse(Response):
    status: Literal["ok"]


class ClientConfigRequest(Request):
    sdk_version: str


class ClientConfigResponse(Response):
    """What the server asks of its clients; read once, at the start."""

    pjwt_auth_enabled: bool = False
    """Exchange the credential for a short-lived token first."""

    credential_default_source: str = "api_key"
    """`credential_cmd` makes the credential command mandatory."""

    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    """Bytes of samples being submitted at one time."""

    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    """Bytes of results being fetched at one time."""

    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    """Compress training requests with zstd."""

    fwdbwd_max_chunk_len: int = 1024
    """Data per training request."""

    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    """Estimated bytes per training request, before compression."""

    fwdbwd_dispatch_bytes_semaphore_size: int = 50 * 1000 * 1000
    """Estimated bytes of training requests being submitted at one time."""

    billing_exception_max_pause_duration_sec: int = 60 * 60
    """How long an unpaid bill pauses work before it fails."""

    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    """A load request may make the model it loads into."""

    sample_use_retrieve_futures: bool = False
    """One poll for all samples of a client, instead of one for each."""

    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False
    """Copies of a sampling client ask for a number instead of drawing one."""


class ClientDynamicConfigResponse(Response):
    """The same for what may change while a client lives; read again and again."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


# --- who is asking ---------------------------------------------------------------------------------------------------


class AuthTokenResponse(Response):
    jwt: Secret[str]


class WhoamiResponse(Response):
    user_urn: str
    org_urn: str
    email: str | None = None


# --- sessions --------------------------------------------------------------------------------------------------------


class CreateSessionRequest(Request):
    tags: list[str]
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    """For people; it need not be unique."""

    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Response):
    """The messages, if any, are meant to be logged at their level."""

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(Request):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Response):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class GetSessionResponse(Response):
    training_run_ids: list[ModelID]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(Response):
    sessions: list[str]


class AssignSessionProjectRequest(Request):
    project_id: str


class SessionTraceExportResponse(Response):
    """How far the export of a session's trace is."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


# --- how a session ended ---------------------------------------------------------------------------------------------

ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]


class ClientSessionFinishSuccess(Response):
    type: Literal["success"] = "success"


class ClientSessionFinishErrored(Response):
    type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(Response):
    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason: TypeAlias = (
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted
)


class FinishSessionRequest(Request):
    """Ends a session. The first reason given is the one that stays."""

    reason: ClientSessionFinishReason
    detail: SendNull[str | None] = None


class SessionFailedRequestReason(Response):
    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Response):
    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(Response):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason: TypeAlias = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)


class SessionFailed(Response):
    """One of its requests, training runs or samplers ended the session."""

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


class SessionCancelled(Response):
    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class ClientSessionFinished(Response):
    """The client said that it was done."""

    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionActive(Response):
    type: Literal["active"] = "active"


SessionStatus: TypeAlias = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive


# --- searching sessions ----------------------------------------------------------------------------------------------


class OwnSearchOwner(Request):
    """The caller's own sessions."""

    type: Literal["own"] = "own"


class AccessibleSearchOwner(Request):
    """The sessions of everybody, as far as the caller may see them."""

    type: Literal["accessible"] = "accessible"


class UserSearchOwner(Request):
    """The sessions of one to ten users."""

    type: Literal["user"] = "user"
    owner_urns: Annotated[list[str], msgspec.Meta(min_length=1, max_length=10)]


SearchOwner: TypeAlias = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner


class ActiveSessionStatusQuery(Request):
    type: Literal["active"] = "active"


class CancelledSessionStatusQuery(Request):
    type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(Request):
    type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(Request):
    type: Literal["client_finished"] = "client_finished"
    reasons: Annotated[list[ClientSessionFinishReasonType], msgspec.Meta(min_length=1)] | None = None
    """`None` matches every reason."""


SessionStatusQuery: TypeAlias = (
    ActiveSessionStatusQuery | CancelledSessionStatusQuery | FailedSessionStatusQuery | ClientFinishedSessionStatusQuery
)


class SessionSearchCursor(Response):
    """Where the next page starts."""

    last_created_at: Annotated[datetime, msgspec.Meta(tz=True)]
    last_session_id: str


class SessionSearchRequest(Request):
    """Which sessions to find. `None` matches all."""

    session_id: str | None = None
    """The exact id. Together with `display_name`, either may match."""

    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    """Every pair must match exactly."""

    display_name: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Every word must occur in the name, in any case."""

    owner: SearchOwner = OwnSearchOwner()
    statuses: Annotated[list[SessionStatusQuery], msgspec.Meta(min_length=1)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: SessionSearchCursor | None = None
    """`next_cursor` of the page before."""


class SessionSummary(Response):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    """`None` if it neither ended nor is known to run."""

    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Response):
    """One page, newest first."""

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
    """`None` on the last page."""
