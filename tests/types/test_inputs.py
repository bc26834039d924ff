"""Model inputs and data."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch

from tinsmith.errors import InvalidInputError, InvalidTypeError
from tinsmith.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)

PROMPT = ModelInput.from_ints([1, 2, 3])
IMAGE = ImageChunk(data=b"hello", format="png", expected_tokens=7)


@pytest.mark.parametrize("tokens", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3]), torch.tensor([1, 2, 3])])
def test_token_ids_come_from_any_sequence(tokens) -> None:
    assert ModelInput.from_ints(tokens) == PROMPT
    assert PROMPT.to_ints() == [1, 2, 3]


@pytest.mark.parametrize("token", [-1, 2**31, "1", None, True, 1.5])
@pytest.mark.parametrize("others", [[1], [7], [7] * 5_000], ids=["small", "large", "many"])
def test_what_is_no_token_id_is_refused(token: object, others: list[int]) -> None:
    with pytest.raises(InvalidInputError, match=r"EncodedTextChunk\.tokens"):
        ModelInput.from_ints([*others, token])


@pytest.mark.parametrize("tokens", [[], [0], [5], [0, 1, 2**31 - 1], list(range(10_000)), [3, np.int64(4)]])
def test_the_ids_of_a_chunk_read_like_the_list_they_came_from(tokens: list[int]) -> None:
    ids = EncodedTextChunk(tokens=tokens).tokens
    assert ids == tokens
    assert list(ids) == tokens
    assert ids[1:] == tokens[1:]
    assert tokens + ids == ids + tokens == [*tokens, *tokens]
    assert all(type(token) is int for token in ids)
    assert (len(ids), bool(ids)) == (len(tokens), bool(tokens))
    assert np.array(ids).tolist() == torch.tensor(ids).tolist() == tokens
    assert pickle.loads(pickle.dumps(ids)) == copy.deepcopy(ids) == ids
    assert EncodedTextChunk(tokens=ids) == EncodedTextChunk(tokens=tokens)
    assert json.loads(json.dumps(EncodedTextChunk(tokens=ids).model_dump()))["tokens"] == tokens
    if tokens:
        assert (ids[0], ids[-1]) == (tokens[0], tokens[-1])
        assert tokens[0] in ids


def test_the_ids_of_a_chunk_cannot_be_changed() -> None:
    ids = PROMPT.chunks[0].tokens
    with pytest.raises(TypeError):
        ids[0] = 5
    with pytest.raises(AttributeError):
        ids.append(5)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(ids)[0] = 5
    with pytest.raises(IndexError):
        ids[3]
    assert ids != (1, 2, 3)


def test_the_list_that_was_given_may_change_afterwards() -> None:
    tokens = [1, 2, 3]
    prompt = ModelInput.from_ints(tokens)
    tokens.append(4)
    assert prompt.to_ints() == [1, 2, 3]


def test_appending_makes_a_new_input() -> None:
    longer = PROMPT.append_int(4)
    assert longer == ModelInput.from_ints([1, 2, 3, 4])
    assert PROMPT.to_ints() == [1, 2, 3]
    mixed = ModelInput.empty().append(IMAGE).append_int(4).append_int(5)
    assert mixed.chunks == [IMAGE, EncodedTextChunk(tokens=[4, 5])]
    assert mixed.length == 9
    with pytest.raises(InvalidInputError):
        PROMPT.append_int(-1)


def test_an_input_with_an_image_has_no_token_ids() -> None:
    with pytest.raises(InvalidInputError, match="encoded_text, image"):
        PROMPT.append(IMAGE).to_ints()


def test_the_length_of_an_image_must_be_told() -> None:
    pointer = ImageAssetPointerChunk(format="jpeg", location="https://example.com/a.jpg")
    with pytest.raises(InvalidInputError, match=r"ImageAssetPointerChunk.*expected_tokens"):
        _ = ModelInput(chunks=[pointer]).length
    assert ImageAssetPointerChunk(format="jpeg", location="a", expected_tokens=3).length == 3


def test_image_fields_of_older_releases_are_taken_and_sent_only_if_given() -> None:
    assert set(IMAGE.to_builtins()) == {"data", "format", "expected_tokens", "type"}
    older = ImageChunk(data=b"", format="png", height=2, width=3, tokens=5)
    assert older.length == 5
    assert older.to_builtins().items() >= {"height": 2, "width": 3, "tokens": 5}.items()


def test_bytes_may_be_given_as_base64_text() -> None:
    assert ImageChunk(data="aGVsbG8=", format="png").data == b"hello"
    assert DmelChunk(dmel="AAED").dmel == b"\x00\x01\x03"


def test_the_length_of_audio_stands_in_its_header() -> None:
    assert DmelChunk(dmel=b"\x00\x02\x81\x01\x05rest").length == 129
    assert DmelChunk(dmel=b"\xfe\x00\x01\x04").length == 4
    for broken in (b"", b"\x09\x01\x01", b"\x00\x01", b"\x00\x00", b"\x00" + b"\xff" * 11):
        with pytest.raises(InvalidInputError, match=r"DmelChunk\.dmel"):
            _ = DmelChunk(dmel=broken).length


# --- data ---


def test_a_datum_takes_lists_arrays_tensors_and_scalars() -> None:
    datum = Datum(
        PROMPT,
        {
            "target_tokens": [2, 3, 4],
            "weights": np.array([True, False, True]),
            "advantages": torch.tensor([0.5, 1.0, 1.5], requires_grad=True),
            "logprobs": TensorData([-1.0, -2.0, -3.0]),
            "beta": 0.5,
            "mine": (1, 2, 3),
        },
    )
    assert {key: tensor.dtype for key, tensor in datum.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "weights": "int64",
        "advantages": "float32",
        "logprobs": "float32",
        "beta": "float32",
        "mine": "int64",
    }
    assert datum.loss_fn_inputs["beta"].shape == []


def test_a_list_under_an_unknown_name_says_itself_what_it_holds() -> None:
    inputs = Datum(PROMPT, {"ids": [1, 2], "scores": [1, 2.5]}).loss_fn_inputs
    assert (inputs["ids"].dtype, inputs["scores"].dtype) == ("int64", "float32")


def test_a_datum_is_made_by_name_or_by_position() -> None:
    assert Datum(PROMPT, {"a": [1]}) == Datum(loss_fn_inputs={"a": [1]}, model_input=PROMPT)
    assert Datum(PROMPT).loss_fn_inputs == {}


def test_a_datum_can_be_changed_like_the_dataclass_it_is_elsewhere() -> None:
    datum = Datum(PROMPT, {"a": [1]})
    assert dataclasses.is_dataclass(datum)
    assert dataclasses.replace(datum, loss_fn_inputs={"b": [2]}) == Datum(PROMPT, {"b": [2]})
    assert [field.name for field in dataclasses.fields(Datum)][:2] == ["model_input", "loss_fn_inputs"]
    assert not dataclasses.is_dataclass(PROMPT)
    span = SampledProvenanceSpan(sequence_id="a", offset=2, length=5)
    assert dataclasses.replace(span, offset=3, length=4) == SampledProvenanceSpan(sequence_id="a", offset=3, length=4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.0, float("nan")], "NaN or infinity"),
        (np.array([np.inf], dtype=np.float32), "NaN or infinity"),
        (TensorData([float("-inf")]), "NaN or infinity"),
        ([[1], [2, 3]], "rectangular"),
        ("text", "a tensor or a list of numbers"),
        (None, "a tensor or a list of numbers"),
        ([1, "a"], "integers, floats or booleans"),
    ],
)
def test_a_bad_tensor_is_refused_under_its_name(value, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text) as caught:
        Datum(PROMPT, {"weights": value})
    assert caught.value.field == "loss_fn_inputs['weights']"
    assert "loss_fn_inputs['weights']" in str(caught.value)


def test_target_tokens_are_whole_numbers() -> None:
    assert Datum(PROMPT, {"target_tokens": [1.0, 2.0]}).loss_fn_inputs["target_tokens"].data == [1, 2]
    with pytest.raises(InvalidInputError, match=r"1\.5 has no int64 value"):
        Datum(PROMPT, {"target_tokens": [1.5]})


def test_a_datum_needs_an_input() -> None:
    with pytest.raises(InvalidInputError, match=r"ModelInput\.from_ints"):
        Datum([1, 2, 3], {})
    with pytest.raises(InvalidInputError, match="dict of tensors"):
        Datum(PROMPT, [1])


# --- provenance ---


def test_provenance_covers_both_fields_exactly() -> None:
    datum = Datum(PROMPT, {"target_tokens": [2, 3, 4]})
    inputs = [PromptProvenanceSpan(sequence_id="a", length=2), SampledProvenanceSpan(sequence_id="a", length=1)]
    targets = [SampledProvenanceSpan(sequence_id="a", offset=1, length=3)]
    told = datum.with_provenance(inputs, targets)
    assert (told.model_input_spans, told.loss_fn_input_spans) == (inputs, targets)
    assert datum.model_input_spans is None
    with pytest.raises(InvalidInputError, match="cover 2 positions, but there are 3"):
        datum.with_provenance(inputs[:1], targets)
    with pytest.raises(InvalidInputError, match="cover 1 positions, but there are 3"):
        datum.with_provenance(inputs, inputs[1:])


def test_provenance_comes_as_a_pair_of_spans() -> None:
    with pytest.raises(InvalidInputError, match="pair"):
        Datum(PROMPT, {}, model_input_spans=[])
    with pytest.raises(TypeError, match="SampledProvenanceSpan"):
        Datum(PROMPT, {}, [1], [])


@pytest.mark.parametrize("fields", [{"length": -1}, {"length": 1, "offset": -1}, {"length": 1, "sequence_id": ""}])
def test_a_span_has_a_name_and_no_negative_numbers(fields: dict) -> None:
    with pytest.raises(InvalidInputError):
        SampledProvenanceSpan(**{"sequence_id": "a", **fields})


def test_provenance_cannot_be_lost_silently_in_json() -> None:
    span = [SampledProvenanceSpan(sequence_id="a", length=3)]
    with pytest.raises(InvalidInputError, match="protobuf"):
        Datum(PROMPT, {"target_tokens": [1, 2, 3]}).with_provenance(span, span).to_builtins()


def test_a_loss_input_is_named_by_a_text() -> None:
    with pytest.raises(InvalidTypeError, match=r"Datum\.loss_fn_inputs.*'target_tokens', not 3"):
        Datum(PROMPT, {3: [1]})


def test_a_datum_does_not_change_with_an_array_seen_through_a_read_only_view() -> None:
    array = np.zeros(3, dtype=np.float32)
    view = array[:]
    view.flags.writeable = False
    datum = Datum(PROMPT, {"weights": view})
    array[0] = np.nan
    assert datum.loss_fn_inputs["weights"].data == [0, 0, 0]


def test_a_masked_loss_input_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match=r"loss_fn_inputs\['weights'\]: .*Fill it first"):
        Datum(PROMPT, {"weights": np.ma.array([1.0, 2.0], mask=[False, True])})
