"""The files of a base model are gone at a start: its models wait for them, and those of others go on."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.end_to_end.scripts import sentence
from tests.end_to_end.serving import KEY, ServerProcess

WELL, HURT = "tiny/model-1", "tiny/model-2"
RESULT_SECONDS = 90.0


def step(model: Any) -> float:
    loss = model.forward_backward([sentence(tinsmith, 1)], "cross_entropy")
    model.optim_step(tinsmith.AdamParams(learning_rate=1e-2)).result(timeout=RESULT_SECONDS)
    return float(loss.result(timeout=RESULT_SECONDS).metrics["loss:sum"])


def test_a_base_model_without_weights_harms_no_other_and_comes_back(tmp_path: Path, models: Mapping[str, Path]) -> None:
    folders = {WELL: models[WELL], HURT: shutil.copytree(models[HURT], tmp_path / "model")}
    weights, elsewhere = folders[HURT] / "model.safetensors", tmp_path / "weights"
    with (
        ServerProcess(tmp_path / "state", folders) as server,
        tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client,
    ):
        well, hurt, unhurt = (client.create_lora_training_client(name, rank=4, seed=1) for name in (WELL, HURT, HURT))
        for model in (well, hurt, unhurt):
            step(model)
        expected = step(unhurt)
        assert server.terminate() == 0
        weights.rename(elsewhere)
        server.start()
        assert "tiny/model-2 is not served, and its models wait: The folder" in server.log()
        step(well)
        corrupted = {run.training_run_id: run.corrupted for run in client.rest.iter_training_runs()}
        assert [corrupted[model.model_id] for model in (well, hurt)] == [False, True]
        with pytest.raises(tinsmith.RequestFailedError, match="'tiny/model-2' is not served here"):
            hurt.forward([sentence(tinsmith, 1)], "cross_entropy").result(timeout=RESULT_SECONDS)
        assert server.terminate() == 0
        elsewhere.rename(weights)
        server.start()
        assert step(hurt) == expected
        assert not any(run.corrupted for run in client.rest.iter_training_runs())
