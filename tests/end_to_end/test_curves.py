"""The curves of a training loop: every step once, whatever dies meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.end_to_end.scripts import sentence
from tests.end_to_end.serving import KEY, OTHER_KEY, ServerProcess

MODEL = "tiny/model-1"
STEPS = 30
RESULT_SECONDS = 90.0


@pytest.fixture(scope="module")
def frail(tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]) -> Iterator[ServerProcess]:
    """A server of our own to hurt."""
    with ServerProcess(tmp_path_factory.mktemp("curves"), {MODEL: models[MODEL]}) as running:
        yield running


def train(model: Any, steps: range) -> list[Any]:
    """Two data operations for each step, all submitted at once."""
    futures = []
    for step in steps:
        futures += [model.forward_backward([sentence(tinsmith, 2 * step + half)], "cross_entropy") for half in (0, 1)]
        model.optim_step(tinsmith.AdamParams(learning_rate=1e-3 * (1 + step)))
        model.log_metrics({"reward": step / 2}, step)
    return futures


def means(futures: list[Any]) -> list[float]:
    """Of the two data operations of each step, by token: that is what the curve has."""
    losses = [future.result(timeout=RESULT_SECONDS).metrics["loss:sum"] for future in futures]
    weights = [sum(sentence(tinsmith, number).loss_fn_inputs["weights"].to_numpy()) for number in range(len(futures))]
    return [
        (losses[place] + losses[place + 1]) / (weights[place] + weights[place + 1])
        for place in range(0, len(losses), 2)
    ]


def curve(server: ServerProcess, model: Any, name: str) -> list[tuple[int, float]]:
    found = server.call("GET", f"/dashboard/api/runs/{model.model_id}/points?name={name}").json()
    return [(step, value) for step, _, value in found["points"]]


def curves(server: ServerProcess, model: Any) -> dict[str, list[tuple[int, float]]]:
    names = server.call("GET", f"/dashboard/api/runs/{model.model_id}/series").json()["names"]
    return {name: curve(server, model, name) for name in names}


def test_curves_have_each_step_once_though_the_worker_dies_and_outlive_the_server(frail: ServerProcess) -> None:
    with tinsmith.ServiceClient(base_url=frail.url, api_key=KEY) as client:
        model = client.create_lora_training_client(MODEL, rank=4, seed=1)
        futures = train(model, range(STEPS))
        futures[4].result(timeout=RESULT_SECONDS)
        frail.kill_worker()
        assert not futures[-1].done(), "killed too late to show anything"
        expected = means(futures)
        model.log_metrics({"reward": 99.0}, STEPS).result(timeout=RESULT_SECONDS)
        model.save_state("end").result(timeout=RESULT_SECONDS)  # the last step is done when this is
        before = curves(frail, model)
        assert before.keys() == {
            "loss",
            "tokens",
            "tokens_per_second",
            "learning_rate",
            "grad_norm",
            "client/reward",
        }
        assert [value for _, value in before["loss"]] == pytest.approx(expected, rel=1e-4)
        for name in ("loss", "tokens", "learning_rate", "grad_norm"):
            assert [step for step, _ in before[name]] == list(range(STEPS)), name
        assert [value for _, value in before["learning_rate"]] == pytest.approx(
            [1e-3 * (1 + step) for step in range(STEPS)]
        )
        assert before["client/reward"] == [*((step, step / 2) for step in range(STEPS)), (STEPS, 99.0)]
        assert all(rate > 0 for _, rate in before["tokens_per_second"])
        frail.kill()
        frail.start()
        assert curves(frail, model) == before
        model.forward_backward([sentence(tinsmith, 0)], "cross_entropy")
        model.optim_step(tinsmith.AdamParams()).result(timeout=RESULT_SECONDS)
        after = curve(frail, model, "loss")
        assert (after[:-1], after[-1][0]) == (before["loss"], STEPS)
        (run,) = frail.call("GET", "/dashboard/api/runs").json()["runs"]
        assert (run["run_id"], run["steps"]) == (model.model_id, STEPS + 1)
        assert run["last"]["loss"] == after[-1][1]
        assert frail.call("GET", "/dashboard/api/runs", key=OTHER_KEY).json() == {"total": 0, "runs": []}


def test_samples_are_shown_as_text_with_the_run_they_come_from(frail: ServerProcess) -> None:
    with tinsmith.ServiceClient(base_url=frail.url, api_key=KEY) as client:
        model = client.create_lora_training_client(MODEL, rank=4, seed=1)
        sampler = model.save_weights_and_get_sampling_client()
        tokenizer = model.get_tokenizer()
        prompt = tokenizer.encode("<script>alert(1)</script>")
        params = tinsmith.SamplingParams(max_tokens=5, seed=1, stop=[])
        drawn = sampler.sample(tinsmith.ModelInput.from_ints(prompt), 2, params).result(timeout=RESULT_SECONDS)
        sampler.compute_logprobs(tinsmith.ModelInput.from_ints(prompt)).result(timeout=RESULT_SECONDS)
        (shown,) = frail.call("GET", f"/dashboard/api/samples?run_id={model.model_id}").json()["samples"]
        assert shown["prompt"] == "<script>alert(1)</script>"
        assert [(one["text"], one["tokens"], one["stop_reason"]) for one in shown["completions"]] == [
            (tokenizer.decode(one.tokens, skip_special_tokens=False), 5, "length") for one in drawn.sequences
        ]
        assert (shown["run_id"], shown["base_model"]) == (model.model_id, MODEL)


def test_the_overview_tells_how_busy_the_workers_are(frail: ServerProcess) -> None:
    (model,) = frail.call("GET", "/dashboard/api/overview").json()["models"]
    assert (model["name"], model["is_ready"], model["problem"]) == (MODEL, True, None)
    assert model["kv_used_share"] is not None
