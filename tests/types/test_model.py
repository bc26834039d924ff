"""What all types promise: checks at the door, immutability, copies, short reprs, and what JSON they write."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch

from tinsmith import types
from tinsmith.errors import InvalidInputError, InvalidTypeError
from tinsmith.types._codecs import codec_for
from tinsmith.types._model import Model, Request, Response

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
PROMPT = types.ModelInput.from_ints([1, 2, 3])
CHECKPOINT = {
    "checkpoint_id": "weights/a",
    "checkpoint_type": "training",
    "time": "2026-03-01T12:00:00Z",
    "tinker_path": "tinker://run/weights/a",
}

EXAMPLES: list[Model] = [
    PROMPT,
    types.SamplingParams(max_tokens=5, stop=["a"]),
    types.SampleRequest(prompt=PROMPT, sampling_params=types.SamplingParams()),
    types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1, 1, 0.5]}),
    types.OptimStepRequest(optim_params=types.AdamParams(), model_id="m", seq_id=1),
    types.OptimStepRequest(optim_params=types.OtherOptimParams(type="sgd", momentum=0.9), model_id="m"),
    types.ForwardBackwardOutput("TorchLossReturn", [{"logprobs": types.TensorData([-1.0, -2.0])}], {"loss:sum": 3.0}),
    types.SampledSequence("stop", "id", np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32)),
    types.SampleResponse([types.SampledSequence("length", "id")], np.array([np.nan, -1], dtype=np.float32)),
    types.TopkLogprobs(np.ones((2, 1), dtype=np.int32), np.zeros((2, 1), dtype=np.float32)),
    types.Checkpoint.from_builtins({**CHECKPOINT, "colour": "blue"}),
    types.RequestFailedResponse(error="no", category=types.RequestErrorCategory.User),
    types.TelemetryBatch(
        events=[types.SessionStartEvent(event_id="e", event_session_index=0, severity="INFO", timestamp=NOW)],
        platform="Linux",
        sdk_version="1",
        session_id="s",
        process_uuid="u",
    ),
]
names = [type(example).__name__ for example in EXAMPLES]


@pytest.mark.parametrize("example", EXAMPLES, ids=names)
def test_a_copy_and_an_unpickled_one_are_equal_to_the_original(example: Model) -> None:
    for twin in (copy.copy(example), copy.deepcopy(example), pickle.loads(pickle.dumps(example)), example.model_copy()):
        assert twin == example
        assert repr(twin) == repr(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=names)
def test_a_field_cannot_be_changed(example: Model) -> None:
    name = example.__struct_fields__[0]
    with pytest.raises(AttributeError):
        setattr(example, name, None)
    with pytest.raises(AttributeError):
        delattr(example, name)


@pytest.mark.parametrize("example", EXAMPLES[:-1], ids=names[:-1])
def test_another_value_is_not_equal(example: Model) -> None:
    assert example != EXAMPLES[-1]
    assert (example == "something else") is False


def test_types_without_lists_can_be_hashed() -> None:
    assert len({types.AdamParams(), types.AdamParams(), types.AdamParams(beta1=0.5)}) == 2
    assert len({types.Cursor(offset=0, limit=1, total_count=2), types.Cursor(offset=0, limit=1, total_count=2)}) == 1


# --- requests are strict ---


def test_an_unknown_field_is_refused_by_name_and_the_legal_ones_are_listed() -> None:
    with pytest.raises(
        InvalidInputError, match=r"SamplingParams has no field 'max_token'\. .*max_tokens, seed, stop"
    ) as caught:
        types.SamplingParams(max_token=5)
    assert caught.value.field == "SamplingParams.max_token"


def test_missing_fields_are_named() -> None:
    with pytest.raises(InvalidInputError, match="CreateModelRequest needs session_id, base_model"):
        types.CreateModelRequest(model_seq_id=1)


def test_a_bad_call_is_also_the_type_error_that_python_would_raise() -> None:
    for call in (
        lambda: types.LoraConfig(),
        lambda: types.LoraConfig(8),
        lambda: types.LoraConfig(rank=8, depth=2),
        lambda: types.Datum(PROMPT, {}, None, None, 5),
    ):
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    with pytest.raises(InvalidInputError, match=r"AdamParams\.learning_rate: must be finite"):
        types.AdamParams(learning_rate=bad)
    with pytest.raises(InvalidInputError, match="finite"):
        types.ForwardBackwardInput([], "ppo", {"clip_low_threshold": bad})
    with pytest.raises(InvalidInputError, match="finite"):
        types.OtherOptimParams(type="sgd", momentum=bad)
    with pytest.raises(InvalidInputError, match="finite"):
        types.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b", user_metadata={"a": [bad]})


def test_a_wrong_literal_is_refused_with_the_legal_values() -> None:
    with pytest.raises(InvalidInputError, match=r"ImageChunk\.format: must be one of 'png', 'jpeg'.* 'gif'"):
        types.ImageChunk(data=b"", format="gif")
    with pytest.raises(InvalidInputError, match="cross_entropy, importance_sampling, ppo"):
        types.training.check_loss_fn("crossentropy")
    with pytest.raises(InvalidInputError, match="'cross_entropy', 'importance_sampling'"):
        types.ForwardBackwardInput([], "crossentropy")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: types.LoraConfig(rank="8"), r"LoraConfig\.rank: expected `int`, got `str`\. The value given is '8'"),
        (lambda: types.LoraConfig(rank=True), "got `bool`"),
        (lambda: types.LoraConfig(rank=0), "`int` >= 1"),
        (lambda: types.LoraConfig(rank=8, seed="x"), r"expected `int \| None`"),
        (lambda: types.SamplingParams(stop=[1, "a"]), r"SamplingParams\.stop"),
        (lambda: types.SamplingParams(temperature=-1), r"`float` >= 0"),
        (lambda: types.SaveWeightsRequest(model_id="m", user_metadata={"a": 1}), "got `int`"),
        (lambda: types.SessionSearchRequest(limit=201), "<= 200"),
        (lambda: types.SessionSearchRequest(statuses=[]), "`list` of length >= 1"),
        (lambda: types.UserSearchOwner(owner_urns=["u"] * 11), "length <= 10"),
        (lambda: types.DimuonParams(learning_rate=-1), ">= 0"),
        (lambda: types.DimuonParams(learning_rate=1, beta1=1), "< 1"),
        (lambda: types.OptimStepRequest(optim_params=3, model_id="m"), "AdamParams"),
        (
            lambda: types.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b", user_metadata={"a": {1j}}),
            "JSON",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_field_reason_and_value(call, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        call()


@pytest.mark.parametrize(
    ("hint", "value", "told"),
    [
        (dict[str, int], {1: 2}, "Expected `str`, got `int` - at `key` in `$`"),
        (dict[str, int], {"a": "x"}, "Expected `int`, got `str` - at `$[...]`"),
        (list[dict[str, int]], [{1: 2}], "Expected `str`, got `int` - at `key` in `$[0]`"),
        (int, "x", "Expected `int`, got `str`"),
        (Literal["a"], "x - at `$.value`", "Invalid enum value 'x - at `$.value`'"),
    ],
    ids=["key", "item", "key of an item", "value", "text that looks like a place"],
)
def test_a_place_is_told_as_seen_from_the_value(hint: Any, value: object, told: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        codec_for(hint, strict=True).load(value)
    assert str(caught.value) == told


def test_a_wrong_type_is_also_a_type_error() -> None:
    with pytest.raises(InvalidTypeError):
        types.LoraConfig(rank="8")
    with pytest.raises(TypeError):
        types.LoraConfig(rank="8")


def test_numpy_and_torch_scalars_are_taken_as_numbers() -> None:
    params = types.SamplingParams(
        max_tokens=np.int32(5), temperature=np.float64(0.5), top_p=torch.tensor(0.5), top_k=torch.tensor(3), seed=4.0
    )
    assert params == types.SamplingParams(max_tokens=5, temperature=0.5, top_p=0.5, top_k=3, seed=4)
    assert [type(value) for value in (params.max_tokens, params.temperature, params.top_k)] == [int, float, int]


def test_tuples_ranges_and_arrays_are_taken_as_lists() -> None:
    for stop in ((1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), np.int64(2)]):
        assert types.SamplingParams(stop=stop).stop == [1, 2]


def test_free_form_data_is_copied_and_freed_of_numpy() -> None:
    given = {"loss": np.float32(0.5), "steps": [1]}
    request = types.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b", user_metadata=given)
    given["steps"].append(2)
    assert request.user_metadata == {"loss": 0.5, "steps": [1]}


def test_a_nested_object_may_be_given_as_a_dict() -> None:
    request = types.CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="b", lora_config={"rank": 8}, optimizer_config={"type": "dimuon"}
    )
    assert request.lora_config == types.LoraConfig(rank=8)
    assert request.optimizer_config == types.DimuonOptimizerConfig()


def test_a_changed_copy_is_checked_too() -> None:
    config = types.LoraConfig(rank=8)
    assert config.model_copy(update={"rank": 16}) == types.LoraConfig(rank=16)
    with pytest.raises(InvalidInputError):
        config.model_copy(update={"rank": -1})
    with pytest.raises(InvalidInputError, match="has no field 'depth'"):
        config.model_copy(update={"depth": 1})


# --- responses are lenient ---


def test_unknown_fields_of_a_response_are_kept_read_only() -> None:
    checkpoint = types.Checkpoint.from_builtins({**CHECKPOINT, "colour": "blue"})
    assert checkpoint.extra == {"colour": "blue"}
    with pytest.raises(TypeError):
        checkpoint.extra["colour"] = "red"
    assert "colour" not in checkpoint.to_builtins()


def test_a_response_made_in_python_keeps_unknown_fields_too() -> None:
    assert types.Cursor(offset=0, limit=1, total_count=2, page=7).extra == {"page": 7}


def test_a_result_made_in_python_takes_no_unknown_field() -> None:
    """A sample whose tokens went into `extra` would look like an empty one."""
    with pytest.raises(InvalidInputError, match="has no field 'tokens'"):
        types.SampledSequence(stop_reason="stop", sequence_id="", tokens=[1, 2])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({**CHECKPOINT, "size_bytes": "big"}, r"Checkpoint\.size_bytes: expected `int \| None`, got `str`.*'big'"),
        ({**CHECKPOINT, "checkpoint_type": "other"}, "one of 'training', 'sampler', 'external'"),
        ({**CHECKPOINT, "time": "yesterday"}, r"Checkpoint\.time: .*'yesterday'"),
        ({"checkpoint_id": "a"}, "Checkpoint needs checkpoint_type, time, tinker_path"),
        (["a"], r"A Checkpoint is an object, not \['a'\]"),
    ],
)
def test_a_response_that_does_not_fit_is_refused_with_class_field_and_value(body, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        types.Checkpoint.from_builtins(body)


def test_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InvalidInputError, match=r"SessionSummary\.status: 'type' must be one of 'failed', .* not 'lost'"
    ):
        types.SessionSummary.from_builtins(
            {
                "session_id": "s",
                "created_at": "2026-03-01T12:00:00Z",
                "owner": "o",
                "project_id": "p",
                "checkpoints_count": 0,
                "status": {"type": "lost"},
            }
        )


def test_whole_floats_are_integers_in_a_response() -> None:
    assert types.Cursor.from_builtins({"offset": 0.0, "limit": 1.0, "total_count": 2}).limit == 1


# --- what is written ---


def test_none_is_left_out() -> None:
    request = types.SaveWeightsRequest(model_id="m", path="a")
    assert request.to_builtins() == {"model_id": "m", "path": "a", "overwrite": False, "type": "save_weights"}


def test_none_is_sent_where_it_has_a_meaning() -> None:
    assert types.SetCheckpointTTLRequest(ttl_seconds=None).to_builtins() == {"ttl_seconds": None}
    assert types.FinishSessionRequest(reason=types.ClientSessionFinishSuccess()).to_builtins() == {
        "reason": {"type": "success"},
        "detail": None,
    }


def test_clearing_metadata_is_sent() -> None:
    assert types.SaveWeightsRequest(model_id="m", user_metadata={}).to_builtins()["user_metadata"] == {}


def test_false_and_unset_are_told_apart() -> None:
    def body(**fields: bool) -> dict:
        return types.SampleRequest(prompt=PROMPT, sampling_params=types.SamplingParams(), **fields).to_builtins()

    assert "prompt_logprobs" not in body()
    assert body(prompt_logprobs=False)["prompt_logprobs"] is False


def test_the_type_of_every_request_is_always_written() -> None:
    for example in (types.GetInfoRequest(model_id="m"), types.GetInfoRequest(model_id="m", type="get_info")):
        assert example.to_builtins() == {"model_id": "m", "type": "get_info"}
    with pytest.raises(InvalidInputError, match="must be one of 'get_info'"):
        types.GetInfoRequest(model_id="m", type="other")


def test_a_dump_has_all_fields_and_a_json_dump_has_text_for_times_and_bytes() -> None:
    chunk = types.ImageChunk(data=b"hello", format="png")
    assert chunk.model_dump()["data"] == b"hello"
    assert chunk.model_dump(mode="json", exclude_none=True) == {"data": "aGVsbG8=", "format": "png", "type": "image"}
    checkpoint = types.Checkpoint.model_validate(CHECKPOINT)
    assert checkpoint.model_dump()["time"] == NOW
    assert checkpoint.model_dump()["expires_at"] is None
    assert types.Checkpoint.model_validate_json(checkpoint.model_dump_json()) == checkpoint
    assert types.Checkpoint.model_validate(checkpoint) is checkpoint
    with pytest.raises(InvalidInputError, match="not JSON"):
        types.Checkpoint.model_validate_json("{")


# --- what is shown ---


def test_a_repr_stays_short() -> None:
    long = types.ModelInput.from_ints(range(100_000))
    datum = types.Datum(long, {"weights": np.ones(100_000, dtype=np.float32)})
    image = types.ImageChunk(data=b"x" * 100_000, format="png")
    for value in (long, datum, image, datum.loss_fn_inputs["weights"]):
        assert len(repr(value)) < 500
    assert "100,000 in all" in repr(long)
    assert str(long) == repr(long)


def test_an_error_stays_short() -> None:
    with pytest.raises(InvalidInputError) as caught:
        types.ModelInput.from_ints([*range(100_000), "a"])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "show",
    [
        lambda secret: types.LoadWeightsRequest(path="p", optimizer=True, weights_access_token=secret),
        lambda secret: types.CopyWeightsRequest(source_path="p", weights_access_token=secret),
        lambda secret: types.AuthTokenResponse(jwt=secret),
    ],
)
def test_credentials_are_not_shown(show) -> None:
    assert "tml-secret" not in repr(show("tml-secret"))
    assert "tml-secret" in str(show("tml-secret").to_builtins())


def test_credentials_are_not_shown_in_errors_either() -> None:
    for call in (
        lambda: types.LoadWeightsRequest(path="p", optimizer=True, weights_access_token=["tml-secret"]),
        lambda: types.LoadWeightsRequest(path="p", optimizer=True, weights_acess_token="tml-secret"),
    ):
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert "tml-secret" not in str(caught.value) + str(vars(caught.value))


def test_every_public_class_is_a_request_or_a_response() -> None:
    others = {
        name
        for name in types.__all__
        if isinstance(getattr(types, name), type) and not issubclass(getattr(types, name), Request | Response)
    }
    assert others == {"TensorData", "RequestErrorCategory", "PrecisionWarning", "ModelID", "RequestID"}


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**80])
def test_a_lora_seed_is_a_64_bit_integer(seed: int) -> None:
    with pytest.raises(InvalidInputError, match=r"LoraConfig\.seed: expected `int`"):
        types.LoraConfig(rank=8, seed=seed)
    assert [types.LoraConfig(rank=8, seed=edge).seed for edge in (2**63 - 1, -(2**63))] == [2**63 - 1, -(2**63)]


@pytest.mark.parametrize("path", [3, None, b"tinker://run/weights/a"])
def test_a_checkpoint_path_that_is_no_text_is_a_type_error_with_an_example(path: object) -> None:
    with pytest.raises(InvalidTypeError, match=r"tinker_path must be a text such as tinker://"):
        types.ParsedCheckpointTinkerPath.from_tinker_path(path)
