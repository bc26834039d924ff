"""What a worker learns of members that cannot begin or go on, on a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_head import RayHead


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """By a process of its own: a driver takes over the signals of the one that it is in."""
    with RayHead(cpus=2) as cluster:
        command = [sys.executable, "-m", "tests.server.on_ray.member_driver", cluster.address]
        done = subprocess.run(
            [*command, str(tmp_path_factory.mktemp("nothing"))],
            env={**os.environ, **cluster.environment},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        yield json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # Ray prints, too


def test_a_member_without_the_files_of_the_model_says_so_for_good(seen: Any) -> None:
    status, why, is_final = seen["without_files"]["ending"]
    assert seen["without_files"]["begun"]
    assert (status, is_final) == (1, True)
    assert "config.json" in why


def test_members_find_their_leader_at_the_address_of_its_node(seen: Any) -> None:
    assert seen["without_files"]["host"] == seen["without_files"]["address"]


def test_a_member_that_waits_for_room_says_what_it_waits_for(seen: Any) -> None:
    assert "rank 1 of the training group waits for room on the Ray cluster" in seen["without_room"]["told"]
    assert seen["without_room"]["begun"] == [None]
    assert seen["without_room"]["is_unseen"]


def test_a_worker_that_ends_like_its_member_tells_the_status_and_is_gone(seen: Any) -> None:
    assert seen["dying"] == {"status": 3, "is_dying": True, "is_gone": True}
