"""A script that just ends keeps its exit code, whatever was going on, and says nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.server import FakeServer, Hang

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, threading
import tinsmith
from tinsmith import types
service = tinsmith.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
client = service.create_lora_training_client("tiny/model-1", rank=8)
sampler = service.create_sampling_client(base_model="tiny/model-1")
prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=2)
samples = [sampler.sample(prompt, 1, params) for _ in range(20)]
steps = [client.optim_step(types.AdamParams()) for _ in range(20)]
threading.Thread(target=lambda: samples[-1].exception(), daemon=True).start()
steps[0].result()
sys.exit(3)
"""


def start(server: FakeServer, script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, server.url]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_work_that_is_under_way_does_not_disturb_the_exit() -> None:
    with FakeServer() as server:
        server.hold("asample")
        for _ in range(3):
            scripts = [start(server, SCRIPT) for _ in range(4)]
            for script in scripts:
                _, complaint = script.communicate(timeout=60)
                assert (script.returncode, complaint) == (3, "")


def test_clients_that_are_still_being_made_do_not_disturb_the_exit() -> None:
    body = """
import sys
import tinsmith
from tinsmith import types
service = tinsmith.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
client = service.create_lora_training_client("tiny/model-1", rank=8)
samplers = [service.create_sampling_client(base_model="tiny/model-1"), client.save_weights_and_get_sampling_client()]
prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=2)
waiting = [sampler.sample(prompt, 1, params) for sampler in samplers]
waiting.append(client.optim_step(types.AdamParams()))
service.get_server_capabilities()
sys.exit(3)
"""
    with FakeServer() as server:
        server.hold("create_model")
        server.script("create_sampling_session", Hang(), times=None)
        scripts = [start(server, body) for _ in range(4)]
        for script in scripts:
            _, complaint = script.communicate(timeout=60)
            assert (script.returncode, complaint) == (3, "")


def test_a_client_used_by_a_late_exit_hook_fails_at_once() -> None:
    early = """
import atexit, sys

def late():
    try:
        client.get_server_capabilities()
    except tinsmith.errors.ClientClosedError as error:
        print(error, file=sys.stderr)

atexit.register(late)  # before the import, so it runs after Tinsmith's own
import tinsmith, tinsmith.errors
client = tinsmith.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
client.get_server_capabilities()
"""
    with FakeServer() as server:
        script = start(server, early)
        _, complaint = script.communicate(timeout=60)
    assert (script.returncode, complaint.strip()) == (
        0,
        "The interpreter is exiting, so nothing can be sent any more.",
    )
