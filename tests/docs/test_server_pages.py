"""The pages about running a server, followed to the letter on a real one with a tiny model."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks
from tests.docs.shell import run_shell
from tests.server.api.running import RunningServer
from tests.server.postgres import Postgres, _find_programs
from tests.server.tiny_models import save_model
from tests.support.tiny_tokenizer import byte_level_bpe

NAME = "Qwen/Qwen3-0.6B"

PRELUDE = """
systemctl() { "$1"; }
sudo() { "$@"; }
tinsmith() { if [ "$1" = serve ]; then start; until_ready; else command tinsmith "$@"; fi; }
start() {
    : > ready  # at once: what the last server said must not count for this one
    command tinsmith serve --model "$NAME" --state "$STATE" --port "$PORT" --dtype float32 \
        --database "${DATABASE:-}" > ready 2>> log &
    SERVER=$!
}
until_ready() { until grep -q 'is ready' ready; do kill -0 $SERVER || { cat log >&2; exit 1; }; sleep 0.1; done; }
stop() { kill $SERVER; wait $SERVER; SERVER=; }
SERVER=
trap '[ -z "$SERVER" ] || kill $SERVER' EXIT
"""
"""Stands for systemd, and for the rights to use it."""

CLIENT = f"""
import os, signal, sys, time
from pathlib import Path
import tinsmith as tinker
from tinsmith import types

datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {{"target_tokens": [2, 3, 4], "weights": [1.0] * 3}})
service = tinker.ServiceClient()


def step(trainer):
    loss = trainer.forward_backward([datum], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result(120)
    return loss.result(120).metrics["loss:sum"]


def save():
    trainer = service.create_lora_training_client("{NAME}", rank=4)
    step(trainer)
    print(trainer.save_state("kept").result().path)


def go_on(path):
    print(step(service.create_training_client_from_state_with_optimizer(path)))


def leave_without_a_word():
    trainer = service.create_lora_training_client("{NAME}", rank=4)
    data = [trainer.forward_backward([datum] * 20, "cross_entropy") for _ in range(5)]
    saved = trainer.save_state("after-all")
    while saved.request_id is None:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def work_through_a_restart():
    trainer = service.create_lora_training_client("{NAME}", rank=4)
    losses = [step(trainer)]
    Path("at-work").touch()
    while not Path("restarted").exists():
        losses.append(step(trainer))
        time.sleep(0.05)
    print(*losses, step(trainer))


globals()[sys.argv[1]](*sys.argv[2:])
service.close("success").result()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_level_bpe()
    folder = save_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture
def env(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """A home of its own; whatever the shell leaves behind is below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "backup").mkdir()
    (tmp_path / NAME).parent.mkdir()
    (tmp_path / NAME).symlink_to(model)  # a folder of this name is taken for the model, whatever the hub has
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    state = tmp_path / ".tinsmith"
    return {
        "HOME": str(tmp_path), "NAME": NAME, "STATE": str(state), "PORT": port,
        "TINKER_BASE_URL": f"http://127.0.0.1:{port}", "TINKER_API_KEY": "tml-docs", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def shown(page: str, env: Mapping[str, str]) -> list[str]:
    """The shell blocks of a page, with its places in our folder."""
    places = {
        "/var/lib/tinsmith": env["STATE"],
        "/backup/": f"{env['HOME']}/backup/",
        "http://127.0.0.1:8000": env["TINKER_BASE_URL"],
        "--owner tinsmith --group tinsmith ": "",
        "/opt/tinsmith/bin/pip": "true",
        "sudo -u tinsmith /opt/tinsmith/bin/tinsmith backup": "tinsmith > copied backup",
    }
    texts = blocks(DOCS / "how-to" / page, "bash")
    for place, ours in places.items():
        texts = [text.replace(place, ours) for text in texts]
    return texts


# Keys


def test_the_page_about_keys_can_be_followed(env: Mapping[str, str]) -> None:
    make, serve, share, change = shown("api-keys-and-tenancy.md", env)
    bens_try = 'TINKER_API_KEY=$BEN tinsmith sample --checkpoint "$CHECKPOINT" x'
    out = run_shell(
        [
            PRELUDE,
            make,
            serve,
            'CHECKPOINT=$(TINKER_API_KEY=$ANN python client.py save); echo "path $CHECKPOINT"',
            f"if {bens_try}; then exit 9; fi",
            share,
            f"if {bens_try}; then exit 9; fi",
            change,
            "for _ in $(seq 100); do TINKER_API_KEY=$ANN tinsmith run list || break; sleep 0.2; done",
            "if TINKER_API_KEY=$ANN tinsmith run list; then exit 9; fi",
            "stop; echo stopped",
        ],
        env,
    )
    assert "until May" in out
    path = next(line for line in out.splitlines() if line.startswith("path "))
    assert path.removeprefix("path ").startswith("tinker://")
    assert out.endswith("stopped\n")


def test_a_key_from_the_command_line_is_good_until_it_is_revoked(tmp_path: Path) -> None:
    """As the page says; this is easily taken to be otherwise."""
    with RunningServer(tmp_path, api_keys=("tml-chosen",)):
        pass
    with RunningServer(tmp_path) as server:
        assert server.get("sessions", key="tml-chosen").status == 200
        assert server.get("sessions", key="tml-other").status == 401
        server.store.keys.revoke(server.store.keys.all()[0].key_id)
    with RunningServer(tmp_path, api_keys=("tml-chosen",)) as server:
        assert server.get("sessions", key="tml-chosen").status == 401


# Training


def test_the_page_about_training_can_be_followed(env: Mapping[str, str]) -> None:
    prepare, data, train, talk, export = shown("train-from-the-command-line.md", env)
    found = "$(sed -n 's/^{} *//p' trained)".format
    run_shell(
        [
            PRELUDE,
            "pip() { :; }",
            "start; until_ready",
            prepare.replace("TINKER_BASE_URL=local ", "TINKER_BASE_URL=$TINKER_BASE_URL "),
            data,
            train.replace("\n", " > trained\n"),
            f"SAMPLER_WEIGHTS={found('Sampler weights')}; TRAINING_STATE={found('Training state')}",
            talk,
            export,
            "stop",
        ],
        env,
    )
    made = Path("pirate-adapter/adapter_config.json"), Path("pirate-model/model.safetensors")
    assert all(file.is_file() for file in made)
    losses = [json.loads(line).get("loss") for line in Path("pirate-sft/metrics.jsonl").read_text().splitlines()]
    known = [loss for loss in losses if loss is not None]
    assert len(known) == 16
    assert known[-1] < known[0]


# Backup


def test_a_backup_of_sqlite_is_restored_and_clients_go_on_meanwhile(env: Mapping[str, str]) -> None:
    """One client works through the pause. Another was killed before it: what it had sent is done all the same."""
    copy, backup, _, restore_copy, restore, _, _ = shown("back-up-and-upgrade.md", env)
    out = run_shell(
        [
            PRELUDE,
            "start; CHECKPOINT=$(python client.py save); EXPECTED=$(python client.py go_on $CHECKPOINT)",
            "python client.py work_through_a_restart > losses & CLIENT=$!",
            "python client.py leave_without_a_word || true",
            "until [ -e at-work ]; do sleep 0.05; done",
            backup,
            "touch restarted; wait $CLIENT; cat losses",
            "for _ in $(seq 100); do tinsmith checkpoint list | grep after-all && break; sleep 0.1; done",
            "tinsmith checkpoint delete $CHECKPOINT --yes > deleted",
            restore,
            '[ "$(python client.py go_on $CHECKPOINT)" = "$EXPECTED" ]',
            copy,
            "rm -r $STATE.old; tinsmith checkpoint delete $CHECKPOINT --yes > deleted",
            restore_copy,
            '[ "$(python client.py go_on $CHECKPOINT)" = "$EXPECTED" ]',
            "stop",
        ],
        env,
    )
    losses, saved = out.splitlines()
    values = [float(value) for value in losses.split()]
    assert len(values) > 2
    assert values == sorted(values, reverse=True)
    assert "weights/after-all" in saved


@pytest.fixture
def database() -> Iterator[str]:
    with Postgres() as postgres:
        yield postgres.new_database()


def test_a_backup_of_postgresql_is_restored(env: Mapping[str, str], database: str) -> None:
    _, _, backup, _, restore, restore_database, _ = shown("back-up-and-upgrade.md", env)
    *before_start, start = restore.splitlines()
    run_shell(
        [
            PRELUDE,
            f"PATH=$PATH:{_find_programs()}",
            "start; CHECKPOINT=$(python client.py save)",
            backup,
            "until_ready; psql --quiet --command 'DELETE FROM checkpoints' \"$DATABASE\"",
            *before_start,
            restore_database,
            start,
            "python client.py go_on $CHECKPOINT",
            "stop",
        ],
        {**env, "DATABASE": database},
    )
