"""Training requests as protobuf: what one end writes, the other end and the official package read."""

import base64
import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tinker
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as official_pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from tests.wire.strategies import LOSS_CONFIGS, LOSSES, MODEL_IDS, SEQ_IDS, datums
from tinsmith import types
from tinsmith.errors import InvalidInputError, MissingExtraError
from tinsmith.wire import proto, zstd
from tinsmith.wire import tinker_pb2 as pb

RECORDED = json.loads((Path(__file__).parent / "data" / "recorded_bodies.json").read_text())["ForwardBackwardRequest"]


def _recorded(name: str) -> bytes:
    return base64.b64decode(RECORDED[name])


def _text_datum(tokens: list[int], **loss_fn_inputs: object) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(tokens), loss_fn_inputs)


def _official_tensor(tensor: types.TensorData) -> tinker.TensorData:
    return tinker.TensorData(
        np.array(tensor.values),
        tensor.dtype,
        tensor.shape,
        tensor.sparse_crow_indices,
        tensor.sparse_col_indices,
    )


def _official_spans(spans: types.ProvenanceSpans | None) -> list[object] | None:
    return spans and [
        getattr(tinker.types, type(span).__name__)(sequence_id=span.sequence_id, offset=span.offset, length=span.length)
        for span in spans
    ]


def _official_datum(datum: types.Datum) -> tinker.Datum:
    return tinker.Datum(
        tinker.ModelInput.model_validate(datum.model_input.model_dump(mode="json", exclude_none=True)),
        {name: _official_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()},
        _official_spans(datum.model_input_spans),
        _official_spans(datum.loss_fn_input_spans),
    )


def _official_bytes(
    data: list[types.Datum], loss_fn: str, config: dict[str, float | str] | None, model_id: str, seq_id: int
) -> bytes:
    examples = tinker.types.ForwardBackwardInput([_official_datum(datum) for datum in data], loss_fn, config)
    request = tinker.types.ForwardBackwardRequest(examples, model_id, seq_id)
    return forward_backward_request_to_proto(request).SerializeToString()


@given(st.lists(datums(), max_size=3), LOSSES, LOSS_CONFIGS, MODEL_IDS, SEQ_IDS, st.booleans())
def test_what_the_client_prepares_the_server_reads(
    data: list[types.Datum],
    loss_fn: types.LossFnType,
    config: dict[str, float | str] | None,
    model_id: str,
    seq_id: int,
    forward_only: bool,
) -> None:
    prepared = proto.prepare_forward_backward(data, loss_fn, config, forward_only=forward_only)
    read = proto.decode_forward_backward_request(prepared.finish(model_id, seq_id))
    assert read == (types.ForwardBackwardInput(data, loss_fn, config), model_id, seq_id, forward_only)


@given(st.lists(datums(), max_size=3), LOSSES, LOSS_CONFIGS, MODEL_IDS, SEQ_IDS)
def test_both_packages_write_the_same_message(
    data: list[types.Datum],
    loss_fn: types.LossFnType,
    config: dict[str, float | str] | None,
    model_id: str,
    seq_id: int,
) -> None:
    ours = proto.prepare_forward_backward(data, loss_fn, config).finish(model_id, seq_id)
    theirs = _official_bytes(data, loss_fn, config, model_id, seq_id)
    message = official_pb.ForwardBackwardRequest
    assert message.FromString(ours) == message.FromString(theirs)
    assert proto.decode_forward_backward_request(theirs).input.data == data


@given(st.lists(datums(), max_size=3), MODEL_IDS, SEQ_IDS)
def test_a_compressed_body_is_one_frame_with_its_length_and_the_same_content(
    data: list[types.Datum], model_id: str, seq_id: int
) -> None:
    plain = proto.prepare_forward_backward(data, "cross_entropy").finish(model_id, seq_id)
    frame = proto.prepare_forward_backward(data, "cross_entropy", compress=True).finish(model_id, seq_id)
    reader = zstandard.ZstdDecompressor().decompressobj()
    assert reader.decompress(frame) == plain
    assert reader.eof
    assert reader.unused_data == b""
    assert zstandard.get_frame_parameters(frame).content_size == len(plain)
    assert zstandard.ZstdDecompressor().decompress(frame) == plain


def test_a_large_body_is_compressed_in_several_blocks() -> None:
    data = [_text_datum(list(range(start, start + 5000)), weights=np.ones(5000)) for start in range(100)]
    plain = proto.prepare_forward_backward(data, "cross_entropy").finish("model", 7)
    frame = proto.prepare_forward_backward(data, "cross_entropy", compress=True).finish("model", 7)
    assert len(plain) > 10 * len(frame)
    assert zstandard.ZstdDecompressor().decompress(frame) == plain


@pytest.mark.parametrize("compress", [False, True])
def test_a_prepared_body_can_be_finished_again_under_another_number(compress: bool) -> None:
    prepared = proto.prepare_forward_backward([_text_datum([1])], "cross_entropy", compress=compress)
    assert prepared.content_encoding == ("zstd" if compress else None)
    first, second, again = (prepared.finish("model", seq_id) for seq_id in (1, 2, 1))
    assert first == again
    assert first != second


def test_compression_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zstd.can_compress()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert not zstd.can_compress()
    with pytest.raises(MissingExtraError, match=r"tinsmith\[zstd\]"):
        proto.prepare_forward_backward([], "cross_entropy", compress=True)


def test_encoding_pauses_about_every_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves 0.6 ms at every look, so that a pause is due at every second example."""
    now, pauses = [0.0], []

    def clock() -> float:
        now[0] += 0.6e-3
        return now[0]

    monkeypatch.setattr(proto.time, "perf_counter", clock)
    datum = _text_datum([1, 2], weights=[1.0, 1.0], target_tokens=[2, 3])
    body = proto.prepare_forward_backward([datum] * 10, "cross_entropy", pause=lambda: pauses.append(now[0]))
    assert proto.decode_forward_backward_request(body.finish("model", 1)).input.data == [datum] * 10
    assert len(pauses) == 5


def test_long_inputs_are_encoded_whole() -> None:
    tokens = list(range(3 * 4096 + 5))
    body = proto.prepare_forward_backward([_text_datum(tokens)], "cross_entropy").finish("model", 1)
    assert proto.decode_forward_backward_request(body).input.data[0].model_input.to_ints() == tokens


def test_numbers_of_the_loss_config_go_to_both_maps_and_texts_to_the_newer_one() -> None:
    prepared = proto.prepare_forward_backward([], "ppo", {"clip": 0.2, "count": 3, "mode": "token"})
    message = pb.ForwardBackwardRequest.FromString(prepared.finish("model", 1))
    assert dict(message.loss_fn_config) == {"clip": 0.2, "count": 3.0}
    assert message.loss_fn_config_v2["clip"].number == 0.2
    assert message.loss_fn_config_v2["count"].number == 3.0
    assert message.loss_fn_config_v2["mode"].text == "token"


def test_a_loss_config_in_the_older_map_alone_is_read() -> None:
    body = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo", loss_fn_config={"clip": 0.2})
    assert proto.decode_forward_backward_request(body.SerializeToString()).input.loss_fn_config == {"clip": 0.2}


def test_a_nested_list_without_a_shape_keeps_its_shape() -> None:
    tensor = types.TensorData([[1, 2], [3, 4]], "int64")
    body = proto.prepare_forward_backward([_text_datum([1], extra=tensor)], "custom").finish("model", 1)
    (datum,) = proto.decode_forward_backward_request(body).input.data
    assert datum.loss_fn_inputs["extra"].tolist() == [[1, 2], [3, 4]]


def test_a_flat_list_without_a_shape_is_sent_without_one() -> None:
    datum = _text_datum([1], weights=types.TensorData([1.0, 2.0], "float32"))
    body = proto.prepare_forward_backward([datum], "cross_entropy").finish("model", 1)
    assert list(pb.ForwardBackwardRequest.FromString(body).data[0].loss_fn_inputs["weights"].shape) == []
    (read,) = proto.decode_forward_backward_request(body).input.data
    assert read.loss_fn_inputs["weights"].tolist() == [1.0, 2.0]


def test_an_image_by_reference_cannot_be_trained_on() -> None:
    pointer = types.ImageAssetPointerChunk(format="png", location="tinker://image")
    with pytest.raises(InvalidInputError, match=r"data\[1\]: .*ImageAssetPointerChunk.*ImageChunk"):
        proto.prepare_forward_backward(
            [_text_datum([1]), types.Datum(types.ModelInput(chunks=[pointer]))], "cross_entropy"
        )


def test_a_number_that_fits_no_message_is_a_typed_error() -> None:
    chunk = types.ImageChunk(data=b"", format="png", expected_tokens=2**40)
    with pytest.raises(InvalidInputError, match=r"data\[0\]"):
        proto.prepare_forward_backward([types.Datum(types.ModelInput(chunks=[chunk]))], "cross_entropy")


def test_an_unknown_loss_is_refused_at_both_ends() -> None:
    with pytest.raises(InvalidInputError, match="cross_entropy"):
        proto.prepare_forward_backward([], "cross_entropi")
    body = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropi").SerializeToString()
    with pytest.raises(InvalidInputError, match="cross_entropy"):
        proto.decode_forward_backward_request(body)


# --- recorded from the official client --------------------------------------------------------------------------------

DENSE = {"target_tokens": [2, 3], "weights": [0.0, 1.0]}


def test_a_recorded_request_is_read() -> None:
    request = proto.decode_forward_backward_request(_recorded("forward_backward_cross_entropy"))
    assert request.model_id == "session-0001:train:0"
    assert request.seq_id == 1
    assert not request.forward_only
    assert request.input.loss_fn == "cross_entropy"
    assert request.input.loss_fn_config is None
    assert request.input.data == [_text_datum([1, 2], **DENSE), _text_datum([4], target_tokens=[5], weights=[1.0])]


def test_a_recorded_forward_request_says_so() -> None:
    assert proto.decode_forward_backward_request(_recorded("forward_only")).forward_only


def test_a_recorded_loss_config_is_read() -> None:
    examples = proto.decode_forward_backward_request(_recorded("forward_backward_ppo_config")).input
    assert examples.loss_fn == "ppo"
    assert examples.loss_fn_config == {"clip_high_threshold": 1.1, "clip_low_threshold": 0.9}


def test_a_recorded_sparse_tensor_is_read_as_sparse() -> None:
    (datum, *_) = proto.decode_forward_backward_request(_recorded("forward_backward_sparse_csr_2d")).input.data
    assert datum.loss_fn_inputs["target_tokens"].csr is not None


def test_a_recorded_image_is_read() -> None:
    (datum,) = proto.decode_forward_backward_request(_recorded("forward_backward_image")).input.data
    assert any(isinstance(chunk, types.ImageChunk) for chunk in datum.model_input.chunks)


def test_recorded_provenance_is_read() -> None:
    (datum,) = proto.decode_forward_backward_request(_recorded("forward_backward_provenance")).input.data
    assert {type(span) for span in datum.model_input_spans} == {
        types.PromptProvenanceSpan,
        types.SampledProvenanceSpan,
    }


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_written_as_they_came(name: str) -> None:
    body = _recorded(name)
    if name == "forward_backward_zstd":
        body = zstandard.ZstdDecompressor().decompress(body)
    examples, model_id, seq_id, forward_only = proto.decode_forward_backward_request(body)
    again = proto.prepare_forward_backward(
        examples.data, examples.loss_fn, examples.loss_fn_config, forward_only=forward_only
    ).finish(model_id, seq_id)
    message = pb.ForwardBackwardRequest
    assert message.FromString(again) == message.FromString(body)


# --- hostile bytes ----------------------------------------------------------------------------------------------------


def _request(**datum: object) -> bytes:
    return pb.ForwardBackwardRequest(
        model_id="m", seq_id=1, loss_fn="cross_entropy", data=[pb.Datum(**datum)]
    ).SerializeToString()


def _tensor(**fields: object) -> bytes:
    return _request(loss_fn_inputs={"x": pb.Tensor(**fields)})


def _sparse(shape: list[int], values: list[int], crow: list[int], col: list[int]) -> bytes:
    parts = [np.array(part, dtype=np.int64).tobytes() for part in (values, crow, col)]
    csr = pb.SparseCsr(values=parts[0], crow_indices=parts[1], col_indices=parts[2])
    return _tensor(dtype=pb.DTYPE_INT64, shape=shape, sparse_csr=csr)


BAD_REQUESTS = {
    "not protobuf": (b"\xff\xff\xff\xff", "not a protobuf ForwardBackwardRequest"),
    "cut off": (_recorded("forward_backward_cross_entropy")[:-3], "not a protobuf"),
    "no model": (pb.ForwardBackwardRequest(seq_id=1, loss_fn="ppo").SerializeToString(), "model_id is missing"),
    "no number": (pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo").SerializeToString(), "seq_id is 0"),
    "a negative number": (pb.ForwardBackwardRequest(model_id="m", seq_id=-4).SerializeToString(), "seq_id is -4"),
    "an empty loss setting": (
        pb.ForwardBackwardRequest(
            model_id="m", seq_id=1, loss_fn="ppo", loss_fn_config_v2={"clip": pb.LossConfigValue()}
        ).SerializeToString(),
        r"loss_fn_config_v2\['clip'\]",
    ),
    "a loss setting that is infinite": (
        pb.ForwardBackwardRequest(
            model_id="m", seq_id=1, loss_fn="ppo", loss_fn_config={"clip": np.inf}
        ).SerializeToString(),
        "infinity",
    ),
    "an unknown chunk": (_request(model_input=[pb.Chunk()]), r"data\[0\]: .*model_input\[0\]"),
    "half a token": (
        _request(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\0\0\0"))]),
        r"model_input\[0\].tokens has 3 bytes",
    ),
    "a negative token": (
        _request(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\xff\xff\xff\xff"))]),
        r"EncodedTextChunk.tokens",
    ),
    "an unknown image format": (
        _request(model_input=[pb.Chunk(image=pb.ImageChunk(format="bmp"))]),
        "ImageChunk.format",
    ),
    "no dtype": (_tensor(dense=b""), r"loss_fn_inputs\['x'\].dense has the dtype number 0"),
    "an unknown dtype": (_tensor(dense=b"", dtype=9), "the dtype number 9"),
    "half a value": (_tensor(dense=b"\0" * 7, dtype=pb.DTYPE_INT64), "7 bytes, which is no multiple of 8"),
    "too few values": (_tensor(dense=b"\0" * 8, dtype=pb.DTYPE_FLOAT32, shape=[3]), r"2 values for the shape \[3\]"),
    "a negative length": (_tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[-1, 0]), "no length is negative"),
    "a huge length": (_tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[2**62, 0]), "larger than any tensor"),
    "too many dimensions": (_tensor(dense=b"\0" * 4, dtype=1, shape=[1] * 70), "larger than any tensor"),
    "NaN": (_tensor(dense=np.float32(np.nan).tobytes(), dtype=pb.DTYPE_FLOAT32), "NaN or infinity"),
    "a sparse vector": (_sparse([3], [], [0], []), "dense shape"),
    "a sparse matrix with negative rows": (_sparse([-1, 2], [], [], []), "no length is negative"),
    "too few row pointers": (_sparse([2, 2], [], [0, 0], []), "sparse_crow_indices"),
    "falling row pointers": (_sparse([2, 2], [1], [0, 2, 1], [0]), "sparse_crow_indices"),
    "a column outside": (_sparse([1, 2], [1], [0, 1], [2]), "sparse_col_indices"),
    "values without columns": (_sparse([1, 2], [1], [0, 1], []), "sparse_col_indices"),
    "an empty span": (
        _request(model_input_spans=[pb.ProvenanceSpan()], loss_fn_input_spans=[pb.ProvenanceSpan()]),
        r"model_input_spans\[0\]",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_malformed_request_is_an_error_that_names_the_place(name: str) -> None:
    body, message = BAD_REQUESTS[name]
    with pytest.raises(InvalidInputError, match=message):
        proto.decode_forward_backward_request(body)


VALID = [_recorded(name) for name in RECORDED if name != "forward_backward_zstd"]


@given(st.sampled_from(VALID), st.integers(0, 400), st.binary(max_size=4), st.integers(0, 4))
def test_damaged_requests_are_read_or_refused_but_never_crash(body: bytes, at: int, new: bytes, drop: int) -> None:
    place = at % len(body)
    damaged = body[:place] + new + body[place + drop :]
    with contextlib.suppress(InvalidInputError):
        proto.decode_forward_backward_request(damaged)


@given(st.binary(max_size=64))
def test_noise_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInputError):
        proto.decode_forward_backward_request(body)
