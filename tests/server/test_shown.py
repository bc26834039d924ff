"""What of an operation is kept for people to look at."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest

from tinsmith.server import shown
from tinsmith.server.engine.batch import TrainRow
from tinsmith.server.engine.train import RowOutput
from tinsmith.server.shown import ShownSamples, stepped, trained_on
from tinsmith.server.store.records import Job
from tinsmith.types import OptimStepResponse, SampledSequence, SampleResponse


def row(**inputs: list[float]) -> TrainRow:
    arrays = {name: np.array(values) for name, values in inputs.items()}
    return TrainRow(adapter=None, tokens=np.arange(4), loss="any", inputs=arrays)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        ([row(weights=[0.0, 1.0, 1.0, 1.0])], 3.0),
        ([row(weights=[0.5, 0.5, 0.0, 0.0]), row(weights=[1.0, 1.0, 1.0, 1.0])], 5.0),
        ([row(weights=[-2.0, 1.0, 0.0, 0.0])], 3.0),
        ([row(logprobs=[-1.0] * 4, advantages=[0.0, 0.0, -1.0, 3.0])], 2.0),
        ([row(mine=[1.0] * 4), row(mine=[1.0] * 4)], 2.0),
    ],
    ids=["masked", "fractions", "negative", "advantages", "custom"],
)
def test_a_loss_is_divided_by_what_its_targets_count_for(rows: list[TrainRow], weight: float) -> None:
    found = trained_on(rows, [RowOutput(loss=1.5) for _ in rows])
    assert (found.loss, found.weight, found.tokens) == (1.5 * len(rows), weight, 4 * len(rows))


def job(kind: Any, body: Any, owner: str = "ann") -> Job:
    return Job(
        request_id="m:1",
        kind=kind,
        owner=owner,
        session_id="s",
        base_model="tiny",
        model_id=None,
        sampler_id=None,
        seq_id=1,
        size=1,
        payload=msgspec.json.encode(body),
        created=datetime(2030, 1, 1, tzinfo=UTC),
        attempts=0,
    )


def test_a_step_has_its_learning_rate_and_what_the_engine_says() -> None:
    asked = job("optim_step", {"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": 0.5}})
    assert stepped(asked, OptimStepResponse(metrics={"grad_norm": 2.0})).metrics == {
        "learning_rate": 0.5,
        "grad_norm": 2.0,
    }


def sample_job(owner: str = "ann", **more: Any) -> Job:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 6000}]}
    return job("sample", {"prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 9}, **more}, owner)


RESPONSE = SampleResponse(
    sequences=[SampledSequence(stop_reason="stop", tokens_np=np.ones(6000, dtype=np.int32)) for _ in range(6)]
)


def test_long_texts_and_many_completions_are_cut() -> None:
    found = ShownSamples().of(sample_job(), RESPONSE)
    assert found is not None
    assert len(found.prompt) == shown.LONGEST
    assert [len(one.tokens) for one in found.completions] == shown.COMPLETIONS * [shown.LONGEST]
    assert "1, 1" not in repr(found), "prompts belong in no log"


def test_what_was_asked_for_log_probabilities_alone_is_not_shown() -> None:
    asked = sample_job(prompt_logprobs=True, sampling_params={"max_tokens": 1})
    assert ShownSamples().of(asked, RESPONSE) is None


def test_no_more_samples_are_shown_than_anybody_reads() -> None:
    now = 100.0
    samples = ShownSamples(lambda: now)

    def count(owner: str) -> int:
        return sum(samples.of(sample_job(owner), RESPONSE) is not None for _ in range(10))

    assert [count(owner) for owner in "abcde"] == [5, 5, 5, 5, 0]
    now = 101.0
    assert count("e") == 5
