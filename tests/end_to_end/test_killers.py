"""Jobs that kill the worker they run in: each fails after a few tries, and nobody else notices more than a delay."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.end_to_end.scripts import sentence
from tests.end_to_end.serving import KEY, OTHER_KEY, ServerProcess
from tests.server.fragile_worker import CRASHES, EXITS, HANGS_ONCE, HUNG
from tinsmith.errors import RequestFailedError
from tinsmith.types import RequestErrorCategory

MODEL = "tiny/model-1"
RESULT_SECONDS = 120.0
NO_STEP = tinsmith.AdamParams(learning_rate=0.0)


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]) -> Iterator[ServerProcess]:
    command = (sys.executable, "-m", "tests.end_to_end.fragile")
    with ServerProcess(tmp_path_factory.mktemp("fragile"), {MODEL: models[MODEL]}, command=command) as running:
        yield running


@pytest.fixture
def ann(fragile: ServerProcess) -> Iterator[tinsmith.ServiceClient]:
    with tinsmith.ServiceClient(base_url=fragile.url, api_key=KEY) as opened:
        yield opened


@pytest.fixture
def bob(fragile: ServerProcess) -> Iterator[tinsmith.ServiceClient]:
    with tinsmith.ServiceClient(base_url=fragile.url, api_key=OTHER_KEY) as opened:
        yield opened


def deadly(token: int) -> tinsmith.Datum:
    inputs = {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
    return tinsmith.Datum(tinsmith.ModelInput.from_ints([1, token]), inputs)


def loss(future: Any) -> float:
    return float(future.result(timeout=RESULT_SECONDS).metrics["loss:sum"])


def error_of(future: Any) -> RequestFailedError:
    with pytest.raises(RequestFailedError) as caught:
        future.result(timeout=RESULT_SECONDS)
    return caught.value


def test_training_data_that_kill_their_worker_fail_and_everything_else_goes_on(
    fragile: ServerProcess, ann: tinsmith.ServiceClient, bob: tinsmith.ServiceClient
) -> None:
    """Two killers, so that neither can be told from the other until they are alone."""
    leaver, crasher = (ann.create_lora_training_client(MODEL, rank=4, seed=1) for _ in range(2))
    neighbour = bob.create_lora_training_client(MODEL, rank=4, seed=1)
    sampler = bob.create_sampling_client(base_model=MODEL)
    before = loss(neighbour.forward(data=[sentence(tinsmith, 0)], loss_fn="cross_entropy"))

    doomed = [
        leaver.forward_backward([deadly(EXITS)], "cross_entropy"),
        crasher.forward_backward([deadly(CRASHES)], "cross_entropy"),
    ]
    others = [one.forward_backward([sentence(tinsmith, 0)], "cross_entropy") for one in (leaver, crasher, neighbour)]
    sample = sampler.sample(tinsmith.ModelInput.from_ints([1, 2]), 1, tinsmith.SamplingParams(max_tokens=5))

    for future, how in zip(doomed, ("exit status 7", "SIGSEGV"), strict=True):
        error = error_of(future)
        assert error.category == RequestErrorCategory.Server
        assert fragile.ground.ending(how) in str(error)
        assert "Send less at once" in str(error)
    assert [loss(future) for future in others] == pytest.approx([before] * 3, rel=1e-5)
    assert len(sample.result(timeout=RESULT_SECONDS).sequences[0].tokens) <= 5
    crasher.optim_step(NO_STEP).result(timeout=RESULT_SECONDS)


def test_a_prompt_that_kills_its_worker_fails_and_the_samples_beside_it_are_drawn(
    fragile: ServerProcess, ann: tinsmith.ServiceClient, bob: tinsmith.ServiceClient
) -> None:
    params = tinsmith.SamplingParams(max_tokens=20, seed=3, stop=[])
    innocent = bob.create_sampling_client(base_model=MODEL)
    prompt = tinsmith.ModelInput.from_ints([1, 2, 3])
    expected = innocent.sample(prompt, 2, params).result(timeout=RESULT_SECONDS).sequences
    others = [innocent.sample(prompt, 2, params) for _ in range(20)]
    killer = ann.create_sampling_client(base_model=MODEL, retry_config=tinsmith.RetryConfig(enable_retry_logic=False))
    error = error_of(killer.sample(tinsmith.ModelInput.from_ints([EXITS]), 1, params))
    assert fragile.ground.ending("exit status 7") in str(error)
    for future in others:
        drawn = future.result(timeout=RESULT_SECONDS).sequences
        assert [one.tokens for one in drawn] == [one.tokens for one in expected]


def test_a_worker_that_hangs_is_started_anew_and_goes_on(
    tmp_path: Path, models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HUNG, str(tmp_path / "hung"))
    command = (sys.executable, "-m", "tests.end_to_end.fragile")
    with (
        ServerProcess(tmp_path, {MODEL: models[MODEL]}, "--stall-timeout=8", command=command) as server,
        tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client,
    ):
        trainer = client.create_lora_training_client(MODEL, rank=4, seed=1)
        first = trainer.forward_backward([deadly(HANGS_ONCE)], "cross_entropy")
        again = trainer.forward_backward([deadly(HANGS_ONCE)], "cross_entropy")
        assert loss(first) == loss(again)
        assert (tmp_path / "hung").exists()
        assert "Timeout (0:00:08)!" in server.ground.traces(server), "where it hung is in the log"
