"""Thousands of samples that wait do not hold up training."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from tests.support.server import FakeServer
from tests.support.training import ADAM, BASE_MODEL, PATIENCE, make_data, open_service
from tinsmith.types import ModelInput, SamplingParams

NUM_SAMPLES = 2000


@pytest.fixture
def many_files() -> Iterator[None]:
    """Client and server share this process, so every waiting sample takes two open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("batch_polls", [False, True])
def test_training_is_submitted_and_finished_while_two_thousand_samples_wait(batch_polls: bool) -> None:
    with (
        FakeServer(flags={"sample_use_retrieve_futures": batch_polls}) as server,
        open_service(server) as service,
    ):
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        server.hold("asample")
        prompt, params = ModelInput.from_ints([1, 2, 3]), SamplingParams(max_tokens=2)
        samples = [sampler.sample(prompt, 1, params) for _ in range(NUM_SAMPLES)]
        server.wait_for("asample", NUM_SAMPLES, timeout=4 * PATIENCE)
        arrived = len(server.requests)
        for _ in range(5):
            client.forward_backward(make_data(), "cross_entropy").result(PATIENCE)
            client.optim_step(ADAM).result(PATIENCE)
        assert not any(sample.done() for sample in samples)
        # What arrived meanwhile is the training and its polls: it did not have to wait for any sample's turn.
        since = [request.endpoint for request in server.requests[arrived:]]
        assert since.count("forward_backward") == since.count("optim_step") == 5
        server.release()
        for sample in samples:
            assert len(sample.result(4 * PATIENCE).sequences) == 1
