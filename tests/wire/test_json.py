"""JSON, as requests and results travel in it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tinsmith import types
from tinsmith.errors import InvalidInputError
from tinsmith.wire import json as wire

PROMPT = types.ModelInput.from_ints([1, 2, 3])
DATUM = types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [0, 1, 0.5]})


def test_a_request_is_written_with_bytes_as_base64() -> None:
    image = types.ImageChunk(data=b"hello", format="png", expected_tokens=3)
    assert json.loads(wire.encode(types.ModelInput(chunks=[image]))) == {
        "chunks": [{"data": "aGVsbG8=", "format": "png", "expected_tokens": 3, "type": "image"}]
    }


def test_builtins_are_written_as_they_are() -> None:
    assert wire.encode({"a": [1, None, "é"]}) == '{"a":[1,null,"é"]}'.encode()


def test_numbers_of_numpy_are_written_and_what_has_no_json_form_is_refused() -> None:
    assert wire.encode({"a": np.float32(0.5), "b": np.arange(2)}) == b'{"a":0.5,"b":[0,1]}'
    with pytest.raises(InvalidInputError, match="`object` has no JSON form"):
        wire.encode({"a": object()})


def test_the_training_request_of_the_json_protocol() -> None:
    parts = wire.encode_forward_backward_parts([DATUM], "ppo", {"clip_low_threshold": 1})
    assert json.loads(parts) == {
        "data": [
            {
                "loss_fn_inputs": {
                    "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
                    "weights": {"data": [0, 1, 0.5], "dtype": "float32", "shape": [3]},
                },
                "model_input": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
            }
        ],
        "loss_fn": "ppo",
        "loss_fn_config": {"clip_low_threshold": 1},
    }
    body = wire.encode_forward_backward(parts, model_id="m", seq_id=7)
    assert wire.decode(types.ForwardBackwardRequest, body) == types.ForwardBackwardRequest(
        types.ForwardBackwardInput([DATUM], "ppo", {"clip_low_threshold": 1}), "m", 7
    )
    forward = wire.encode_forward_backward(parts, model_id="m", seq_id=7, forward_only=True)
    assert wire.decode(types.ForwardRequest, forward).forward_input.data == [DATUM]


def test_an_unknown_loss_is_refused_before_anything_is_written() -> None:
    with pytest.raises(InvalidInputError, match="cross_entropy"):
        wire.encode_forward_backward_parts([DATUM], "dpo")


def test_the_training_result_of_the_json_protocol() -> None:
    body = b"""{"loss_fn_output_type": "TorchLossReturn", "metrics": {"loss:sum": 2},
        "loss_fn_outputs": [{"logprobs": {"data": [-1, -2.5], "dtype": "float32", "shape": [2]}}]}"""
    output = wire.decode(types.ForwardBackwardOutput, body)
    assert output == types.ForwardBackwardOutput(
        "TorchLossReturn", [{"logprobs": types.TensorData([-1.0, -2.5])}], {"loss:sum": 2.0}
    )
    assert json.loads(wire.encode(output)) == json.loads(body)


def test_the_sample_of_the_json_protocol() -> None:
    body = b"""{"type": "sample", "prompt_logprobs": [null, -0.5], "prompt_cache_hit_tokens": 0,
        "topk_prompt_logprobs": [null, [[3, -0.5], [4, -1.5]]],
        "sequences": [{"stop_reason": "length", "sequence_id": "", "tokens": [5, 6], "logprobs": [-1, -2]}]}"""
    response = wire.decode(types.SampleResponse, body)
    assert response.prompt_logprobs == [None, -0.5]
    assert response.topk_prompt_logprobs == [None, [(3, -0.5), (4, -1.5)]]
    assert response.sequences[0].tokens_np.dtype == np.int32
    assert response.sequences[0].logprobs == [-1, -2]
    assert json.loads(wire.encode(response)) == json.loads(body)


def test_a_sample_from_an_older_server_has_no_ids_and_no_logprobs() -> None:
    response = wire.decode(types.SampleResponse, b'{"sequences": [{"stop_reason": "stop", "tokens": []}]}')
    assert response == types.SampleResponse([types.SampledSequence("stop", "", np.array([], dtype=np.int32))])


def test_nan_and_infinity_survive_in_results() -> None:
    """Training diverges; its metrics must still arrive."""
    response = types.OptimStepResponse(metrics={"loss": math.nan, "norm": math.inf, "low": -math.inf})
    metrics = wire.decode(types.OptimStepResponse, wire.encode(response)).metrics
    assert math.isnan(metrics["loss"])
    assert (metrics["norm"], metrics["low"]) == (math.inf, -math.inf)


def test_fields_are_put_into_an_encoded_object() -> None:
    request = types.SampleRequest(prompt=PROMPT, sampling_params=types.SamplingParams(), sampling_session_id="s")
    body = wire.with_fields(wire.encode(request), seq_id=5)
    assert wire.decode(types.SampleRequest, body) == request.model_copy(update={"seq_id": 5})
    assert wire.with_fields(b"{}", a=1) == b'{"a":1}'


@pytest.mark.parametrize("data", [b"", b"{", b"<html>", b"\xff\xfe", b"[" * 100_000])
def test_what_is_not_json_is_an_input_error(data: bytes) -> None:
    with pytest.raises(InvalidInputError, match="not JSON"):
        wire.loads(data)


@pytest.mark.parametrize("data", [b"[]", b"3", b"null", b'"text"'])
def test_an_answer_that_is_no_object_is_an_input_error(data: bytes) -> None:
    with pytest.raises(InvalidInputError, match="is an object"):
        wire.decode(types.UntypedAPIFuture, data)


def test_an_answer_that_does_not_fit_names_class_field_and_value() -> None:
    with pytest.raises(InvalidInputError, match=r"UntypedAPIFuture\.request_id.*5") as caught:
        wire.decode(types.UntypedAPIFuture, b'{"request_id": 5}')
    assert caught.value.field == "UntypedAPIFuture.request_id"
