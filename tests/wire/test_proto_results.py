"""Training results and samples as protobuf: what one end writes, the other end and the official package read."""

import base64
import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from tests.wire.strategies import outputs, samples
from tinsmith import types
from tinsmith.errors import InvalidInputError
from tinsmith.wire import proto
from tinsmith.wire import tinker_pb2 as pb

RECORDED = json.loads((Path(__file__).parent / "data" / "recorded_bodies.json").read_text())
OUTPUTS = {name: base64.b64decode(body) for name, body in RECORDED["ForwardBackwardOutput"].items()}
SAMPLES = {name: base64.b64decode(body) for name, body in RECORDED["SampleResponse"].items()}


def _from_official_tensor(tensor: tinker.TensorData) -> types.TensorData:
    return types.TensorData(
        tensor._numpy, tensor.dtype, tensor.shape, tensor.sparse_crow_indices, tensor.sparse_col_indices
    )


def _from_official_output(output: tinker.ForwardBackwardOutput) -> types.ForwardBackwardOutput:
    return types.ForwardBackwardOutput(
        output.loss_fn_output_type,
        [{name: _from_official_tensor(tensor) for name, tensor in datum.items()} for datum in output.loss_fn_outputs],
        output.metrics,
    )


def _from_official_topk(topk: object) -> types.TopkLogprobs | None:
    return None if topk is None else types.TopkLogprobs(topk.token_ids, topk.logprobs)


def _from_official_sample(response: tinker.SampleResponse) -> types.SampleResponse:
    targets, alternatives = response.target_prompt_logprobs, response.prompt_alt_tokens
    return types.SampleResponse(
        [
            types.SampledSequence(
                sequence.stop_reason,
                "",
                sequence.tokens_np,
                sequence.logprobs_np,
                _from_official_topk(sequence.topk_logprobs_np),
            )
            for sequence in response.sequences
        ],
        response.prompt_logprobs_np,
        _from_official_topk(response.topk_prompt_logprobs_np),
        None if targets is None else _from_official_tensor(targets),
        response.prompt_cache_hit_tokens,
        None
        if alternatives is None
        else types.PromptAltTokens(
            _from_official_tensor(alternatives.tokens), _from_official_tensor(alternatives.logprobs)
        ),
    )


# --- training results -------------------------------------------------------------------------------------------------


@given(outputs())
def test_a_result_reads_back(output: types.ForwardBackwardOutput) -> None:
    assert proto.decode_forward_backward_output(proto.encode_forward_backward_output(output)) == output


@given(outputs())
def test_the_official_package_reads_our_results(output: types.ForwardBackwardOutput) -> None:
    read = deserialize_forward_backward_output(proto.encode_forward_backward_output(output))
    assert _from_official_output(read) == output


@pytest.mark.parametrize("name", OUTPUTS)
def test_recorded_results_are_read_as_the_official_package_reads_them(name: str) -> None:
    body = OUTPUTS[name]
    assert proto.decode_forward_backward_output(body) == _from_official_output(
        deserialize_forward_backward_output(body)
    )


def test_a_recorded_result_has_its_values() -> None:
    output = proto.decode_forward_backward_output(OUTPUTS["forward_backward_cross_entropy"])
    assert output.loss_fn_output_type == "TorchLossReturn"
    assert [datum["logprobs"].tolist() for datum in output.loss_fn_outputs] == [[-0.5, -0.5], [-0.5]]
    assert output.metrics["loss:sum"] == 3.0


def _batched(dtype: int, arrays: list[np.ndarray], trailing_shape: tuple[int, ...] = ()) -> pb.BatchedTensor:
    return pb.BatchedTensor(
        data=b"".join(array.tobytes() for array in arrays),
        offsets=np.cumsum([0, *(array.nbytes for array in arrays)]).tobytes(),
        dtype=dtype,
        trailing_shape=trailing_shape,
    )


def _output(*records: pb.ArrayRecord, **fields: object) -> bytes:
    return pb.ForwardBackwardOutput(loss_fn_outputs=records, **fields).SerializeToString()


def test_datums_of_several_records_follow_each_other() -> None:
    flat, wide = np.arange(3, dtype=np.float32), np.arange(6, dtype=np.float32)
    body = _output(
        pb.ArrayRecord(fields={"logprobs": _batched(pb.DTYPE_FLOAT32, [flat, flat[:1]])}, num_datums=2),
        pb.ArrayRecord(fields={"logprobs": _batched(pb.DTYPE_FLOAT32, [wide], (2,))}, num_datums=1),
        loss_fn_output_type="ArrayRecord",
    )
    read = proto.decode_forward_backward_output(body)
    assert [datum["logprobs"].tolist() for datum in read.loss_fn_outputs] == [
        [0, 1, 2],
        [0],
        [[0, 1], [2, 3], [4, 5]],
    ]
    assert [datum["logprobs"].shape for datum in read.loss_fn_outputs] == [[3], [1], [3, 2]]
    assert read == _from_official_output(deserialize_forward_backward_output(body))


def test_datums_of_different_layouts_go_to_records_of_their_own() -> None:
    flat, wide = types.TensorData.from_numpy(np.ones(2, "f4")), types.TensorData.from_numpy(np.ones((2, 3), "f4"))
    output = types.ForwardBackwardOutput("X", [{"a": flat}, {"a": flat}, {"a": wide}, {"a": flat}])
    message = pb.ForwardBackwardOutput.FromString(proto.encode_forward_backward_output(output))
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 1]
    assert [record.type_tag for record in message.loss_fn_outputs] == ["X"] * 3


def test_narrow_numbers_are_widened() -> None:
    halves = np.array([0x3F80, 0xC040, 0x7F80, 0x0001], dtype=np.uint16)
    ints = np.array([1, -2, 2**31 - 1, -(2**31)], dtype=np.int32)
    record = pb.ArrayRecord(
        fields={"half": _batched(pb.DTYPE_BFLOAT16, [halves]), "int": _batched(pb.DTYPE_INT32, [ints])}, num_datums=1
    )
    body = _output(record)
    (datum,) = proto.decode_forward_backward_output(body).loss_fn_outputs
    assert datum["half"].dtype == "float32"
    assert datum["half"].tolist() == [1.0, -3.0, float("inf"), 2.0**-133]
    assert datum["int"].dtype == "int64"
    assert datum["int"].tolist() == ints.tolist()
    assert [datum] == _from_official_output(deserialize_forward_backward_output(body)).loss_fn_outputs


def test_without_a_count_the_fields_are_counted() -> None:
    body = _output(pb.ArrayRecord(fields={"a": _batched(pb.DTYPE_INT64, [np.arange(2), np.arange(0)])}))
    assert [datum["a"].tolist() for datum in proto.decode_forward_backward_output(body).loss_fn_outputs] == [[0, 1], []]


def test_a_record_without_fields_still_has_its_datums() -> None:
    assert proto.decode_forward_backward_output(_output(pb.ArrayRecord(num_datums=3))).loss_fn_outputs == [{}, {}, {}]


def test_the_module_of_an_output_type_is_dropped() -> None:
    read = proto.decode_forward_backward_output(_output(loss_fn_output_type="some.module:TorchLossReturn"))
    assert read.loss_fn_output_type == "TorchLossReturn"


def test_results_are_views_of_the_body_that_nobody_can_change() -> None:
    datum = {"a": types.TensorData.from_numpy(np.ones((4, 2), "f4"))}
    body = proto.encode_forward_backward_output(types.ForwardBackwardOutput("X", [datum] * 3))
    arrays = [datum["a"].values for datum in proto.decode_forward_backward_output(body).loss_fn_outputs]
    assert not any(array.flags.owndata or array.flags.writeable for array in arrays)
    with pytest.raises(ValueError, match="read-only"):
        arrays[0][0] = 2


def test_sparse_and_scalar_results_become_what_the_message_knows() -> None:
    sparse = types.TensorData([7], "int64", [2, 3], [0, 0, 1], [2])
    output = types.ForwardBackwardOutput("X", [{"sparse": sparse, "scalar": types.TensorData.from_numpy(1.5)}])
    (datum,) = proto.decode_forward_backward_output(proto.encode_forward_backward_output(output)).loss_fn_outputs
    assert datum["sparse"].tolist() == [[0, 0, 0], [0, 0, 7]]
    assert datum["scalar"].tolist() == [1.5]


def test_results_with_different_names_are_refused_before_a_client_sees_them() -> None:
    one = types.TensorData([1], "int64")
    with pytest.raises(InvalidInputError, match="same names"):
        proto.encode_forward_backward_output(types.ForwardBackwardOutput("X", [{"a": one}, {"b": one}]))


# --- samples ----------------------------------------------------------------------------------------------------------


@given(samples())
def test_a_sample_reads_back(response: types.SampleResponse) -> None:
    assert proto.decode_sample_response(proto.encode_sample_response(response)) == response


@given(samples())
def test_the_official_package_reads_our_samples(response: types.SampleResponse) -> None:
    assert _from_official_sample(deserialize_sample_response(proto.encode_sample_response(response))) == response


@pytest.mark.parametrize("name", SAMPLES)
def test_recorded_samples_are_read_as_the_official_package_reads_them(name: str) -> None:
    theirs = deserialize_sample_response(SAMPLES[name])
    ours = proto.decode_sample_response(SAMPLES[name])
    assert ours == _from_official_sample(theirs)
    assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert ours.topk_prompt_logprobs == theirs.topk_prompt_logprobs
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert (mine.tokens, mine.logprobs, mine.topk_logprobs) == (other.tokens, other.logprobs, other.topk_logprobs)


@pytest.mark.parametrize("name", SAMPLES)
def test_recorded_samples_are_written_as_they_came(name: str) -> None:
    again = proto.encode_sample_response(proto.decode_sample_response(SAMPLES[name]))
    message = pb.SampleResponse
    assert proto.decode_sample_response(again) == proto.decode_sample_response(SAMPLES[name])
    assert message.FromString(again).sequences == message.FromString(SAMPLES[name]).sequences


def test_samples_get_the_ids_that_were_announced() -> None:
    body = _sample(pb.SampledSequence(), pb.SampledSequence())
    assert [sequence.sequence_id for sequence in proto.decode_sample_response(body, ["x", "y"]).sequences] == ["x", "y"]
    with pytest.raises(InvalidInputError, match="2 samples, but 3 were announced"):
        proto.decode_sample_response(body, ["x", "y", "z"])


def test_positions_without_a_logprob_read_as_none() -> None:
    body = _sample(prompt_logprobs=np.array([np.nan, -1.5, np.nan], "f4").tobytes())
    assert proto.decode_sample_response(body).prompt_logprobs == [None, -1.5, None]


def test_empty_cells_of_top_k_are_left_out() -> None:
    topk = pb.TopkLogprobs(
        token_ids=np.array([0, 0, 5, 0, 0, 7], "i4").tobytes(),
        logprobs=np.array([-99999, -99999, -1, -99999, -2, -3], "f4").tobytes(),
        k=2,
        length=3,
    )
    body = _sample(topk_prompt_logprobs=topk)
    assert proto.decode_sample_response(body).topk_prompt_logprobs == [None, [(5, -1.0)], [(0, -2.0), (7, -3.0)]]


@pytest.mark.parametrize("size", [{}, {"k": 2}, {"length": 2}])
def test_a_top_k_of_nothing_is_none(size: dict[str, int]) -> None:
    assert (
        proto.decode_sample_response(_sample(topk_prompt_logprobs=pb.TopkLogprobs(**size))).topk_prompt_logprobs is None
    )


def test_alternative_tokens_may_be_narrow() -> None:
    tokens = pb.Tensor(dense=np.arange(4, dtype="i4").tobytes(), dtype=pb.DTYPE_INT32, shape=[2, 2])
    logprobs = pb.Tensor(dense=np.zeros(4, "f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=[2, 2])
    body = _sample(prompt_alt_tokens=pb.PromptAltTokens(tokens=tokens, logprobs=logprobs))
    assert proto.decode_sample_response(body).prompt_alt_tokens.tokens == types.TensorData([[0, 1], [2, 3]], "int64")


# --- hostile bytes ----------------------------------------------------------------------------------------------------


def _sample(*sequences: pb.SampledSequence, **fields: object) -> bytes:
    return pb.SampleResponse(sequences=sequences, **fields).SerializeToString()


def _field(num_datums: int = 1, **fields: object) -> bytes:
    return _output(pb.ArrayRecord(fields={"a": pb.BatchedTensor(**fields)}, num_datums=num_datums))


def _offsets(*offsets: int) -> bytes:
    return np.array(offsets, dtype=np.int64).tobytes()


BAD_OUTPUTS = {
    "not protobuf": (b"\x07", "not a protobuf ForwardBackwardOutput"),
    "cut off": (OUTPUTS["forward_only"][:-1], "not a protobuf"),
    "no dtype": (_field(offsets=_offsets(0, 0)), r"loss_fn_outputs\[0\].fields\['a'\].data has the dtype number 0"),
    "an unknown dtype": (_field(offsets=_offsets(0, 0), dtype=77), "the dtype number 77"),
    "half a value": (_field(data=b"\0" * 6, offsets=_offsets(0, 6), dtype=1), "6 bytes, which is no multiple of 4"),
    "half an offset": (_field(data=b"", offsets=b"\0" * 9, dtype=1), "offsets has 9 bytes"),
    "no offsets": (_field(data=b"\0" * 4, dtype=1), "does not rise from 0 to 4"),
    "offsets that begin late": (_field(data=b"\0" * 8, offsets=_offsets(4, 8), dtype=1), "does not rise from 0 to 8"),
    "offsets that end early": (_field(data=b"\0" * 8, offsets=_offsets(0, 4), dtype=1), "does not rise from 0 to 8"),
    "offsets that fall": (_field(2, data=b"\0" * 8, offsets=_offsets(0, 12, 8), dtype=1), "does not rise"),
    "an offset far outside": (_field(data=b"", offsets=_offsets(0, 2**62), dtype=1), "does not rise from 0 to 0"),
    "an offset inside a value": (_field(2, data=b"\0" * 8, offsets=_offsets(0, 2, 8), dtype=1), "whole rows of 4"),
    "an offset inside a row": (
        _field(2, data=b"\0" * 16, offsets=_offsets(0, 4, 16), dtype=1, trailing_shape=[2]),
        "whole rows of 8 bytes",
    ),
    "values in rows of nothing": (
        _field(data=b"\0" * 4, offsets=_offsets(0, 4), dtype=1, trailing_shape=[0]),
        "whole rows of 0 bytes",
    ),
    "a negative shape": (_field(offsets=_offsets(0, 0), dtype=1, trailing_shape=[-1]), "no length is negative"),
    "a huge shape": (_field(offsets=_offsets(0, 0), dtype=1, trailing_shape=[2**40, 2**40]), "larger than any tensor"),
    "fewer datums than said": (_field(3, offsets=_offsets(0, 0), dtype=1), "has 1 datums instead of 3"),
    "a negative count": (_field(-1, offsets=_offsets(0, 0), dtype=1), r"claims \[-1\] datums"),
    "a negative count of nothing": (_output(pb.ArrayRecord(num_datums=-1)), r"claims \[-1\] datums"),
    "an endless count": (_output(pb.ArrayRecord(num_datums=2**62)), "up to 1,000,000"),
    "an endless count in parts": (_output(*[pb.ArrayRecord(num_datums=10**6)] * 900), "up to 1,000,000"),
}


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_a_malformed_result_is_an_error_that_names_the_place(name: str) -> None:
    body, message = BAD_OUTPUTS[name]
    with pytest.raises(InvalidInputError, match=message):
        proto.decode_forward_backward_output(body)


BAD_SAMPLES = {
    "not protobuf": (b"\x07", "not a protobuf SampleResponse"),
    "an unknown stop reason": (_sample(pb.SampledSequence(stop_reason=5)), r"sequences\[0\].stop_reason is 5"),
    "half a token": (_sample(pb.SampledSequence(tokens=b"\0" * 5)), r"sequences\[0\].tokens has 5 bytes"),
    "half a logprob": (_sample(pb.SampledSequence(logprobs=b"\0" * 3)), r"sequences\[0\].logprobs has 3 bytes"),
    "tokens without logprobs": (
        _sample(pb.SampledSequence(tokens=b"\0" * 8, logprobs=b"\0" * 4)),
        "1 values for 2 tokens",
    ),
    "half a prompt logprob": (_sample(prompt_logprobs=b"\0"), "prompt_logprobs has 1 bytes"),
    "a top-k without its cells": (
        _sample(topk_prompt_logprobs=pb.TopkLogprobs(k=2, length=3, token_ids=b"\0" * 24)),
        "6 tokens and 0 logprobs for 3 positions of 2 each",
    ),
    "an endless top-k": (
        _sample(topk_prompt_logprobs=pb.TopkLogprobs(k=2**32 - 1, length=2**32 - 1)),
        "0 tokens and 0 logprobs for 4294967295 positions",
    ),
    "targets of no type": (_sample(target_prompt_logprobs=pb.Tensor()), "target_prompt_logprobs.dense has the dtype"),
    "alternatives of no type": (_sample(prompt_alt_tokens=pb.PromptAltTokens()), "prompt_alt_tokens.tokens"),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_malformed_sample_is_an_error_that_names_the_place(name: str) -> None:
    body, message = BAD_SAMPLES[name]
    with pytest.raises(InvalidInputError, match=message):
        proto.decode_sample_response(body)


@given(
    st.sampled_from(
        [(proto.decode_forward_backward_output, body) for body in OUTPUTS.values()]
        + [(proto.decode_sample_response, body) for body in SAMPLES.values()]
    ),
    st.integers(0, 900),
    st.binary(max_size=4),
    st.integers(0, 4),
)
def test_damaged_results_are_read_or_refused_but_never_crash(case: tuple, at: int, new: bytes, drop: int) -> None:
    decode, body = case
    place = at % len(body)
    with contextlib.suppress(InvalidInputError):
        decode(body[:place] + new + body[place + drop :])
