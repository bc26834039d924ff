"""A server whose training is shared by two processes gives what one gives, also when one of them dies.

It does not matter whether each of them has the whole base model, or a shard of its layers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

import tinsmith
from tests.end_to_end.scripts import sentence
from tests.end_to_end.serving import KEY, ServerProcess, wait_until

pytestmark = pytest.mark.one_machine("the members are processes below their worker")

MODEL = "tiny/model-1"
STEPS = range(20)
RESULT_SECONDS = 120.0
# With the default eps the sign of rounding errors would be a full step.
STEP = tinsmith.AdamParams(learning_rate=1e-3, eps=1e-6)


@pytest.fixture(scope="module", params=["never", "always"], ids=["whole", "sharded"])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]
) -> Iterator[ServerProcess]:
    folders = {MODEL: models[MODEL]}
    options = "--train-workers=2", f"--shard-base={request.param}"
    with ServerProcess(tmp_path_factory.mktemp("shared"), folders, *options) as running:
        yield running
        members = members_of(running)
    wait_until(lambda: not any(Path(f"/proc/{member}/cmdline").exists() for member in members), 30, "a member is left")


def members_of(server: ServerProcess) -> list[int]:
    """The ids of the processes that the only worker has started; none while it is itself being started."""
    tasks = [task for worker in server.workers() for task in Path(f"/proc/{worker}/task").iterdir()]
    return [child for task in tasks for child in children_of(task)]


def children_of(task: Path) -> list[int]:
    try:
        return [int(child) for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
        return []


def submit(model: Any) -> list[Any]:
    futures = []
    for step in STEPS:
        data = [sentence(tinsmith, step + place, length=12 + place) for place in range(4)]
        futures.append(model.forward_backward(data, "cross_entropy"))
        model.optim_step(STEP)
    return futures


def new_model(server: ServerProcess) -> Any:
    service = tinsmith.ServiceClient(base_url=server.url, api_key=KEY)
    return service.create_lora_training_client(MODEL, rank=4, seed=1)


def finished(server: ServerProcess, model: Any, futures: list[Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and what came of the weights and of the optimizer."""
    losses = [future.result(timeout=RESULT_SECONDS).metrics["loss:sum"] for future in futures]
    path = model.save_state("end").result(timeout=RESULT_SECONDS).path
    return losses, load(server.downloaded(path)["adapter_model.safetensors"])


def drawing(model: Any) -> list[Any]:
    """What the model says now: several long samples."""
    sampler = model.save_weights_and_get_sampling_client()
    prompt = tinsmith.ModelInput.from_ints([5, 6, 7, 8])
    params = [tinsmith.SamplingParams(max_tokens=100, seed=seed, stop=[]) for seed in range(20)]
    return [sampler.sample(prompt, num_samples=1, sampling_params=each) for each in params]


def drawn(samples: list[Any]) -> list[list[int]]:
    results = [sample.result(timeout=RESULT_SECONDS) for sample in samples]
    return [list(sequence.tokens) for result in results for sequence in result.sequences]


def test_a_member_killed_in_training_costs_only_time(server: ServerProcess, shared: ServerProcess) -> None:
    alone, together = new_model(server), new_model(shared)
    futures = submit(together)
    futures[2].result(timeout=RESULT_SECONDS)
    (killed,) = members_of(shared)
    os.kill(killed, signal.SIGKILL)
    assert not futures[-1].done(), "killed too late to show anything"
    losses, weights = finished(shared, together, futures)
    expected_losses, expected = finished(server, alone, submit(alone))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)
    assert "Rank 1 of the training group is gone: its process ended by signal 9 (SIGKILL)" in shared.log()
    assert f"The worker of {MODEL} is gone: its process ended by signal 9 (SIGKILL)" in shared.log()
    assert killed not in members_of(shared)


def test_a_member_killed_while_the_worker_samples_costs_only_time(server: ServerProcess, shared: ServerProcess) -> None:
    expected, samples = drawing(new_model(server)), drawing(new_model(shared))
    samples[0].result(timeout=RESULT_SECONDS)
    (killed,) = members_of(shared)
    os.kill(killed, signal.SIGKILL)
    assert drawn(samples) == drawn(expected)
    wait_until(lambda: members_of(shared) not in ([], [killed]), RESULT_SECONDS, "the member was not replaced")
    wait_until(lambda: shared.call("GET", "/readyz").status == 200, RESULT_SECONDS, "the group did not come back")
