"""What happens on a real cluster after the start: nodes that are added, actors that Ray refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_head import RayHead
from tests.support.ray_node import RayNode
from tinsmith.server.suspects import UNSEEN


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By a process of its own: a driver takes over the signals of the one that it is in."""
    state = tmp_path_factory.mktemp("state")
    with RayHead(cpus=2) as head, (state / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.server.on_ray.cluster_driver", head.address, str(state)],
            env={**os.environ, **head.environment},
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "placed\n", (state / "log").read_text()
            with RayNode(head, "127.0.0.2", cpus=2):
                told, _ = driver.communicate("go on\n", timeout=120)
        finally:
            driver.kill()
            driver.wait()
    assert told, (state / "log").read_text()
    return json.loads(next(line for line in told.splitlines() if line.startswith("{")))  # Ray prints, too


def test_a_replica_that_comes_later_does_not_go_where_the_database_is_not(seen: Any) -> None:
    """On a node that joined after the start it would open an empty one, and its samples would wait for ever."""
    assert seen["later"] == {"is_placed": False}


def test_an_actor_that_ray_refuses_ends_alone(seen: Any) -> None:
    assert (seen["taken"]["life"], seen["taken"]["ended"], seen["taken"]["living"]) == (2, UNSEEN, [1, 3, 4])
    assert "Ray did not take its actor: " in seen["taken"]["said"]


def test_weights_are_sent_to_replicas_that_are_there_and_not_to_one_that_waits_for_room(seen: Any) -> None:
    """What is sent to an actor that has not begun stays in Ray's memory until it has."""
    assert seen["num_replicas"] == 1


def test_of_a_worker_that_was_killed_nobody_says_why_but_who_killed_it(seen: Any) -> None:
    """It could not be reached, say, or was not heard of for long: that is what its server tells."""
    assert seen["killed"] == []


def test_a_worker_whose_state_folder_cannot_be_made_on_its_node_says_so_for_good(seen: Any) -> None:
    assert seen["without_state"]["is_final"]
    assert "file/state cannot be used there: [Errno 20] Not a directory" in seen["without_state"]["failed"]
    assert "--state" in seen["without_state"]["failed"]
