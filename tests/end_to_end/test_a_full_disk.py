"""A server whose disk fills up while it is used: one save waits, others go on, and there is a way out."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

import tinsmith
from tests.end_to_end.scripts import sentence, train
from tests.end_to_end.serving import COMMAND, KEY, OTHER_KEY, ServerProcess, wait_until
from tests.server.small_disk import small_disk

pytestmark = pytest.mark.one_machine("its files lie in a bucket, so its disk does not fill up")

MODEL = "tiny/model-1"
LEFT_BYTES = 4 * 2**20
PARAMS = tinsmith.SamplingParams(max_tokens=4)


def delete(server: ServerProcess, path: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
    command: list[str | Path] = [COMMAND, "checkpoint", "delete", "--yes", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=variables)


def test_a_save_waits_alone_until_checkpoints_are_deleted(tmp_path: Path, models: Mapping[str, Path]) -> None:
    with (
        small_disk(tmp_path / "disk") as disk,
        ServerProcess(disk.folder, {MODEL: models[MODEL]}) as server,
        tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as ann,
        tinsmith.ServiceClient(base_url=server.url, api_key=OTHER_KEY) as bob,
    ):
        mine = ann.create_lora_training_client(MODEL, rank=4, seed=1)
        train(tinsmith, mine, range(3))
        first = mine.save_state("first").result(60).path
        disk.begin()
        os.truncate(disk.ballast, disk.ballast.stat().st_size - LEFT_BYTES)
        second = mine.save_state("second")
        after = mine.forward([sentence(tinsmith, 0)], "cross_entropy")
        wait_until(lambda: "Make room on the disk of" in server.log(), 60, "it did not wait")
        train(tinsmith, bob.create_lora_training_client(MODEL, rank=4, seed=2), range(3))
        prompt = tinsmith.ModelInput.from_ints([1, 2, 3])
        assert bob.create_sampling_client(base_model=MODEL).sample(prompt, 1, PARAMS).result(60).sequences
        assert not second.done()
        disk.begin()  # now there is no room at all
        deleted = delete(server, first)
        assert deleted.returncode == 0, deleted.stderr
        disk.end()
        assert second.result(60).path.endswith("/second")
        after.result(60)
        assert "Rebuilt" not in server.log()
