"""One valid request for every endpoint, drawn at random where there is a choice, in a form that can be bent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

from google.protobuf.message import Message

from tests.fuzz.graphs import random_loss
from tests.fuzz.world import KINDS, SAVES, TOKEN, TOKENS, Claim, World, custom_loss
from tinsmith.types import Datum, ModelInput, TensorData
from tinsmith.wire import proto, tar
from tinsmith.wire import tinker_pb2 as pb


@dataclass
class Draft:
    body: Any = None
    """A tree for JSON, a message, the bytes of a tar file, or nothing."""

    parts: dict[str, str] = field(default_factory=dict)
    """Of the path, by their names in the endpoint."""

    query: dict[str, str] = field(default_factory=dict)
    claim: Claim | None = None
    headers: dict[str, str] = field(default_factory=dict)


Make: TypeAlias = Callable[[World, Random], Draft]

# --- training --------------------------------------------------------------------------------------------------------

MAX_LOSSES = 50
"""The latest ones are used for training."""

_RATIO: dict[str, Any] = {"logprobs": [-1.0] * 6, "advantages": [1.0, -1.0] * 3}
_LOSSES: Mapping[str, tuple[dict[str, Any], dict[str, float] | None]] = {
    "cross_entropy": ({"weights": [1.0] * 6}, None),
    "importance_sampling": (_RATIO, None),
    "ppo": (_RATIO, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": (_RATIO, {"clip_high_threshold": 4.0}),
    "dro": (_RATIO, {"beta": 0.05}),
    "gspo": ({**_RATIO, "sequence_ratio_mask": [1.0] * 6}, None),
}
_MATRIX = TensorData([3, 4], "int64", [6, 4], [0, 1, 1, 1, 1, 1, 2], [0, 3])
_MATRIX_WEIGHTS = TensorData([0.5, 0.5], "float32", [6, 4], [0, 1, 1, 1, 1, 1, 2], [0, 3])


def _examples(random: Random) -> tuple[list[Datum], str, dict[str, float] | None]:
    loss = random.choice(list(_LOSSES))
    inputs, config = _LOSSES[loss]
    tensors: dict[str, Any] = {"target_tokens": TOKENS, **inputs}
    data = [Datum(ModelInput.from_ints(TOKENS), tensors)] * random.randrange(1, 4)
    if loss == "cross_entropy" and random.random() < 0.3:
        data.append(Datum(ModelInput.from_ints(TOKENS), {"target_tokens": _MATRIX, "weights": _MATRIX_WEIGHTS}))
    return data, loss, config


def _train_protobuf(world: World, random: Random) -> Draft:
    claim = world.claim(random.choice(world.models))
    data, loss, config = _examples(random)
    forward_only = random.random() < 0.3
    prepared = proto.prepare_forward_backward(data, loss, config, forward_only=forward_only)  # type: ignore[arg-type]
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(prepared.finish(claim.model_id, claim.number))
    if random.random() < 0.2:
        message.loss_fn = "custom"
        message.loss_fn_config_v2["loss_id"].text = random.choice(world.losses[-MAX_LOSSES:])
    return Draft(message, claim=claim)


def _train_json(name: str) -> Make:
    def make(world: World, random: Random) -> Draft:
        claim = world.claim(random.choice(world.models))
        targets = {"data": TOKENS, "dtype": "int64", "shape": [6]}
        weights = {"data": [1.0, 0.5] * 3, "dtype": "float32", "shape": [6]}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
        datum = {"model_input": prompt, "loss_fn_inputs": {"target_tokens": targets, "weights": weights}}
        examples = {"data": [datum] * random.randrange(1, 3), "loss_fn": "cross_entropy"}
        return Draft({"model_id": claim.model_id, "seq_id": claim.number, name: examples}, claim=claim)

    return make


def _forward_backward(world: World, random: Random) -> Draft:
    is_protobuf = random.random() < 0.8
    return (_train_protobuf if is_protobuf else _train_json("forward_backward_input"))(world, random)


def _operation(fields: Callable[[World, Random], dict[str, Any]]) -> Make:
    def make(world: World, random: Random) -> Draft:
        claim = world.claim(random.choice(world.models))
        return Draft({"model_id": claim.model_id, "seq_id": claim.number, **fields(world, random)}, claim=claim)

    return make


def _step(world: World, random: Random) -> dict[str, Any]:
    adam = {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    return {"adam_params": adam, "type": "optim_step"}


def _load(world: World, random: Random) -> dict[str, Any]:
    return {"path": world.path("weights"), "optimizer": random.random() < 0.5, "weights_access_token": TOKEN}


def _saved(kind: str) -> Callable[[World, Random], dict[str, Any]]:
    def fields(world: World, random: Random) -> dict[str, Any]:
        if kind == "sampler_weights" and random.random() < 0.5:
            return {"sampling_session_seq_id": 1000 + next(world.serial)}
        metadata = {} if kind == "external_weights" else {"user_metadata": {"step": "1"}}
        overwrite = {"overwrite": True} if kind == "weights" else {}
        return {"path": f"fuzz{random.randrange(20)}", "ttl_seconds": 3600, **metadata, **overwrite}

    return fields


# --- the rest --------------------------------------------------------------------------------------------------------


def _sample(world: World, random: Random) -> Draft:
    body: dict[str, Any] = {
        "sampling_session_id": random.choice(world.samplers),
        "seq_id": next(world.serial),
        "num_samples": random.randrange(1, 3),
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
        "sampling_params": {"max_tokens": 3, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 0.9, "stop": ["ab"]},
        "prompt_logprobs": random.random() < 0.5,
        "topk_prompt_logprobs": random.randrange(3),
        "topk_sample_logprobs": random.randrange(3),
        "prompt_alt_tokens_k": random.randrange(2),
        "type": "sample",
    }
    if random.random() < 0.3:
        body["target_prompt_logprobs"] = {"data": [1, -1] * 5, "dtype": "int64", "shape": [5, 2]}
        body["prompt_logprobs_last_n"] = 2
    return Draft(body)


def _create_session(world: World, random: Random) -> Draft:
    fields = {"tags": ["a"], "user_metadata": {"run": 1}, "sdk_version": "0.36.0", "type": "create_session"}
    return Draft({**fields, "project_id": "project", "display_name": "A name"})


def _search(world: World, random: Random) -> Draft:
    statuses = [{"type": "active"}, {"type": "client_finished", "reasons": ["success"]}]
    owner = random.choice([{"type": "own"}, {"type": "accessible"}, {"type": "user", "owner_urns": ["a"]}])
    cursor = {"last_created_at": "2030-01-31T00:00:00Z", "last_session_id": world.session_id}
    return Draft(
        {
            "session_id": world.session_id,
            "project_ids": ["project"],
            "user_metadata": {"run": "1"},
            "display_name": "A name",
            "owner": owner,
            "statuses": statuses,
            "limit": 5,
            "cursor": cursor,
        }
    )


def _create_model(world: World, random: Random) -> Draft:
    lora = {"rank": 2, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
    return Draft(
        {
            "session_id": world.session_id,
            "model_seq_id": 1000 + next(world.serial) % 50,
            "base_model": world.base_model,
            "lora_config": lora,
            "optimizer_config": {"type": "adamw"},
            "user_metadata": {"a": 1},
            "type": "create_model",
        }
    )


def _load_weights(world: World, random: Random) -> Draft:
    if random.random() < 0.7:
        return _operation(_load)(world, random)
    place = {"session_id": world.session_id, "model_seq_id": 2000 + next(world.serial) % 50}
    return Draft({**place, **_load(world, random), "base_model": world.base_model})


def _custom_loss(world: World, random: Random) -> Draft:
    number = next(world.serial)
    world.losses.append(f"{world.session_id}:loss:{number}")
    loss = random_loss(random) if random.random() < 0.7 else custom_loss()
    return Draft({"session_id": world.session_id, "custom_loss_seq_id": number, **loss})


def _copy(world: World, random: Random) -> Draft:
    body = {"source_path": world.path(random.choice(KINDS)), "ttl_seconds": 3600, "weights_access_token": TOKEN}
    return Draft(body, headers={"x-idempotency-key": f"fuzz-{random.randrange(20)}"})


def _retrieve(world: World, random: Random) -> Draft:
    body = {"request_id": random.choice(world.request_ids), "allow_metadata_only": True}
    return Draft(body, headers={"accept": random.choice(["application/json", "application/x-protobuf", "*/*"])})


def _retrieve_many(world: World, random: Random) -> Draft:
    target = {
        "type": "sampling_session",
        "sampling_session_id": random.choice(world.samplers),
        "cloned_sampler_id": random.randrange(2),
    }
    return Draft({"target": target, "prev_cursor": random.randrange(5), "retrieved_request_ids": world.request_ids[:2]})


def _page(world: World, random: Random) -> Draft:
    return Draft(query={"limit": "20", "offset": "0", "access_scope": "owned", "project_id": "project"})


def _json(**fields: Any) -> Make:
    return lambda world, random: Draft(dict(fields))


def _about(**names: Callable[[World], str]) -> Make:
    return lambda world, random: Draft({field: name(world) for field, name in names.items()})


def _nothing(world: World, random: Random) -> Draft:
    return Draft()


def _run(world: World, random: Random) -> Draft:
    return Draft(parts={"run_id": world.models[0]}, query={"access_scope": "accessible"})


def _session(body: Any = None) -> Make:
    return lambda world, random: Draft(body, parts={"session_id": world.session_id}, query={"access_scope": "owned"})


def _finish(world: World, random: Random) -> Draft:
    reason = {"type": random.choice(["success", "errored", "interrupted"])}
    return Draft({"reason": reason, "detail": "done"}, parts={"session_id": random.choice(world.spare_sessions)})


def _checkpoint(name: str | None = None, body: Any = None) -> Make:
    def make(world: World, random: Random) -> Draft:
        kind = "weights" if name is None else random.choice(KINDS)
        chosen = random.choice(world.doomed) if name is None else name
        return Draft(body, parts={"run_id": world.models[0], "kind": kind, "name": chosen})

    return make


def _file(world: World, random: Random) -> Draft:
    path, _, query = random.choice(world.files[:-1]).partition("?")
    _, _, _, _, run_id, kind, name, file = path.split("/", 7)
    parts = {"run_id": run_id, "kind": kind, "name": name, "file:path": file}
    ranges = random.choice(["", "bytes=0-9", "bytes=9-", "bytes=-1", "bytes=5-1", "bytes=0-1,3-4", "lines=1"])
    return Draft(parts=parts, query=_pairs(query), headers={"range": ranges} if ranges else {})


def _trace(world: World, random: Random) -> Draft:
    path, _, query = world.files[-1].partition("?")
    return Draft(parts={"session_id": path.rpartition("/")[2]}, query=_pairs(query))


def _pairs(query: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in query.split("&"))


def _export(world: World, random: Random) -> Draft:
    draft = _checkpoint("kept")(world, random)
    draft.query = {"to": random.choice(["peft", "merged", "gguf"]), "data_note": "text"}
    return draft


def _import(world: World, random: Random) -> Draft:
    files = {"adapter_config.json": b'{"peft_type": "LORA", "r": 2}', "adapter_model.safetensors": bytes(16)}
    body = b"".join(tar.head(name, len(data)) + data + tar.padding(len(data)) for name, data in files.items())
    return Draft(body + tar.END, query={"base_model": world.base_model, "name": "imported"})


def _weights(world: World, random: Random) -> str:
    return random.choice([world.base_model, world.models[0], world.path(random.choice(KINDS))])


def _sampling(world: World, random: Random) -> dict[str, Any]:
    """What requests in OpenAI's form have in common."""
    return {
        "model": _weights(world, random),
        "max_tokens": random.randrange(1, 4),
        "n": random.randrange(1, 3),
        "seed": 1,
        "stop": random.choice(["x", ["x", "y"]]),
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stream": random.random() < 0.3,
        "stream_options": {"include_usage": True},
        "user": "fuzz",
    }


def _complete(world: World, random: Random) -> Draft:
    prompt = random.choice(["text", ["text", "more"], TOKENS, [TOKENS, TOKENS]])
    return Draft({"prompt": prompt, "logprobs": 2, "echo": False, **_sampling(world, random)})


def _chat(world: World, random: Random) -> Draft:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [{"type": "text", "text": "text"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "text"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    calls = {"tools": tools, "tool_choice": "auto", "chat_template_kwargs": {"a": 1}}
    return Draft({"messages": messages, "logprobs": True, "top_logprobs": 2, **calls, **_sampling(world, random)})


CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
_CONFIG = _json(sdk_version="0.36.0")

DRAFTS: Mapping[str, Make] = {
    "POST /api/v1/client/config": _CONFIG,
    "POST /api/v1/client/dynamic_config": _CONFIG,
    "POST /api/v1/auth/token": _json(),
    "GET /api/v1/auth/apikey/me": _nothing,
    "DELETE /api/v1/auth/apikey/me": _nothing,
    "GET /api/v1/get_server_capabilities": _nothing,
    "POST /api/v1/telemetry": _json(events=[], platform="linux", sdk_version="1", session_id="x", process_uuid="x"),
    "GET /api/v1/healthz": _nothing,
    "GET /readyz": _nothing,
    "POST /api/v1/create_session": _create_session,
    "POST /api/v1/session_heartbeat": _about(session_id=lambda world: world.session_id),
    "POST /api/v1/sessions/search": _search,
    "POST /api/v1/sessions/{session_id}/finish": _finish,
    "GET /api/v1/sessions": _page,
    "GET /api/v1/sessions/{session_id}": _session(),
    "PUT /api/v1/sessions/{session_id}/project": _session({"project_id": "project"}),
    "GET /api/v1/sessions/{session_id}/trace_export": _session(),
    "GET /api/v1/traces/{session_id}": _trace,
    "POST /api/v1/create_model": _create_model,
    "POST /api/v1/get_info": _about(model_id=lambda world: world.models[0]),
    "POST /api/v1/unload_model": _about(model_id=lambda world: world.models[-1]),
    "POST /api/v1/forward_backward": _forward_backward,
    "POST /api/v1/forward": _train_json("forward_input"),
    "POST /api/v1/optim_step": _operation(_step),
    "POST /api/v1/create_custom_loss": _custom_loss,
    **{f"POST /api/v1/{endpoint}": _operation(_saved(kind)) for kind, endpoint in SAVES.items()},
    "POST /api/v1/save_weights_external": _operation(_saved("external_weights")),
    "POST /api/v1/load_weights": _load_weights,
    "POST /api/v1/weights_info": _about(tinker_path=lambda world: world.path("weights")),
    "POST /api/v1/copy_weights": _copy,
    "POST /api/v1/create_sampling_session": lambda world, random: Draft(
        {
            "session_id": world.session_id,
            "sampling_session_seq_id": next(world.serial) % 100,
            "base_model": world.base_model,
            "model_path": world.path(random.choice(KINDS)),
        }
    ),
    "POST /api/v1/join_sampling_session": _about(sampling_session_id=lambda world: world.samplers[0]),
    "GET /api/v1/samplers/{sampler_id}": lambda world, random: Draft(parts={"sampler_id": world.samplers[0]}),
    "POST /api/v1/asample": _sample,
    "POST /api/v1/retrieve_future": _retrieve,
    "POST /api/v1/retrieve_futures": _retrieve_many,
    "POST /api/v1/cancel_future": _about(request_id=lambda world: world.request_ids[0]),
    "GET /api/v1/training_runs": _page,
    "GET /api/v1/training_runs/{run_id}": _run,
    "GET /api/v1/training_runs/{run_id}/checkpoints": _run,
    "GET /api/v1/checkpoints": _page,
    f"DELETE {CHECKPOINT}": _checkpoint(),
    f"POST {CHECKPOINT}/publish": _checkpoint("kept"),
    f"DELETE {CHECKPOINT}/publish": _checkpoint("kept"),
    f"PUT {CHECKPOINT}/ttl": _checkpoint("kept", {"ttl_seconds": 86400}),
    f"GET {CHECKPOINT}/external_weights_urls": _checkpoint("kept"),
    f"GET {CHECKPOINT}/archive": _checkpoint("kept"),
    f"GET {CHECKPOINT}/export": _export,
    "POST /api/v1/import_weights": _import,
    "GET /api/v1/files/{run_id}/{kind}/{name}/{file:path}": _file,
    "GET /api/v1/audit": lambda world, random: Draft(query={"event_type": "checkpoints", "day": "2030-01-31"}),
    "GET /api/v1/billing/usage/events": lambda world, random: Draft(query={"starting_on": "2030-01-31T00:00:00Z"}),
    "GET /api/v1/billing/usage/checkpoints/current": lambda world, random: Draft(query={"project_id": "project"}),
    "POST /api/v1/log_metrics": lambda world, random: Draft(
        {"model_id": world.models[0], "step": random.randrange(9), "metrics": {"reward": 0.5}, "seq_id": None}
    ),
    "GET /dashboard/api/overview": _nothing,
    "GET /dashboard/api/runs": _page,
    "GET /dashboard/api/runs/{run_id}": _run,
    "GET /dashboard/api/runs/{run_id}/series": _run,
    "GET /dashboard/api/runs/{run_id}/points": lambda world, random: Draft(
        parts={"run_id": random.choice(world.models)}, query={"name": "loss", "after": "0", "max": "100"}
    ),
    "GET /dashboard/api/samples": lambda world, random: Draft(query={"run_id": world.models[0], "limit": "5"}),
    "GET /dashboard/api/keys": _nothing,
    "POST /dashboard/api/keys": lambda world, random: Draft({"name": f"fuzz {random.getrandbits(32)}"}),
    "DELETE /dashboard/api/keys/{key_id}": lambda world, random: Draft(parts={"key_id": "1"}),
    "GET /v1/models": _nothing,
    "GET /v1/models/{model:path}": lambda world, random: Draft(parts={"model:path": _weights(world, random)}),
    "POST /v1/completions": _complete,
    "POST /v1/chat/completions": _chat,
    "GET /metrics": _nothing,
    "GET /openapi.json": _nothing,
}
"""By method and path as the server's own table has them."""

_OFTEN = {"POST /api/v1/forward_backward": 12, "POST /api/v1/asample": 8, "POST /api/v1/create_custom_loss": 3}
_SELDOM = {"GET /metrics", "GET /openapi.json", "GET /readyz", "GET /api/v1/healthz"}
CHOICES = [name for name in DRAFTS if name not in _SELDOM for _ in range(2 * _OFTEN.get(name, 1))] + sorted(_SELDOM)


def is_message(draft: Draft) -> bool:
    return isinstance(draft.body, Message)
