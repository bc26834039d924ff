"""Looking things up: runs, checkpoints, sessions, the admin's lists, and the files of exported weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.api import BASE_MODELS, Refused
from tests.support.http11 import Recorded
from tests.support.script import Reply, ok
from tests.support.world import Checkpoint, Model, Session, World

DONE = Reply(204)
OWNER = "tml:organization_user:u-1"
URLS_EXPIRE = "2100-01-01T00:00:00Z"
_APIKEY = {
    "key_id": 7,
    "name": "laptop",
    "note": "made by hand",
    "details": {"org_details": {"name": "Example"}, "user_details": {"email": "dev@example.com"}},
}


class RestApi:
    """Routes with names in their paths, and those that only read."""

    def __init__(self, world: World, url: Callable[[], str], *, json_only: bool) -> None:
        self._world = world
        self._url = url
        self._json_only = json_only

    def handle(self, request: Recorded) -> Reply:
        if request.path.startswith("/files/"):
            return self._file(request)
        parts = request.endpoint.split("/")
        reply = self._read(request, parts) if request.method == "GET" else self._change(request, parts)
        if reply is None:
            raise Refused(404, "Not Found")
        return reply

    def _read(self, request: Recorded, parts: list[str]) -> Reply | None:
        match parts:
            case ["healthz"]:
                return ok({"status": "ok"})
            case ["get_server_capabilities"]:
                return ok({"supported_models": [self._supported(name) for name in BASE_MODELS]})
            case ["samplers", sampler_id]:
                return self._sampler(sampler_id)
            case ["training_runs"]:
                return self._training_runs(request.query)
            case ["training_runs", run_id]:
                return ok(self._run(self._model(run_id)))
            case ["training_runs", run_id, "checkpoints"]:
                found = self._world.of_run(run_id)
                return ok({"checkpoints": [checkpoint.shown() for checkpoint in found], "cursor": None})
        return None if self._json_only else self._read_more(request, parts)

    def _read_more(self, request: Recorded, parts: list[str]) -> Reply | None:
        """What the older servers lack."""
        match parts:
            case ["checkpoints"]:
                newest_first = [checkpoint.shown() for checkpoint in reversed(self._world.checkpoints.values())]
                return ok(_page("checkpoints", newest_first, request.query, 100))
            case ["training_runs", run_id, "checkpoints", kind, name, "external_weights_urls"]:
                return ok({"urls": self._file_urls(self._checkpoint(run_id, kind, name)), "expires": URLS_EXPIRE})
            case ["sessions"]:
                names = list(self._world.sessions)[::-1]
                return ok({"sessions": _page("sessions", names, request.query, 20)["sessions"]})
            case ["sessions", session_id]:
                return self._session_shown(self._session(session_id))
            case ["sessions", session_id, "trace_export"]:
                self._session(session_id)
                return ok({"status": "ready", "url": f"{self._url()}/files/trace/{session_id}"})
            case ["audit"]:
                return self._audit(request.query)
            case ["billing", "usage", "events"]:
                return self._billing(request.query)
            case ["billing", "usage", "checkpoints", "current"]:
                return self._storage(request.query)
            case ["auth", "apikey", "me"]:
                return ok(_APIKEY)
        return None

    def _change(self, request: Recorded, parts: list[str]) -> Reply | None:
        if self._json_only:
            return None
        match request.method, *parts:
            case "DELETE", "training_runs", run_id, "checkpoints", kind, name:
                del self._world.checkpoints[self._checkpoint(run_id, kind, name).path]
            case "POST", "training_runs", run_id, "checkpoints", kind, name, "publish":
                self._publish(self._checkpoint(run_id, kind, name), True)
            case "DELETE", "training_runs", run_id, "checkpoints", kind, name, "publish":
                self._publish(self._checkpoint(run_id, kind, name), False)
            case "PUT", "training_runs", run_id, "checkpoints", kind, name, "ttl":
                ttl = request.json()["ttl_seconds"]
                self._checkpoint(run_id, kind, name).expires_at = None if ttl is None else self._world.now(ttl)
            case "PUT", "sessions", session_id, "project":
                self._session(session_id).project_id = request.json()["project_id"]
            case "POST", "sessions", "search":
                return self._search(request.json())
            case "POST", "sessions", session_id, "finish":
                session = self._session(session_id)
                session.finished = session.finished or request.json()
            case "DELETE", "auth", "apikey", "me":
                pass
            case _:
                return None
        return DONE

    # Runs, checkpoints, samplers

    def _supported(self, name: str) -> dict[str, Any]:
        if self._json_only:
            return {"model_name": name}
        return {"model_name": name, "max_context_length": 32768, "trainable": True, "sampleable": True}

    def _sampler(self, sampler_id: str) -> Reply:
        if sampler_id not in self._world.samplers:
            raise Refused(404, f"no sampler {sampler_id}")
        sampler = self._world.samplers[sampler_id]
        return ok({"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path})

    def _training_runs(self, query: dict[str, str]) -> Reply:
        project = query.get("project_id")
        models = [model for model in self._world.models.values() if project in (None, model.session.project_id)]
        return ok(_page("training_runs", [self._run(model) for model in models], query, 20))

    def _run(self, model: Model) -> dict[str, Any]:
        saved = {checkpoint.kind: checkpoint.shown() for checkpoint in self._world.of_run(model.model_id)}
        return {
            "training_run_id": model.model_id,
            "base_model": model.base_model,
            "model_owner": OWNER,
            "is_lora": True,
            "corrupted": False,
            "lora_rank": model.lora["rank"],
            "last_request_time": model.last_request_time,
            "last_checkpoint": saved.get("weights"),
            "last_sampler_checkpoint": saved.get("sampler_weights"),
            "user_metadata": model.user_metadata,
        }

    def _publish(self, checkpoint: Checkpoint, public: bool) -> None:
        if checkpoint.public == public:
            raise Refused(409, f"{checkpoint.path} is {'already' if public else 'not'} public")
        checkpoint.public = public

    def _model(self, run_id: str) -> Model:
        if run_id not in self._world.models:
            raise Refused(404, f"no training run {run_id}")
        return self._world.models[run_id]

    def _checkpoint(self, run_id: str, kind: str, name: str) -> Checkpoint:
        path = f"tinker://{run_id}/{kind}/{name}"
        if path not in self._world.checkpoints:
            raise Refused(404, f"no checkpoint {path}")
        return self._world.checkpoints[path]

    # Files

    def _file_urls(self, checkpoint: Checkpoint) -> dict[str, str]:
        folder = f"{self._url()}/files/{checkpoint.run_id}/{checkpoint.name}"
        return {name: f"{folder}/{name}" for name in checkpoint.files}

    def _file(self, request: Recorded) -> Reply:
        match request.path.split("/", 4):
            case ["", "files", "trace", session_id]:
                return _ranged(request, f"trace of {session_id}".encode())
            case ["", "files", run_id, name, file]:
                return _ranged(request, self._checkpoint(run_id, "external_weights", name).files[file])
        raise Refused(404, "Not Found")

    # Sessions

    def _session(self, session_id: str) -> Session:
        if session_id not in self._world.sessions:
            raise Refused(404, f"no session {session_id}")
        return self._world.sessions[session_id]

    def _session_shown(self, session: Session) -> Reply:
        return ok(
            {
                "training_run_ids": session.models,
                "sampler_ids": session.samplers,
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    def _search(self, asked: dict[str, Any]) -> Reply:
        newest_first = [session for session in reversed(self._world.sessions.values()) if _wanted(session, asked)]
        if cursor := asked.get("cursor"):
            ids = [session.session_id for session in newest_first]
            newest_first = newest_first[ids.index(cursor["last_session_id"]) + 1 :]
        page = newest_first[: asked.get("limit", 50)]
        more = len(page) < len(newest_first)
        last = {"last_created_at": page[-1].created_at, "last_session_id": page[-1].session_id} if more else None
        return ok({"sessions": [self._summary(session) for session in page], "next_cursor": last})

    def _summary(self, session: Session) -> dict[str, Any]:
        saved = [checkpoint for model_id in session.models for checkpoint in self._world.of_run(model_id)]
        return {
            "session_id": session.session_id,
            "created_at": session.created_at,
            "owner": OWNER,
            "project_id": session.project_id,
            "checkpoints_count": len(saved),
            "checkpoint_storage_bytes": sum(checkpoint.size for checkpoint in saved),
            "status": _status(session),
            "display_name": session.display_name,
            "user_metadata": session.user_metadata,
        }

    # The admin's lists

    def _audit(self, query: dict[str, str]) -> Reply:
        if query.get("event_type", "all") not in ("all", "checkpoints"):
            return ok({"entries": []})
        entries = [
            {
                "timestamp": checkpoint.time,
                "event": "checkpoint_created",
                "event_details": {"kind": checkpoint.kind},
                "model_id": checkpoint.run_id,
                "tinker_path": checkpoint.path,
            }
            for checkpoint in self._world.checkpoints.values()
        ]
        return ok({"entries": entries})

    def _billing(self, query: dict[str, str]) -> Reply:
        hour = {"bucket_start": query["starting_on"], "bucket_end": query["ending_before"]}
        kinds: list[dict[str, Any]] = [
            {"type": "training", "token_count": 100},
            {"type": "sampling_prefill", "cached": True, "token_count": 10},
            {"type": "sampling_sample", "token_count": 20},
            {"type": "checkpoint", "count": len(self._world.checkpoints)},
            {"type": "storage", "gigabyte_hours": 0.5},
        ]
        known = {**hour, "base_model": BASE_MODELS[0], "estimated_cost_usd": 1.25}
        events = [{**known, "event_info": kind} for kind in kinds]
        sessions = {name: {"user_metadata": found.user_metadata} for name, found in self._world.sessions.items()}
        return ok({"data": events, "sessions": sessions, "cost_data_through": query["ending_before"]})

    def _storage(self, query: dict[str, str]) -> Reply:
        size = sum(checkpoint.size for checkpoint in self._world.checkpoints.values())
        item = {
            "checkpoint_count": len(self._world.checkpoints),
            "size_bytes": size,
            "size_gigabytes": size / 1e9,
            "project_id": query.get("project_id", "project-default"),
            "org_user_urn": OWNER,
            "estimated_monthly_cost_usd": 0.01,
        }
        return ok({"effective_rate_usd_per_gigabyte_month": 0.1, "data": [item]})


def _page(name: str, items: list[Any], query: dict[str, str], default_limit: int) -> dict[str, Any]:
    limit, offset = int(query.get("limit", default_limit)), int(query.get("offset", 0))
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}


def _ranged(request: Recorded, content: bytes) -> Reply:
    """The whole file, or the part from a `Range: bytes=first-last` header."""
    headers = {"content-type": "application/octet-stream", "accept-ranges": "bytes"}
    asked = request.headers.get("range")
    if asked is None:
        return Reply(body=content, headers=headers)
    first_text, _, last_text = asked.removeprefix("bytes=").partition("-")
    first = int(first_text) if first_text else max(0, len(content) - int(last_text))
    last = min(int(last_text) if first_text and last_text else len(content) - 1, len(content) - 1)
    if first > last:
        return Reply(416, body=b"", headers={**headers, "content-range": f"bytes */{len(content)}"})
    headers["content-range"] = f"bytes {first}-{last}/{len(content)}"
    return Reply(206, body=content[first : last + 1], headers=headers)


def _wanted(session: Session, asked: dict[str, Any]) -> bool:
    metadata = asked.get("user_metadata") or {}
    statuses = asked.get("statuses")
    return (
        asked.get("session_id") in (None, session.session_id)
        and asked.get("display_name") in (None, session.display_name)
        and session.project_id in (asked.get("project_ids") or [session.project_id])
        and metadata.items() <= session.user_metadata.items()
        and (statuses is None or _status(session)["type"] in [status["type"] for status in statuses])
    )


def _status(session: Session) -> dict[str, Any]:
    if session.finished is None:
        return {"type": "active"}
    return {"type": "client_finished", "reason": session.finished["reason"], "detail": session.finished["detail"]}
