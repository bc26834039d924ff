"""The service itself: its settings for clients, its models, its health, and who is asking."""

from __future__ import annotations

from starlette.responses import Response

from tinsmith.server import audit
from tinsmith.server.full_disk import Disk
from tinsmith.server.routes._call import Call, Endpoint, nothing, reply, reply_plain, status_error
from tinsmith.server.waiting import Workers
from tinsmith.types import (
    AuthTokenResponse,
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    SupportedModel,
    TelemetryResponse,
)

_INPUT_MODALITIES = ["text"]
"""Of every model that the engine knows."""


async def client_config(call: Call) -> Response:
    """What this server asks of its clients; read once, at their start."""
    return reply(
        ClientConfigResponse(
            pjwt_auth_enabled=call.services.config.token_exchange,
            proto_compress_fwdbwd=True,
            sample_use_retrieve_futures=True,
            sample_join_sampling_session=True,
            create_model_via_load_weights=True,
            custom_loss_server_side=True,
        )
    )


async def client_dynamic_config(call: Call) -> Response:
    """The same for what may change while a client lives."""
    return reply(ClientDynamicConfigResponse(sample_cancel_enabled=True))


async def auth_token(call: Call) -> Response:
    """A short-lived token for the key that is sent along."""
    return reply(AuthTokenResponse(jwt=call.services.authority.token_for(call.caller)))


async def apikey_me(call: Call) -> Response:
    """The key that is sent along, as far as it may be shown."""
    key = call.caller.key
    return reply_plain(
        {
            "key_id": key.key_id if key else 0,
            "name": key.name if key else "local",
            "note": key.note if key else "This server accepts any key.",
            "details": {"org_details": {"name": "local"}, "user_details": {"email": call.owner}},
        }
    )


async def revoke_apikey_me(call: Call) -> Response:
    """Revoke the key that is sent along."""
    await call.stored(call.services.authority.revoke, call.caller, audit.address(call))
    return nothing()


async def capabilities(call: Call) -> Response:
    """The base models, whether they can be trained and sampled, and what they take."""
    workers = call.services.workers
    answer = GetServerCapabilitiesResponse(
        supported_models=[
            SupportedModel(
                model_name=name,
                max_context_length=facts.max_context,
                trainable=workers.problem(name) is None,
                sampleable=workers.problem(name) is None,
            )
            for name, facts in call.services.models.items()
        ]
    )
    # A field of our own, which clients keep although the API does not know it.
    models = [{**model.to_builtins(), "input_modalities": _INPUT_MODALITIES} for model in answer.supported_models]
    return reply_plain({**answer.to_builtins(), "supported_models": models})


async def telemetry(call: Call) -> Response:
    """Reports of clients about themselves. They may hold credentials and prompts, so nothing of them is kept."""
    return reply(TelemetryResponse(status="accepted"))


async def healthz(call: Call) -> Response:
    """Whether the API process lives."""
    return reply(HealthResponse(status="ok"))


async def readyz(call: Call) -> Response:
    """Whether every base model is loaded and can work; 503 if not, with the reasons."""
    reasons = list(filter(None, (_why_not(call.services.workers, name) for name in call.services.models)))
    if not Disk(call.services.config.state).fits(0):
        reasons.append("The server's disk is full; make room on it.")
    if call.services.storage.is_away:
        reasons.append("The storage of the server's files is out of reach.")
    if reasons:
        raise status_error(503, " ".join(reasons))
    return reply_plain({"status": "ready"})


def _why_not(workers: Workers, base_model: str) -> str | None:
    problem, held_up = workers.problem(base_model), workers.held_up(base_model)
    if problem is None and held_up is not None:
        return f"The base model {base_model!r} waits: {held_up}."
    return None if workers.is_ready(base_model) else problem or f"The base model {base_model!r} is still being loaded."


ENDPOINTS = (
    Endpoint("POST", "/api/v1/client/config", client_config, ClientConfigRequest, ClientConfigResponse),
    Endpoint(
        "POST", "/api/v1/client/dynamic_config", client_dynamic_config, ClientConfigRequest, ClientDynamicConfigResponse
    ),
    Endpoint("POST", "/api/v1/auth/token", auth_token, gives=AuthTokenResponse),
    Endpoint("GET", "/api/v1/auth/apikey/me", apikey_me),
    Endpoint("DELETE", "/api/v1/auth/apikey/me", revoke_apikey_me),
    Endpoint("GET", "/api/v1/get_server_capabilities", capabilities, gives=GetServerCapabilitiesResponse),
    Endpoint("POST", "/api/v1/telemetry", telemetry, gives=TelemetryResponse),
    Endpoint("GET", "/api/v1/healthz", healthz, gives=HealthResponse, is_open=True),
    Endpoint("GET", "/readyz", readyz, is_open=True),
)
