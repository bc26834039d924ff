"""A bad request whose model and number can be read is accepted, and fails with a reason; the next one works."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api.running import Answer, RunningServer
from tinsmith.types import Datum, ImageChunk, ModelInput, TensorData
from tinsmith.wire import proto
from tinsmith.wire import tinker_pb2 as pb

PROTOBUF = {"content-type": "application/x-protobuf"}


def failure(server: RunningServer, acknowledged: Answer) -> str:
    """Why an accepted request failed. That must be the user's fault, and the worker must never have seen it."""
    assert acknowledged.status == 200, acknowledged
    answer = server.result(acknowledged)
    assert answer.get("category") == "user", answer
    assert acknowledged.json()["request_id"] not in [job.request_id for job in server.workers.executed]
    return str(answer["error"])


# Training


def datum(tokens: list[int] | None = None, **inputs: Any) -> Datum:
    tokens = [1, 2, 3] if tokens is None else tokens
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": [2, 3, 4][: len(tokens)], **inputs})


WIDE = TensorData([5], "int64", [3, 10**9], [0, 1, 1, 1], [7])

BAD_TRAINING: dict[str, tuple[list[Datum], str, dict[str, Any] | None, str]] = {
    "no data": ([], "cross_entropy", None, "data is empty"),
    "an image": (
        [Datum(ModelInput(chunks=[ImageChunk(data=b"x", format="png", expected_tokens=1)]), {"target_tokens": [2]})],
        "cross_entropy",
        None,
        "data[0]: model_input holds image, but tiny/model-1 takes text only. Send chunks of the type encoded_text",
    ),
    "no tokens": ([datum([])], "cross_entropy", None, "data[0]: model_input is empty"),
    "a token outside the vocabulary": ([datum([1, 2, 1000])], "cross_entropy", None, "holds 1000"),
    "a target outside the vocabulary": (
        [datum(weights=[1.0] * 3), datum(target_tokens=[2, 3, -1])],
        "cross_entropy",
        None,
        "data[1]: loss_fn_inputs['target_tokens'] holds -1, but the tokens of tiny/model-1 are 0 to 999",
    ),
    "too many tokens": ([datum([1] * 513)], "cross_entropy", None, "has 513 tokens; tiny/model-1 takes 512"),
    "too few targets": ([datum(target_tokens=[1, 2])], "cross_entropy", None, "has the shape [2]"),
    "too many weights": ([datum(weights=[1.0] * 4)], "cross_entropy", None, "['weights'] has the shape [4]"),
    "targets that are no integers": (
        [datum(target_tokens=TensorData([1.0, 2.0, 3.0], "float32"))],
        "cross_entropy",
        None,
        "has the dtype float32, but token ids are int64",
    ),
    "weights that are integers": (
        [datum(weights=TensorData([1, 1, 1], "int64"))],
        "cross_entropy",
        None,
        "has the dtype int64, but must be float32",
    ),
    "no targets": ([Datum(ModelInput.from_ints([1]), {})], "cross_entropy", None, "lacks 'target_tokens'"),
    "a matrix for a loss that takes none": (
        [datum(target_tokens=TensorData([[1, 2]] * 3), logprobs=[0.0] * 3, advantages=[0.0] * 3)],
        "ppo",
        None,
        "ppo takes [3] only",
    ),
    "a matrix as wide as memory": ([datum(target_tokens=WIDE)], "cross_entropy", None, "has tensors of 3,000,000,000"),
    "too many targets for a token": (
        [datum(target_tokens=TensorData([[1] * 1001] * 3))],
        "cross_entropy",
        None,
        "at most 1000",
    ),
    "no weights": ([datum()], "cross_entropy", None, "lacks 'weights', which cross_entropy needs"),
    "a missing input": ([datum(logprobs=[0.0] * 3)], "ppo", None, "lacks 'advantages', which ppo needs"),
    "an unknown setting": ([datum()], "cross_entropy", {"beta": 1.0}, "has 'beta', which cross_entropy does not know"),
    "a setting that is text": (
        [datum(logprobs=[0.0] * 3, advantages=[0.0] * 3)],
        "dro",
        {"beta": "big"},
        "must be a finite number",
    ),
    "thresholds the wrong way round": (
        [datum(logprobs=[0.0] * 3, advantages=[0.0] * 3)],
        "ppo",
        {"clip_low_threshold": 2.0, "clip_high_threshold": 1.0},
        "above clip_high_threshold",
    ),
    "a loss without a formula": ([datum()], "stable_reinforce", None, "has no public formula"),
    "a custom loss without a name": ([datum()], "custom", None, "['loss_id'] is missing"),
    "an unknown custom loss": ([datum()], "custom", {"loss_id": "x:loss:0"}, "no custom loss of yours"),
}


@pytest.fixture(scope="module")
def model(server: RunningServer) -> tuple[str, list[int]]:
    """A model, and its number in use."""
    return server.model(), [0]


def number(model: tuple[str, list[int]]) -> dict[str, Any]:
    model[1][0] += 1
    return {"model_id": model[0], "seq_id": model[1][0]}


@pytest.mark.parametrize("name", BAD_TRAINING)
def test_bad_training_fails_its_future(server: RunningServer, model: Any, name: str) -> None:
    data, loss, config, reason = BAD_TRAINING[name]
    body = proto.prepare_forward_backward(data, loss, config).finish(**number(model))  # type: ignore[arg-type]
    assert reason in failure(server, server.post("forward_backward", body, headers=PROTOBUF))


def test_a_malformed_tensor_fails_its_future(server: RunningServer, model: Any) -> None:
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy", **number(model))
    tensor = message.data.add().loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.dense = pb.DTYPE_INT64, b"123"
    refused = server.post("forward_backward", message.SerializeToString(), headers=PROTOBUF)
    assert "has 3 bytes" in failure(server, refused)


def test_nan_fails_its_future(server: RunningServer, model: Any) -> None:
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy", **number(model))
    tensor = message.data.add().loss_fn_inputs["weights"]
    tensor.dtype, tensor.dense = pb.DTYPE_FLOAT32, b"\x00\x00\xc0\x7f"
    refused = server.post("forward_backward", message.SerializeToString(), headers=PROTOBUF)
    assert "NaN or infinity" in failure(server, refused)


BAD_OPERATIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a step of another optimizer": (
        "optim_step",
        {"optimizer_params": {"type": "dimuon", "learning_rate": 1}},
        "send adam_params",
    ),
    "a step without settings": ("optim_step", {}, "OptimStepRequest needs optim_params"),
    "a negative rate": ("optim_step", {"adam_params": {"learning_rate": -1}}, "must lie between 0 and 1e+12"),
    "a rate beyond single precision": ("optim_step", {"adam_params": {"learning_rate": 1e38}}, "between 0 and 1e+12"),
    "nothing to divide by": ("optim_step", {"adam_params": {"eps": 0}}, "adam_params.eps is 0"),
    "metadata with a NUL": ("save_weights", {"path": "a", "user_metadata": {"a": "\0"}}, "user_metadata holds"),
    "a rate that is text": ("optim_step", {"adam_params": {"learning_rate": "fast"}}, "learning_rate"),
    "a field that does not exist": ("optim_step", {"adam_params": {}, "speed": 1}, "has no field 'speed'"),
    "a name that leaves the folder": ("save_weights", {"path": "../../etc"}, "cannot name a checkpoint"),
    "a name of dots": ("save_weights", {"path": ".."}, "cannot name a checkpoint"),
    "a name too long": ("save_weights", {"path": "x" * 129}, "cannot name a checkpoint"),
    "a name with a question mark": ("save_weights_external", {"path": "a?b"}, "cannot name a checkpoint"),
    "no name": ("save_weights", {}, "give the checkpoint a name"),
    "a life too short": ("save_weights", {"path": "a", "ttl_seconds": 3599}, "an hour"),
    "a life too long": ("save_weights", {"path": "a", "ttl_seconds": 400_000_000}, "ten years"),
    "neither name nor session": ("save_weights_for_sampler", {}, "give a name, or a sampling_session_seq_id"),
    "a name for inflight weights": (
        "save_weights_for_sampler",
        {"path": "a", "kind": "inflight", "sampling_session_seq_id": 0},
        """path is 'a', but weights of kind "inflight" have no name; leave it out""",
    ),
    "a life for inflight weights": (
        "save_weights_for_sampler",
        {"ttl_seconds": 3600, "kind": "inflight", "sampling_session_seq_id": 0},
        'ttl_seconds is 3600, but weights of kind "inflight"',
    ),
    "inflight weights for nobody": (
        "save_weights_for_sampler",
        {"kind": "inflight"},
        "sampling_session_seq_id is missing or negative",
    ),
    "weights of another kind": ("save_weights_for_sampler", {"kind": "live", "sampling_session_seq_id": 0}, "kind"),
    "encryption to no key": (
        "save_weights_external",
        {"path": "a", "age_encryption_recipients": ["age1x"]},
        "age_encryption_recipients holds",
    ),
    "a path that is none": ("load_weights", {"path": "/etc/passwd", "optimizer": False}, "is not a checkpoint path"),
    "a path that does not exist": (
        "load_weights",
        {"path": "tinker://no/weights/no", "optimizer": False},
        "There is no checkpoint",
    ),
    "weights without optimizer state": (
        "load_weights",
        {"path": "tinker://no/sampler_weights/no", "optimizer": True},
        "cannot be trained on",
    ),
}


@pytest.mark.parametrize("name", BAD_OPERATIONS)
def test_a_bad_operation_fails_its_future(server: RunningServer, model: Any, name: str) -> None:
    endpoint, fields, reason = BAD_OPERATIONS[name]
    assert reason in failure(server, server.post(endpoint, {**number(model), **fields}))


def test_after_all_that_the_model_works(server: RunningServer, model: Any) -> None:
    """Every refused number was used up."""
    step = server.post("optim_step", {**number(model), "adam_params": {}})
    assert server.result(step)["metrics"]["step"] == 1


def test_an_operation_on_an_unknown_model_is_404(server: RunningServer) -> None:
    assert server.post("optim_step", {"model_id": "no", "seq_id": 1, "adam_params": {}}).status == 404


# Models

BAD_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown base": ({"base_model": "no/such"}, "Use one of: tiny/model-1, tiny/model-2"),
    "rank 0": ({"lora_config": {"rank": 0}}, "rank"),
    "a rank too large": ({"lora_config": {"rank": 257}}, "ranks go from 1 to 256"),
    "nothing to train": (
        {"lora_config": {"rank": 1, "train_attn": False, "train_mlp": False, "train_unembed": False}},
        "trains nothing",
    ),
    "a seed too large": ({"lora_config": {"rank": 1, "seed": 2**63}}, "9223372036854775807"),
    "dimuon": ({"optimizer_config": {"type": "dimuon", "version": 1}}, "This server has 'adamw'"),
    "an optimizer nobody knows": ({"optimizer_config": {"type": "muon9"}}, "is 'muon9'"),
    "too much metadata": ({"user_metadata": {"a": "x" * 70_000}}, "keep it below"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_bad_model_fails_its_future(server: RunningServer, name: str) -> None:
    fields, reason = BAD_MODELS[name]
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": "tiny/model-1", **fields}
    assert reason in failure(server, server.post("create_model", body))


def test_a_model_cannot_be_made_in_a_session_that_has_ended(server: RunningServer) -> None:
    session_id = server.session()
    server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny/model-1"}
    assert server.post("create_model", body).status == 410


# Sampling

LONG = {"chunks": [{"type": "encoded_text", "tokens": [1] * 513}]}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
BAD_SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "an empty prompt": ({"prompt": {"chunks": []}}, "prompt is empty"),
    "a long prompt": ({"prompt": LONG}, "has 513 tokens; tiny/model-1 takes 512"),
    "an unknown token": ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1000]}]}}, "holds 1000"),
    "an image": (
        {"prompt": {"chunks": [{"type": "image", "data": "eA==", "format": "png"}]}},
        "takes text only",
    ),
    "more tokens than the context": ({"sampling_params": {"max_tokens": 511}}, "has room for 510"),
    "a negative temperature": ({"sampling_params": {"temperature": -1}}, "temperature"),
    "a share above one": ({"sampling_params": {"top_p": 1.5}}, "top_p"),
    "an empty stop": ({"sampling_params": {"stop": ["a", ""]}}, "holds an empty text"),
    "a stop outside the vocabulary": ({"sampling_params": {"stop": [1000]}}, "stop holds 1000"),
    "a misspelt option": ({"sampling_params": {"temprature": 1}}, "has no field 'temprature'"),
    "too many best tokens": ({"topk_prompt_logprobs": 1001}, "at most 1000"),
    "a score of more than there is": ({"prompt_logprobs_last_n": 3}, "1 to 2 can be scored"),
    "targets of another length": (
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
        "needs [2, K]",
    ),
    "targets that are no integers": (
        {"target_prompt_logprobs": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2, 1]}},
        "token ids are int64",
    ),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_fails_its_future(server: RunningServer, name: str) -> None:
    fields, reason = BAD_SAMPLES[name]
    body = {"sampling_session_id": server.sampler(), "seq_id": 0, "prompt": PROMPT, "sampling_params": {}, **fields}
    acknowledged = server.post("asample", body)
    assert len(acknowledged.json()["sample_sequence_ids"]) == 1
    assert reason in failure(server, acknowledged)


@pytest.mark.parametrize("count", [0, -1, 1025, "many"])
def test_a_number_of_samples_that_cannot_be_acknowledged_is_refused(server: RunningServer, count: Any) -> None:
    body = {"sampling_session_id": server.sampler(), "seq_id": 0, "num_samples": count, "prompt": PROMPT}
    assert server.post("asample", {**body, "sampling_params": {}}).status == 422


def test_a_prompt_that_fills_the_context_can_be_scored(server: RunningServer) -> None:
    body = {
        "sampling_session_id": server.sampler(),
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 512}]},
        "sampling_params": {"max_tokens": 1},
        "prompt_logprobs": True,
    }
    assert len(server.result(server.post("asample", body))["prompt_logprobs"]) == 512


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 422),
        ({"base_model": "no/such"}, 422),
        ({"model_path": "tinker://no/sampler_weights/no"}, 404),
        ({"model_path": "/etc/passwd"}, 422),
        ({"model_path": "tinker://../weights/x"}, 404),
    ],
)
def test_a_sampler_of_nothing_is_refused(server: RunningServer, fields: dict[str, Any], status: int) -> None:
    body = {"session_id": server.session(), "sampling_session_seq_id": 0, **fields}
    assert server.post("create_sampling_session", body).status == status


OUTPUT = {"op": "output", "name": "output", "target": "output"}
MANY = {"op": "call_function", "name": "many", "target": "torch.roll", "args": [{"tuple": [[1] * 128, [0] * 128]}, 1]}


@pytest.mark.parametrize(
    ("inputs", "nodes", "reason"),
    [
        ([{"name": "advantages", "rank": 1}], [OUTPUT], "must begin with 'logprobs'"),
        ([{"name": "logprobs", "rank": 1}], [MANY, OUTPUT], "graph.nodes['many'] has 257 arguments"),
    ],
)
def test_a_bad_custom_loss_fails_its_future(server: RunningServer, inputs: Any, nodes: Any, reason: str) -> None:
    body = {"session_id": server.session(), "custom_loss_seq_id": 0, "name": "bad", "inputs": inputs}
    answer = server.post("create_custom_loss", {**body, "graph": {"nodes": nodes}})
    assert reason in failure(server, answer)
