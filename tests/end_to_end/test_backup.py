"""`tinsmith backup`: a copy taken while a server works is a server of that moment."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import tinsmith
from tests.cli.program import COMMAND
from tests.end_to_end.scripts import sentence
from tests.end_to_end.serving import KEY, ServerProcess

pytestmark = pytest.mark.one_machine("the database and the bucket have all that a copy of the state folder would need")

MODEL = "tiny/model-1"
ADAM = tinsmith.AdamParams(learning_rate=1e-2)
NUM_COPIES = 2


def loss(trainer: tinsmith.TrainingClient) -> float:
    return float(trainer.forward([sentence(tinsmith, 0)], "cross_entropy").result(60).metrics["loss:sum"])


@contextmanager
def at_work(server: ServerProcess) -> Iterator[dict[str, float]]:
    """Somebody trains, saves and deletes all the time. Gives the loss at each state that was saved."""
    losses: dict[str, float] = {}
    done, problems = threading.Event(), []

    def work() -> None:
        try:
            with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client:
                trainer = client.create_lora_training_client(MODEL, rank=4, seed=1)
                while not done.is_set():
                    trainer.forward_backward([sentence(tinsmith, 0)], "cross_entropy")
                    trainer.optim_step(ADAM).result(60)
                    losses[f"state-{len(losses)}"] = loss(trainer)
                    path = trainer.save_state(f"state-{len(losses) - 1}").result(60).path
                    if len(losses) % 4 == 0:
                        client.rest.delete_checkpoint_from_tinker_path(path).result(60)
        except BaseException as error:  # noqa: BLE001 - told by the test
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while len(losses) < 2 and not problems:
            done.wait(0.05)
        yield losses
    finally:
        done.set()
        thread.join(120)
    assert problems == []


def back_up(server: ServerProcess, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "-f", "json", "backup", folder, "--state", server.state, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_copy_taken_while_the_server_works_is_a_server_of_that_moment(
    tmp_path: Path, models: Mapping[str, Path]
) -> None:
    copies = [tmp_path / f"copy-{number}" for number in range(NUM_COPIES)]
    with ServerProcess(tmp_path / "state", {MODEL: models[MODEL]}) as server, at_work(server) as losses:
        told = [back_up(server, copy) for copy in copies]
    for copy, made in zip(copies, told, strict=True):
        assert made.returncode == 0, made.stderr
        with (
            ServerProcess(copy, {MODEL: models[MODEL]}) as restored,
            tinsmith.ServiceClient(base_url=restored.url, api_key=KEY) as client,
        ):
            saved = client.rest.list_user_checkpoints(limit=1000).result(60).checkpoints
            # A save that was accepted at that moment, and not done yet, is done by the copy.
            assert len(saved) >= json.loads(made.stdout)["checkpoints"] > 0
            for checkpoint in saved[:3]:
                trainer = client.create_training_client_from_state_with_optimizer(checkpoint.tinker_path)
                assert loss(trainer) == pytest.approx(losses[checkpoint.checkpoint_id.partition("/")[2]], rel=1e-5)


def test_a_copy_goes_to_no_place_where_it_would_do_harm(tmp_path: Path, server: ServerProcess) -> None:
    inside = back_up(server, server.state / "copy")
    assert (inside.returncode, inside.stdout) == (1, "")
    assert "lies within" in inside.stderr
    assert back_up(server, tmp_path / "copy").returncode == 0
    again = back_up(server, tmp_path / "copy")
    assert again.returncode == 1
    assert "--force" in again.stderr
    assert back_up(server, tmp_path / "copy", "--force").returncode == 0
    assert (tmp_path / "copy" / "database-id").read_text() == (server.state / "database-id").read_text()
    command = [COMMAND, "backup", tmp_path / "other", "--state", tmp_path / "nothing"]
    nowhere = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert nowhere.returncode == 1
    assert "holds no tinsmith.db" in nowhere.stderr
