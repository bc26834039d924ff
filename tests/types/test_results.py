"""What comes back: samples, failures, and results that do not change by being read."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith import types
from tinsmith.errors import InvalidInputError

TOKENS = np.array([5, 6], dtype=np.int32)
LOGPROBS = np.array([-0.5, -1.5], dtype=np.float32)
TOPK = types.TopkLogprobs.from_lists([[(5, -0.5), (7, -2.0)], None])


def test_lists_are_made_from_arrays_on_first_use_and_stay_the_same() -> None:
    sequence = types.SampledSequence("stop", "id", TOKENS, LOGPROBS, TOPK)
    assert (sequence.tokens, sequence.logprobs) == ([5, 6], [-0.5, -1.5])
    assert sequence.topk_logprobs == [[(5, -0.5), (7, -2.0)], None]
    assert sequence.tokens is sequence.tokens


def test_a_sample_without_anything_is_empty() -> None:
    sequence = types.SampledSequence("length", "id")
    assert (sequence.tokens, sequence.logprobs, sequence.topk_logprobs) == ([], None, None)


def test_prompt_logprobs_are_none_where_nothing_was_computed() -> None:
    response = types.SampleResponse([], np.array([np.nan, -1.5], dtype=np.float32))
    assert response.prompt_logprobs == [None, -1.5]
    assert types.SampleResponse([]).prompt_logprobs is None
    assert types.SampleResponse([]).topk_prompt_logprobs is None


def test_samples_are_compared_by_content() -> None:
    def sample(last: int) -> types.SampleResponse:
        sequence = types.SampledSequence("stop", "id", np.array([5, last]), LOGPROBS.copy(), TOPK)
        return types.SampleResponse([sequence], np.array([np.nan, -1.5]))

    assert sample(6) == sample(6)
    assert sample(6) != sample(7)


def test_arrays_read_from_json_cannot_be_changed() -> None:
    body = {
        "sequences": [{"stop_reason": "stop", "tokens": [5, 6], "logprobs": [-0.5, -1.5]}],
        "prompt_logprobs": [None],
    }
    response = types.SampleResponse.from_builtins(body)
    for array in (response.prompt_logprobs_np, response.sequences[0].tokens_np, response.sequences[0].logprobs_np):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_an_unknown_stop_reason_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"must be one of 'length', 'stop'.*'eos'"):
        types.SampledSequence.from_builtins({"stop_reason": "eos", "tokens": []})


@pytest.mark.parametrize(
    ("raw", "category"),
    [("user", "User"), ("User", "User"), ("SERVER", "Server"), ("unknown", "Unknown"), ("Unknown", "Unknown")],
)
def test_an_error_category_is_read_in_any_case(raw: str, category: str) -> None:
    failure = types.RequestFailedResponse.from_builtins({"error": "no", "category": raw})
    assert failure.category is types.RequestErrorCategory[category]
    assert not failure.extra


@pytest.mark.parametrize("raw", ["transient", "", 5, {"a": 1}])
def test_a_category_that_is_new_is_unknown_and_kept_as_it_came(raw: object) -> None:
    failure = types.RequestFailedResponse.from_builtins({"error": "no", "category": raw})
    assert failure.category is types.RequestErrorCategory.Unknown
    assert failure.extra == {"category": raw}


@pytest.mark.parametrize("body", [{"error": "no"}, {"error": "no", "category": None}])
def test_a_failure_without_category_is_unknown(body: dict) -> None:
    assert types.RequestFailedResponse.from_builtins(body) == types.RequestFailedResponse(error="no")


def test_a_try_again_with_a_state_of_the_future_is_read() -> None:
    again = types.TryAgainResponse.from_builtins({"type": "try_again", "queue_state": "paused_eclipse"})
    assert (again.queue_state, again.queue_state_reason) == ("paused_eclipse", None)


def test_an_optimizer_of_the_future_is_read_and_sent_as_it_came() -> None:
    config = {"type": "lion", "version": 3, "betas": [0.9, 0.99]}
    info = types.WeightsInfoResponse.from_builtins({"base_model": "b", "is_lora": True, "optimizer_config": config})
    assert isinstance(info.optimizer_config, types.OtherOptimizerConfig)
    request = types.CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="b", optimizer_config=info.optimizer_config
    )
    assert request.to_builtins()["optimizer_config"] == config


def test_optimizer_settings_are_written_under_the_name_of_their_family() -> None:
    adam = types.OptimStepRequest(optim_params=types.AdamParams(), model_id="m").to_builtins()
    dimuon = types.OptimStepRequest(optim_params=types.DimuonParams(learning_rate=1), model_id="m").to_builtins()
    assert adam["adam_params"].keys() == {"learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"}
    assert dimuon["optimizer_params"]["type"] == "dimuon"
    assert not {"optim_params", "optimizer_params"} & adam.keys()
    assert not {"optim_params", "adam_params"} & dimuon.keys()


@pytest.mark.parametrize("name", ["optim_params", "adam_params", "optimizer_params"])
def test_optimizer_settings_are_read_under_all_three_names(name: str) -> None:
    expected = types.OptimStepRequest(optim_params=types.AdamParams(beta1=0.5), model_id="m")
    assert types.OptimStepRequest(**{name: types.AdamParams(beta1=0.5)}, model_id="m") == expected
    assert types.OptimStepRequest.from_builtins({name: {"beta1": 0.5}, "model_id": "m"}) == expected
