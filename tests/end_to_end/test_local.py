"""Local mode with real processes and a tiny model: scripts share a server that comes and goes with them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.server.tiny_models import save_model
from tests.support.hub import NOWHERE, clean_environment
from tests.support.tiny_tokenizer import byte_level_bpe
from tinsmith.server.store import Store
from tinsmith.sharing import RunningServer, SharedFolder

pytestmark = pytest.mark.one_machine("local mode is a server of this machine, whatever others stand on")

END_SECONDS = 120.0

SCRIPT = """
import sys
import tinsmith as tinker

for command in sys.stdin:
    if command == "connect\\n":
        service = tinker.ServiceClient()
        service.get_server_capabilities()
        print("connected", flush=True)
    elif command == "train\\n":
        trainer = service.create_lora_training_client("tiny", rank=2)
        tokens = trainer.get_tokenizer().encode("A tinsmith makes things of tin.")
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        step = trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        sampler = trainer.save_weights_and_get_sampling_client()
        reply = sampler.sample(tinker.ModelInput.from_ints(tokens), 1, tinker.SamplingParams(max_tokens=3))
        print(step.result().metrics["loss:sum"] > 0, len(reply.result().sequences[0].tokens) > 0, flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("models") / "tiny", vocab_size=400)
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    return folder


class Scripts:
    """User processes of one state folder, told by lines what to do."""

    def __init__(self, state: Path, model: Path, stack: ExitStack) -> None:
        self.folder = SharedFolder(state)
        self._stack = stack
        # A proxy for everything and a hub that is not there: neither may be asked.
        self._environment = clean_environment(
            TINKER_BASE_URL="local",
            TINSMITH_STATE=str(state),
            TINSMITH_LOCAL_MODEL=f"tiny={model}",
            HTTP_PROXY=NOWHERE,
            HF_ENDPOINT=NOWHERE,
        )

    def start(self) -> Script:
        return Script(self._stack, self._environment)

    def server(self) -> RunningServer:
        server = self.folder.announced()
        assert server is not None
        return server

    def wait_for_the_servers_end(self) -> None:
        self.folder.server_lock().acquire(timeout=END_SECONDS).lock.release()


class Script:
    def __init__(self, stack: ExitStack, environment: dict[str, str]) -> None:
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self.process.kill)

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line.strip()
        raise AssertionError(self.process.communicate()[1])

    def ask(self, command: str) -> str:
        self.tell(command)
        return self.answer()

    def wait_until_it_shows(self, stage: str) -> None:
        assert self.process.stderr is not None
        assert f"{stage}\n" in iter(self.process.stderr.readline, "")

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(timeout=END_SECONDS) == 0


@pytest.fixture
def scripts(tmp_path: Path, model: Path) -> Iterator[Scripts]:
    with ExitStack() as stack:
        scripts = Scripts(tmp_path, model, stack)
        yield scripts
    # However the test ended, its scripts are gone now, and so is their server soon.
    scripts.wait_for_the_servers_end()


def test_scripts_share_a_server_that_ends_with_the_last_of_them(scripts: Scripts, tmp_path: Path) -> None:
    """Keys that a server of the same folder has given out do not shut its user out."""
    store = Store(f"sqlite:///{tmp_path / 'tinsmith.db'}")
    store.keys.create("ann", "laptop", "")
    store.close()
    first, second = scripts.start(), scripts.start()
    first.tell("connect")
    second.tell("connect")
    assert (first.answer(), second.answer()) == ("connected", "connected")
    server = scripts.server()
    first.leave()
    assert second.ask("train") == "True True"
    assert scripts.server() == server
    assert takes_connections(server)
    second.leave()
    scripts.wait_for_the_servers_end()
    assert not takes_connections(server)


def test_a_killed_server_is_replaced_for_new_clients_and_ends_when_its_users_are_killed(scripts: Scripts) -> None:
    script = scripts.start()
    script.ask("connect")
    killed = scripts.server()
    os.kill(killed.pid, signal.SIGKILL)
    scripts.wait_for_the_servers_end()
    assert script.ask("connect") == "connected"
    server = scripts.server()
    assert server.pid != killed.pid
    script.process.kill()
    scripts.wait_for_the_servers_end()
    assert not takes_connections(server)


def test_a_server_whose_starter_is_killed_serves_the_next_script_or_ends(scripts: Scripts) -> None:
    starter = scripts.start()
    starter.tell("connect")
    starter.wait_until_it_shows("Loading tiny ...")
    starter.process.kill()
    script = scripts.start()
    assert script.ask("connect") == "connected"
    assert script.ask("train") == "True True"


def takes_connections(server: RunningServer) -> bool:
    address = urlsplit(server.url)
    with socket.socket() as probe:
        return probe.connect_ex((address.hostname or "", address.port or 0)) == 0
