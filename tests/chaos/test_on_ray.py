"""The verdict on Ray sees a process of the cluster that was left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.chaos import on_ray
from tests.chaos.on_ray import KeptCluster

ACTOR = """
import os, ray, sys
class LeftActor:
    def process(self):
        return os.getpid()
ray.init(address=sys.argv[1], log_to_driver=False)
actor = ray.remote(LeftActor).options(num_cpus=1, lifetime="detached", name="left").remote()
print(ray.get(actor.process.remote()))
"""


def test_an_actor_that_outlives_its_driver_is_found_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "_LINGER_SECONDS", 0.5)
    with KeptCluster() as cluster:
        assert cluster.left_actors() == []
        environment = {**os.environ, **cluster.head.environment}
        command = [sys.executable, "-c", ACTOR, cluster.head.address]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        process = int(done.stdout.split()[-1])
        assert cluster.left_actors() == [process]
        monkeypatch.setattr(on_ray, "_LINGER_SECONDS", 30.0)
        os.kill(process, signal.SIGKILL)
        assert cluster.left_actors() == []
