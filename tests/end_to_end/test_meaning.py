"""The numbers mean what they should: training trains, samples come from what was trained, nobody disturbs anybody."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import RunScript


def test_the_loss_falls(either: RunScript) -> None:
    losses = either("loss_falls")
    assert losses[-1] < losses[0] / 4


def test_every_public_loss_has_the_value_of_its_formula(either: RunScript) -> None:
    """With the model's own log-probabilities as the old ones every ratio is 1, and the formulas become sums."""
    results = either("every_public_loss")
    logprobs = results["cross_entropy"]["outputs"][0]["logprobs"]["data"]
    advantages = [1.0, -0.5, 0.25, 2.0]
    weights = [0.0, 1.0, 0.5, 2.0]
    weighted = sum(weight * logprob for weight, logprob in zip(weights, logprobs, strict=True))
    scored = sum(advantage * logprob for advantage, logprob in zip(advantages, logprobs, strict=True))
    expected = {
        "cross_entropy": -weighted,
        "importance_sampling": -sum(advantages),
        "ppo": -sum(advantages),
        "cispo": -scored,
        "dro": -scored,
        "gspo": -sum(advantages[1:]) - advantages[0],
    }
    losses = {name: result["metrics"]["loss:sum"] for name, result in results.items()}
    assert losses == pytest.approx(expected, rel=1e-4)


def test_gradients_add_up_until_the_step_and_forward_leaves_none(either: RunScript) -> None:
    (apart, together), (loss_apart, loss_together) = either("gradients_add_up")
    assert apart == pytest.approx(together, rel=1e-5)
    assert loss_apart == pytest.approx(loss_together, rel=1e-5)


def test_both_base_models_learn(either: RunScript) -> None:
    for losses in either("two_base_models"):
        assert losses[-1] < losses[0]


def test_training_of_others_makes_no_difference(either: RunScript) -> None:
    alone, together = either("two_owners_at_once")
    for mine, in_company in zip(alone, together, strict=True):
        assert in_company == pytest.approx(mine, rel=1e-5)


def test_sampling_scoring_and_training_agree_on_log_probabilities(either: RunScript) -> None:
    results = either("sample_and_forward")
    assert len(results["sampled"]) == 24
    assert results["sampled"] == pytest.approx(results["forward"], abs=1e-4)
    assert results["scored"] == pytest.approx(results["forward"], abs=1e-4)


def test_seeded_samples_are_the_same_alone_and_in_a_crowd(either: RunScript) -> None:
    alone, in_a_crowd = either("alone_and_in_a_crowd")
    assert in_a_crowd == alone
    assert alone[0] != alone[1]


def test_a_sampler_keeps_its_weights_while_training_goes_on(either: RunScript) -> None:
    before, after, newest = either("samplers_keep_their_weights")
    assert after == before
    assert before[0] == before[1]
    assert newest[1] != before[0][1]


def test_inflight_samplers_of_a_model_have_the_weights_that_were_published_last(either: RunScript) -> None:
    first, after_training, after_snapshot, older, newer, snapshot = either("inflight_samplers")
    assert first == after_training == after_snapshot
    assert older == newer == snapshot != first


def test_every_sampling_option_is_obeyed(either: RunScript) -> None:
    results = either("seeded_sampling")
    plain = results["plain"]["sequences"][0]
    assert len(plain["tokens"]) == len(plain["logprobs"]) == 12
    assert plain["stop_reason"] == "length"
    stopped = results["stop token"]["sequences"][0]
    assert stopped["stop_reason"] == "stop"
    assert stopped["tokens"] == plain["tokens"][: len(stopped["tokens"])]
    assert stopped["tokens"][-1] == plain["tokens"][2]
    assert results["stop text"]["sequences"][0]["stop_reason"] in ("stop", "length")
    assert results["several"]["sequences"][0]["tokens"][:3] == plain["tokens"][:3]
    assert len({tuple(sequence["tokens"]) for sequence in results["several"]["sequences"]}) == 4
    assert len(results["prompt logprobs"]["prompt_logprobs"]) == 3
    assert [len(best) for best in results["best of prompt"]["topk_prompt_logprobs"][1:]] == [2, 2]
    assert results["targets"]["target_prompt_logprobs"]["shape"] == [2, 2]


def test_stop_texts_end_a_sample(either: RunScript) -> None:
    tokens, reasons, texts = either("stop_texts")
    assert reasons == ["stop"] * len(reasons)
    assert all(any(stop in text for stop in ("e", "a", "t")) for text in texts)
    assert all(tokens)


def test_a_prompt_that_fills_the_context_can_be_scored(either: RunScript) -> None:
    assert either("whole_context") == [512, "user"]


def test_a_cancelled_sample_makes_room_for_the_next(either: RunScript) -> None:
    cancelled, is_cancelled, served = either("abandoned_samples")
    assert all(cancelled)
    assert all(is_cancelled)
    assert served == 1


def test_resuming_with_the_optimizer_equals_an_uninterrupted_run(either: RunScript) -> None:
    (uninterrupted, resumed, weights_only), infos = either("resumed_and_uninterrupted")
    assert resumed == uninterrupted
    assert weights_only[1] != pytest.approx(uninterrupted[1], rel=1e-6)
    assert weights_only[0] == 0.0
    assert [info["lora_rank"] for info in infos] == [8, 8]


def test_overwriting_a_checkpoint_must_be_asked_for(either: RunScript) -> None:
    *_, taken = either("save_and_load_again")
    assert taken["category"] == "user"


def test_what_is_published_is_shared_until_it_is_not(either: RunScript) -> None:
    results = either("published")
    mine, theirs = results["shared"]
    assert theirs == mine
    assert all(results[step] != "(no error)" for step in ("before", "deleted", "after"))


def test_a_stranger_cannot_tell_what_exists(either: RunScript) -> None:
    results = either("strangers")
    assert results["real"] == results["made up"]
    assert all(isinstance(outcome, list) for outcome in results["real"]), "each attempt was refused"
    assert not results["listed"]
    assert results["own"]["lora_rank"] == 8


def test_an_external_checkpoint_comes_down_as_adapter_files(either: RunScript) -> None:
    sizes = either("downloads")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= sizes.keys()
    assert all(sizes.values())
