"""A forked child has no network threads: it fails at once with the remedy, unless nothing was used before the fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import FakeServer

ROOT = Path(__file__).parents[2]
PRELUDE = """
import asyncio, os, sys, time
import tinsmith
from tinsmith import types
from tinsmith.errors import ForkedProcessError

URL = sys.argv[1]
ADAM = types.AdamParams(learning_rate=1e-3)

def make_client():
    service = tinsmith.ServiceClient(base_url=URL, api_key="tml-x")
    return service, service.create_lora_training_client("tiny/model-1", rank=8)

def refused(function):
    try:
        function()
    except ForkedProcessError as error:
        assert "spawn" in str(error) and "after the fork" in str(error), error
        return True
    return False

def in_child(check):
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            ok = check()
        finally:
            os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run_script(server: FakeServer, body: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + body, server.url]
    done = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "use",
    [
        "client.optim_step(ADAM)",
        "client.get_info()",
        "service.get_server_capabilities()",
        "service.create_lora_training_client('tiny/model-1')",
        "service.close('success').result()",
        "pending.result()",
        "pending.exception()",
        "asyncio.run(pending.result_async())",
        "tinsmith.ServiceClient(base_url=URL, api_key='tml-x')",
    ],
)
def test_what_a_child_inherits_fails_at_once_with_the_remedy(use: str) -> None:
    with FakeServer() as server:
        server.hold("save_weights")
        run_script(
            server,
            f"""
service, client = make_client()
pending = client.save_state("never")
assert in_child(lambda: refused(lambda: {use})) == 0
client.optim_step(ADAM).result()  # the parent is unharmed
pending.cancel()
service.close("success").result()
""",
        )


def test_a_result_that_was_there_before_the_fork_can_be_read_in_the_child() -> None:
    with FakeServer() as server:
        run_script(
            server,
            """
service, client = make_client()
done = client.optim_step(ADAM)
done.result()

async def read():
    return await done

assert in_child(lambda: done.result() is not None and asyncio.run(read()) is not None) == 0
service.close("success").result()
""",
        )


def test_a_child_forked_before_the_first_use_works_and_so_does_its_parent() -> None:
    with FakeServer() as server:
        run_script(
            server,
            """
def train():
    service, client = make_client()
    client.optim_step(ADAM).result()
    service.close("success").result()
    return True

assert [in_child(train) for _ in range(2)] == [0, 0]
assert train()
""",
        )
        assert len(server.received("optim_step")) == 3


def test_a_child_that_ends_in_the_usual_way_does_not_finish_its_parents_session() -> None:
    with FakeServer() as server:
        run_script(
            server,
            """
service, client = make_client()
pid = os.fork()
if pid == 0:
    sys.exit(0)  # runs exit hooks
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
client.optim_step(ADAM).result()
service.close("success").result()
""",
        )
        assert len(server.received("finish")) == 1
