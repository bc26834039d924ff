"""A state folder that an earlier release wrote opens in this one, and everything in it is there.

`states/` holds one for each form of the database that a server has been run with: a run of rank 4 and seed 1 on
`tiny/model-1`, trained for two steps on sentence 0 and then saved, both to be trained on and to be sampled, as `kept`.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import tinsmith
from tests.end_to_end.scripts import sentence
from tests.end_to_end.serving import KEY, ServerProcess

pytestmark = pytest.mark.one_machine("earlier releases wrote these folders on one machine")

MODEL = "tiny/model-1"
STATES = sorted(Path(__file__).with_name("states").glob("*.tar.gz"))


@pytest.mark.parametrize("archive", STATES, ids=lambda archive: archive.name)
def test_the_state_of_an_earlier_release_goes_on(archive: Path, tmp_path: Path, models: Mapping[str, Path]) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    with (
        ServerProcess(tmp_path, {MODEL: models[MODEL]}) as server,
        tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client,
    ):
        (run,) = client.rest.iter_training_runs()
        assert (run.base_model, run.lora_rank) == (MODEL, 4)
        saved = {
            each.checkpoint_type: each
            for each in client.rest.list_checkpoints(run.training_run_id).result().checkpoints
        }
        trainer = client.create_training_client_from_state_with_optimizer(saved["training"].tinker_path)
        trained = trainer.forward([sentence(tinsmith, 0)], "cross_entropy").result(60)
        untrained = client.create_lora_training_client(MODEL, rank=4, seed=1)
        before = untrained.forward([sentence(tinsmith, 0)], "cross_entropy").result(60)
        assert trained.metrics["loss:sum"] < before.metrics["loss:sum"], "what it had learned is there"
        trainer.forward_backward([sentence(tinsmith, 0)], "cross_entropy")
        trainer.optim_step(tinsmith.AdamParams(learning_rate=1e-2)).result(60)
        sampler = client.create_sampling_client(saved["sampler"].tinker_path)
        prompt = tinsmith.ModelInput.from_ints([1, 2, 3])
        assert sampler.sample(prompt, 1, tinsmith.SamplingParams(max_tokens=4)).result(60).sequences
