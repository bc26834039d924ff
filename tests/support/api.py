"""Sessions, training and sampling: the part of the API that a training script uses."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from tests.support import codec
from tests.support.engine import BadInput, Policy, Sampled, run_loss, sample
from tests.support.http11 import Recorded
from tests.support.promises import CLONE_STRIDE, Promise, Promises, Result
from tests.support.script import Reply, detail, ok
from tests.support.world import ADAM, Checkpoint, Model, Sampler, Session, World

T = TypeVar("T")
BASE_MODELS = ("tiny/model-1", "tiny/model-2", "Qwen/Qwen3-8B")
_LORA = {"rank": 32, "train_unembed": True, "train_mlp": True, "train_attn": True}
_NOT_OBJECT = {
    "type": "model_attributes_type",
    "loc": ["body"],
    "msg": "Input should be a valid dictionary or object to extract fields from",
}


class Refused(Exception):
    """Answered with a status other than 200."""

    def __init__(self, status: int, text: Any) -> None:
        super().__init__(text)
        self.reply = detail(status, text)


class TrainingApi:
    """One method per endpoint, named after it; `handlers` finds them by path."""

    def __init__(self, world: World, promises: Promises, *, json_only: bool) -> None:
        self.flags: dict[str, Any] = {}
        self.dynamic_flags: dict[str, Any] = {}
        self.messages: dict[str, str] = {}
        self.external_files: dict[str, bytes] = {
            "adapter_config.json": b'{"peft_type": "LORA"}',
            "adapter_model.safetensors": bytes(range(256)) * 256,
        }
        self.jwt_lifetime = 86_400.0
        self.executed: list[tuple[str, int | None, str]] = []
        self.protobuf_refusal = 422
        self._world = world
        self._promises = promises
        self._json_only = json_only
        self._numbers = 0
        self.handlers: dict[str, Callable[[Recorded], Reply]] = {
            f"POST /api/v1/{name}": handler for name, handler in self._endpoints().items()
        }

    def _endpoints(self) -> dict[str, Callable[[Recorded], Reply]]:
        common = {
            "client/config": self._client_config,
            "create_session": self._create_session,
            "session_heartbeat": self._session_heartbeat,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._asample,
        }
        if self._json_only:
            return {**common, "forward": self._forward_backward, "unload_model": self._unload_model}
        return {
            **common,
            "client/dynamic_config": self._client_dynamic_config,
            "auth/token": self._auth_token,
            "save_weights_external": self._save_weights_external,
            "copy_weights": self._copy_weights,
            "create_custom_loss": self._create_custom_loss,
            "join_sampling_session": self._join_sampling_session,
            "cancel_future": self._promises.cancel,
        }

    # Start-up and sessions

    def _client_config(self, request: Recorded) -> Reply:
        return ok(self.flags)

    def _client_dynamic_config(self, request: Recorded) -> Reply:
        return ok(self.dynamic_flags)

    def _auth_token(self, request: Recorded) -> Reply:
        claims = {
            "exp": time.time() + self.jwt_lifetime,
            "sub": "tml:organization_user:u-1",
            "org_id": "o-1",
            "email": "dev@example.com",
            "iss": "passport-test",
        }
        head, payload = (
            base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
            for part in ({"alg": "none"}, claims)
        )
        return ok({"jwt": f"{head}.{payload}.signature"})

    def _create_session(self, request: Recorded) -> Reply:
        asked = request.json()
        number = len(self._world.sessions) + 1
        session_id = f"session_{number:04}" if self._json_only else f"session-{number:04}"
        session = Session(session_id, self._world.now(), asked.get("user_metadata") or {}, asked.get("display_name"))
        session.project_id = asked.get("project_id") or session.project_id
        self._world.sessions[session_id] = session
        return ok({"type": "create_session", "session_id": session_id, **self.messages})

    def _session_heartbeat(self, request: Recorded) -> Reply:
        self._session(request.json()["session_id"])
        return ok({"type": "session_heartbeat"})

    def _telemetry(self, request: Recorded) -> Reply:
        return ok({"status": "accepted"})

    # Models

    def _create_model(self, request: Recorded) -> Reply:
        asked = request.json()
        session = self._session(asked["session_id"])
        model_id = self._model_id(session, asked.get("model_seq_id"))

        def create() -> Result:
            if asked["base_model"] not in BASE_MODELS:
                raise BadInput(f"base_model {asked['base_model']!r} is not served here; use one of {BASE_MODELS}")
            lora = {**_LORA, **(asked.get("lora_config") or {})}
            self._add_model(session, model_id, asked, asked["base_model"], lora, asked.get("optimizer_config") or ADAM)
            return {"model_id": model_id, "type": "create_model"}

        acknowledged = self._accept("create_model", f"{model_id}:0", create)
        if not self._json_only:
            return ok(acknowledged)
        return ok({**acknowledged, "model_id": model_id, "base_model": asked["base_model"], "status": "created"})

    def _model_id(self, session: Session, model_seq_id: int | None) -> str:
        if self._json_only:
            return f"model_{len(self._world.models) + 1:04}"
        return f"{session.session_id}:train:{model_seq_id}"

    def _add_model(
        self,
        session: Session,
        model_id: str,
        asked: dict[str, Any],
        base_model: str,
        lora: dict[str, Any],
        optimizer_config: dict[str, Any],
    ) -> Model:
        metadata = asked.get("user_metadata")
        model = Model(model_id, session, base_model, lora, optimizer_config, metadata, self._world.now())
        self._world.models[model_id] = model
        session.models.append(model_id)
        return model

    def _unload_model(self, request: Recorded) -> Reply:
        model_id = self._model(request.json()["model_id"]).model_id
        return ok(self._accept("unload_model", model_id, lambda: {"model_id": model_id, "type": "unload_model"}))

    def _get_info(self, request: Recorded) -> Reply:
        model = self._model(request.json()["model_id"])
        if self._json_only:
            data = {"base_model": model.base_model, "model_name": model.base_model}
            return ok({"model_id": model.model_id, "status": "created", "model_data": data})
        return ok(
            {
                "type": "get_info",
                "model_id": model.model_id,
                "model_data": {"arch": "tiny", "model_name": model.base_model, "tokenizer_id": model.base_model},
                "optimizer_config": model.optimizer_config,
                "is_lora": True,
                "lora_rank": model.lora["rank"],
                "model_name": model.base_model,
            }
        )

    # Training

    def _forward_backward(self, request: Recorded) -> Reply:
        asked = self._loss_request(request)
        model = self._model(asked.model_id)

        def compute() -> Result:
            chunk = asked.seq_id or 0
            output, gradient = run_loss(model.policy, asked.examples, asked.loss, asked.config, chunk)
            if not asked.forward_only:
                model.policy = model.policy.plus_gradient(gradient)
            return output

        return self._enqueue(model, asked.seq_id, request.endpoint, compute)

    def _loss_request(self, request: Recorded) -> codec.LossRequest:
        protobuf = "application/x-protobuf" in request.headers.get("content-type", "")
        if self._json_only and protobuf:
            raise self._protobuf_refused(request)
        if not self._json_only and not protobuf:
            raise Refused(400, "forward_backward takes application/x-protobuf")
        if protobuf:
            return codec.loss_request_from_message(request.message())
        return codec.loss_request_from_json(request.json())

    def _protobuf_refused(self, request: Recorded) -> Refused:
        """FastAPI names the offending input, and fails with a 500 where that is not text; see `protobuf_refusal`."""
        if self.protobuf_refusal == 422:
            return Refused(422, [{**_NOT_OBJECT, "input": request.body.decode("utf-8", "replace")}])
        failure = Refused(500, "")
        failure.reply = Reply(500, body=b"Internal Server Error", headers={"content-type": "text/plain; charset=utf-8"})
        return failure

    def _optim_step(self, request: Recorded) -> Reply:
        asked = request.json()
        model = self._model(asked["model_id"])
        if ("adam_params" in asked) == ("optimizer_params" in asked):
            raise Refused(422, "exactly one of adam_params and optimizer_params is needed")

        def compute() -> Result:
            gradient = model.policy.gradient
            model.policy = model.policy.stepped()
            return {"metrics": {"grad_norm": abs(gradient), "moment": model.policy.moment, "step": model.policy.steps}}

        return self._enqueue(model, asked.get("seq_id"), "optim_step", compute)

    def _save_weights(self, request: Recorded) -> Reply:
        return self._save(request, "save_weights", "weights", {})

    def _save_weights_external(self, request: Recorded) -> Reply:
        suffix = ".age" if request.json().get("age_encryption_recipients") else ""
        files = {name + suffix: content for name, content in self.external_files.items()}
        return self._save(request, "save_weights_external", "external_weights", files)

    def _save_weights_for_sampler(self, request: Recorded) -> Reply:
        asked = request.json()
        if asked.get("path") is not None:
            return self._save(request, "save_weights_for_sampler", "sampler_weights", {})
        model = self._model(asked["model_id"])

        def compute() -> Result:
            number = asked["sampling_session_seq_id"]
            sampler = self._add_sampler(model.session, number, model.base_model, None, model.policy)
            return {"sampling_session_id": sampler.sampler_id, "type": "save_weights_for_sampler"}

        return self._enqueue(model, asked.get("seq_id"), "save_weights_for_sampler", compute)

    def _save(self, request: Recorded, endpoint: str, kind: str, files: dict[str, bytes]) -> Reply:
        asked = request.json()
        model = self._model(asked["model_id"])

        def compute() -> Result:
            checkpoint = self._world.save(model, kind, asked, files)
            size = {"size_bytes": checkpoint.size} if files else {}
            return {"path": checkpoint.path, "type": endpoint, **size}

        return self._enqueue(model, asked.get("seq_id"), endpoint, compute)

    def _load_weights(self, request: Recorded) -> Reply:
        asked = request.json()
        if asked.get("model_id") is None:
            return self._create_by_loading(asked)
        model = self._model(asked["model_id"])

        def compute() -> Result:
            checkpoint = self._checkpoint_to_load(asked["path"])
            model.policy = _restored(checkpoint, asked.get("optimizer", True))
            return {"path": checkpoint.path, "model_id": model.model_id, "type": "load_weights"}

        return self._enqueue(model, asked.get("seq_id"), "load_weights", compute)

    def _create_by_loading(self, asked: dict[str, Any]) -> Reply:
        session = self._session(asked["session_id"])
        model_id = self._model_id(session, asked["model_seq_id"])

        def compute() -> Result:
            checkpoint = self._checkpoint_to_load(asked["path"])
            base_model = asked.get("base_model") or checkpoint.base_model
            optimizer = asked.get("optimizer_config") or checkpoint.optimizer_config
            model = self._add_model(session, model_id, asked, base_model, checkpoint.lora, optimizer)
            model.policy = _restored(checkpoint, asked.get("optimizer", True))
            return {"path": checkpoint.path, "model_id": model_id, "type": "load_weights"}

        return ok(self._accept("load_weights", f"{model_id}:0", compute))

    def _checkpoint_to_load(self, path: str) -> Checkpoint:
        if path not in self._world.checkpoints:
            raise BadInput(f"no checkpoint {path}")
        return self._world.checkpoints[path]

    def _weights_info(self, request: Recorded) -> Reply:
        checkpoint = self._checkpoint(request.json()["tinker_path"])
        info = {"base_model": checkpoint.base_model, "is_lora": True, "lora_rank": checkpoint.lora["rank"]}
        if self._json_only:
            return ok(info)
        train = {name: checkpoint.lora[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        return ok({**info, **train, "optimizer_config": checkpoint.optimizer_config})

    def _copy_weights(self, request: Recorded) -> Reply:
        """The same idempotency key means the same copy."""
        asked = request.json()
        key = request.headers["x-idempotency-key"]
        if key not in self._world.copies:
            source = self._checkpoint(asked["source_path"])
            ttl = asked.get("ttl_seconds")
            expires_at = None if ttl is None else self._world.now(ttl)
            run_id = f"copy-{len(self._world.copies) + 1:04}"
            copy = replace(source, run_id=run_id, time=self._world.now(), expires_at=expires_at, public=False)
            self._world.checkpoints[copy.path] = copy
            self._world.copies[key] = copy.path
        return ok({"tinker_path": self._world.copies[key]})

    def _create_custom_loss(self, request: Recorded) -> Reply:
        asked = request.json()
        session_id = self._session(asked["session_id"]).session_id
        loss_id = f"{session_id}:loss:{asked['custom_loss_seq_id']}"
        return ok(
            self._accept(
                "create_custom_loss", loss_id, lambda: {"loss_id": f"{loss_id}:id", "type": "create_custom_loss"}
            )
        )

    # Sampling

    def _create_sampling_session(self, request: Recorded) -> Reply:
        asked = request.json()
        session = self._session(asked["session_id"])
        path = asked.get("model_path")
        checkpoint = None if path is None else self._checkpoint(path)
        base_model = checkpoint.base_model if checkpoint else asked["base_model"]
        policy = replace(checkpoint.policy, gradient=0.0) if checkpoint else Policy()
        sampler = self._add_sampler(session, asked["sampling_session_seq_id"], base_model, path, policy)
        return ok({"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id})

    def _add_sampler(self, session: Session, number: int, base_model: str, path: str | None, policy: Policy) -> Sampler:
        sampler_id = f"{session.session_id}:sample:{number}"
        if self._json_only:
            sampler_id = f"sampling_{len(self._world.samplers) + 1:04}"
        sampler = self._world.samplers.setdefault(sampler_id, Sampler(sampler_id, base_model, path, policy))
        if sampler_id not in session.samplers:
            session.samplers.append(sampler_id)
        return sampler

    def _join_sampling_session(self, request: Recorded) -> Reply:
        sampler = self._sampler(request.json()["sampling_session_id"])
        sampler.clones += 1
        return ok({"client_counter": sampler.clones, "type": "join_sampling_session"})

    def _asample(self, request: Recorded) -> Reply:
        asked = request.json()
        sampler = self._sampler(asked["sampling_session_id"])
        seq_id = asked["seq_id"]
        request_id = f"{sampler.sampler_id}:{seq_id}"

        question = msgspec.json.encode({name: value for name, value in asked.items() if name != "seq_id"})

        def compute() -> Result:
            return _sampled(sampler.policy, question)

        acknowledged = self._accept("asample", request_id, compute, (sampler.sampler_id, seq_id // CLONE_STRIDE))
        if self._json_only:
            return ok(acknowledged)
        ids = [f"{request_id}:{index}" for index in range(asked["num_samples"])]
        return ok({**acknowledged, "sample_sequence_ids": ids})

    # Accepting and ordering

    def _accept(
        self, endpoint: str, request_id: str, compute: Callable[[], Result], target: tuple[str, int] | None = None
    ) -> dict[str, Any]:
        """Execute at once, whatever came before; a repeated submission finds its first answer."""
        if self._json_only:
            request_id = self._next_number()
        if self._promises.get(request_id) is None:
            self._promises.execute(self._promises.add(Promise(request_id, endpoint, compute, target)))
        return self._acknowledged(request_id)

    def _enqueue(self, model: Model, seq_id: int | None, endpoint: str, compute: Callable[[], Result]) -> Reply:
        """Execute in the order of the model's numbers. Servers of the JSON kind know no numbers."""

        def noted() -> Result:
            self.executed.append((model.model_id, seq_id, endpoint))
            model.last_request_time = self._world.now()
            return compute()

        if self._json_only:
            return ok(self._accept(endpoint, "", noted))
        if not seq_id:
            raise Refused(422, "seq_id must be 1 or more")
        request_id = f"{model.model_id}:{seq_id}"
        if self._promises.get(request_id) is None:
            model.early[seq_id] = self._promises.add(Promise(request_id, endpoint, noted))
            self._advance(model)
        return ok(self._acknowledged(request_id))

    def _advance(self, model: Model) -> None:
        while model.next_seq in model.early:
            promise = model.early.pop(model.next_seq)
            model.next_seq += 1
            if promise is not None:
                self._promises.execute(promise)

    def consume_number(self, request: Recorded) -> None:
        """A refused submission uses up its number all the same, or everything after it would wait for ever."""
        if "protobuf" in request.headers.get("content-type", ""):
            message = request.message()
            asked = {"model_id": message.model_id, "seq_id": message.seq_id}
        else:
            asked = request.json() if request.body else {}
        model = self._world.models.get(asked.get("model_id", ""))
        if model is not None and asked.get("seq_id"):
            model.early[asked["seq_id"]] = None
            self._advance(model)

    def _acknowledged(self, request_id: str) -> dict[str, Any]:
        if self._json_only:
            return {"future_id": request_id, "status": "pending", "request_id": request_id}
        return {"request_id": request_id}

    def _next_number(self) -> str:
        self._numbers += 1
        return str(self._numbers)

    # Lookups

    def _session(self, session_id: str) -> Session:
        return _found(self._world.sessions, session_id, "session")

    def _model(self, model_id: str) -> Model:
        return _found(self._world.models, model_id, "model")

    def _sampler(self, sampler_id: str) -> Sampler:
        return _found(self._world.samplers, sampler_id, "sampling session")

    def _checkpoint(self, path: str) -> Checkpoint:
        return _found(self._world.checkpoints, path, "checkpoint")


@lru_cache(maxsize=256)
def _sampled(policy: Policy, question: bytes) -> Sampled:
    """Remembered, because a bench asks the same thing thousands of times and should not wait for this server."""
    asked = msgspec.json.decode(question)
    return sample(policy, codec.prompt_tokens(asked["prompt"]), codec.sample_options(asked))


def _found(things: dict[str, T], name: str, kind: str) -> T:
    if name not in things:
        raise Refused(404, f"no {kind} {name}")
    return things[name]


def _restored(checkpoint: Checkpoint, optimizer: bool) -> Policy:
    policy = replace(checkpoint.policy, gradient=0.0)
    return policy if optimizer else policy.without_optimizer()
