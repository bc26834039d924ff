"""`tinsmith train sft`: the real program, a real server, and what is left after every kind of interruption."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.cli.program import ROOT, InProcess, Program, variables_of
from tests.end_to_end.serving import KEY, ServerProcess, wait_until
from tests.server.tiny_models import save_model
from tests.support.embedded import embedded_folder, session_cache
from tests.support.hub import NOWHERE
from tests.support.server import FakeServer
from tests.support.tiny_tokenizer import CHATML_CONFIG, byte_level_bpe, write_folder

MODEL = "tiny/model-1"
CONTEXT = 128
STEPS = 90
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
WORDS = ("fox", "dog", "tin", "tinker", "tinsmith", "quick", "brown", "lazy")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tokenizer = byte_level_bpe()
    folder = tmp_path_factory.mktemp("models") / MODEL
    folder.mkdir(parents=True)
    save_model(folder, "qwen3", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=CONTEXT)
    write_folder(folder, tokenizer, {"tokenizer_config.json": {**CHATML_CONFIG, "chat_template": TEMPLATE}})
    return {MODEL: folder}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("state"), models) as server:
        yield server


@pytest.fixture
def user(running: ServerProcess, home: Path) -> Program:
    return Program(home, **variables_of(running.url, KEY))


@pytest.fixture
def data(home: Path) -> Path:
    return write_pairs(home / "words.jsonl", 24)


def write_pairs(path: Path, count: int) -> Path:
    pairs = [
        {"prompt": f"{index} {WORDS[index % 8]}?", "completion": f"the {WORDS[index % 8]}"} for index in range(count)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def sft(data: Path, *more: str | Path) -> list[str | Path]:
    return ["train", "sft", data, "--rank", "4", "--learning-rate", "1e-2", "--batch-size", "4", *more]


def long_run(data: Path, output: Path) -> list[str | Path]:
    every = ("--save-every", "10", "--eval-every", "25", "--eval-split", "0.25", "--warmup", "3")
    small = ("--learning-rate", "1e-3")  # or differences of rounding would grow
    return sft(data, "--model", MODEL, "--steps", str(STEPS), "--output", output, *every, *small)


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def saved_step(folder: Path) -> int:
    path = folder / "state.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


# A run from its begin to its end


def test_the_loss_falls_and_the_result_can_be_sampled(user: Program, running: ServerProcess, data: Path) -> None:
    done = user(*sft(data, "--epochs", "5", "--eval-split", "0.25"))
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert lines[0].startswith("23 steps, loss ")
    sampler, state = lines[1].split()[-1], lines[2].split()[-1]
    assert "/sampler_weights/words" in sampler
    (run,) = json.loads(running.call("GET", "/dashboard/api/runs?limit=1").body)["runs"]
    assert run["session_name"] == "words"
    assert "/weights/words-000023" in state
    assert f"  tinsmith chat {sampler}" in lines
    assert any(line.startswith(f"  tinsmith checkpoint export {state} ") for line in lines)
    records = metrics(user.home / "words-sft")
    assert [record["step"] for record in records] == list(range(24))
    assert records[-1]["loss"] < records[1]["loss"] / 2
    assert records[-1]["eval_loss"] < records[0]["eval_loss"]
    assert [record["step"] for record in records if "eval_loss" in record] == [0, 5, 10, 15, 20, 23]
    assert records[1].keys() == {"step", "epoch", "loss", "learning_rate", "tokens", "tokens_per_second", "time"}
    assert (records[1]["learning_rate"], records[-1]["epoch"]) == (1e-2, 5.0)
    assert records[-1]["time"].endswith("Z")
    with tinsmith.ServiceClient(base_url=running.url, api_key=KEY) as client:
        prompt, params = tinsmith.ModelInput.from_ints([5, 6, 7]), tinsmith.SamplingParams(max_tokens=2)
        assert client.create_sampling_client(sampler).sample(prompt, 1, params).result().sequences


def test_json_and_a_second_run_of_what_is_finished(user: Program, running: ServerProcess, data: Path) -> None:
    held_out = write_pairs(user.home / "held out.jsonl", 4)
    command = ["-f", "json", *sft(data, "--steps", "3", "--eval-data", held_out, "--name", "my words", "-o", "run")]
    result = user(*command).json()
    assert result["steps"] == 3
    assert result["sampler_path"].endswith("/sampler_weights/my-words")
    assert result["state_path"].endswith("/weights/my-words-000003")
    records = metrics(user.home / "run")
    assert (result["first_loss"], result["last_loss"]) == (records[1]["loss"], records[3]["loss"])
    assert result["last_eval_loss"] == records[3]["eval_loss"]
    again = user(*command)
    assert again.json() == result
    assert "was finished before. --restart would begin anew." in again.err
    told = user("--base-url", running.url, *command[2:]).out
    assert f"  tinsmith --base-url {running.url} chat {result['sampler_path']}\n" in told
    assert user(*command, "--restart").json()["sampler_path"] != result["sampler_path"]


def test_only_the_latest_state_is_kept(user: Program, data: Path) -> None:
    result = user("-f", "json", *sft(data, "--steps", "6", "--save-every", "2")).json()
    run_id = result["state_path"].split("/")[2]
    listed = user("-f", "json", "checkpoint", "list", "--run-id", run_id).json()["checkpoints"]
    assert {each["tinker_path"] for each in listed} == {result["state_path"], result["sampler_path"]}


@pytest.mark.parametrize(
    ("stem", "name"), [("_train", "train"), ("数据", "sft"), (125 * "x", 121 * "x")], ids=["mark", "letters", "length"]
)
def test_a_file_whose_name_cannot_name_a_checkpoint_is_trained_all_the_same(
    user: Program, home: Path, stem: str, name: str
) -> None:
    data = write_pairs(home / f"{stem}.jsonl", 4)
    result = user("-f", "json", *sft(data, "--steps", "1")).json()
    assert result["sampler_path"].endswith(f"/sampler_weights/{name}")
    assert result["state_path"].endswith(f"/weights/{name}-000001")


def test_a_person_sees_a_bar_with_the_loss(user: Program, data: Path) -> None:
    with user.at_a_terminal(*sft(data, "--steps", "4")) as terminal:
        terminal.wait_for("tokens/s")
        done = terminal.end()
    assert done.code == 0
    assert "Step 1 of" not in done.err
    assert done.out.startswith("4 steps, loss ")


def test_conversations_of_several_turns_are_trained(user: Program, home: Path) -> None:
    turns = [{"role": role, "content": f"{role} the fox {n}"} for n in range(2) for role in ("user", "assistant")]
    (home / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    assert user("-f", "json", *sft(home / "chats.jsonl", "--steps", "2")).json()["steps"] == 2


# Interruptions


@pytest.fixture(scope="module")
def undisturbed(running: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of a run that nothing happened to."""
    home = tmp_path_factory.mktemp("undisturbed")
    user = Program(home, **variables_of(running.url, KEY))
    done = user(*long_run(write_pairs(home / "words.jsonl", 24), home / "run"))
    assert done.code == 0, done
    return metrics(home / "run")


def check_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float = 1e-4) -> None:
    assert [record["step"] for record in found] == [record["step"] for record in wanted]
    for name in ("loss", "eval_loss", "learning_rate", "epoch", "tokens"):
        assert [record.get(name) for record in found] == [
            value if value is None else pytest.approx(value, rel=tolerance)
            for value in (each.get(name) for each in wanted)
        ]


def interrupted(
    user: Program, command: list[str | Path], is_time: Callable[[], bool], number: signal.Signals
) -> tuple[int, str]:
    with user.start(*command) as process:
        try:
            wait_until(lambda: is_time() or process.poll() is not None, 60, "it does not train")
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert out == ""
    return process.returncode, err


def test_after_ctrl_c_the_same_command_goes_on_as_if_nothing_had_happened(
    user: Program, data: Path, undisturbed: list[dict[str, Any]]
) -> None:
    folder = user.home / "run"
    command = long_run(data, folder)
    code, err = interrupted(user, command, lambda: len(metrics(folder)) > 14, signal.SIGINT)
    assert code == 130, err
    step = saved_step(folder)
    assert 14 <= step < STEPS
    assert metrics(folder)[-1]["step"] == step, "what was trained is saved"
    assert "Stopping after the steps that are on their way." in err
    assert f"Step {step} is saved; the same command goes on from there.\n" in err
    assert err.endswith("Interrupted.\n")
    done = user(*command)
    assert done.code == 0, done
    assert f"Going on after step {step}, from tinker://" in done.err
    check_same(metrics(folder), undisturbed)


def test_after_a_kill_it_goes_on_from_the_last_saved_state(
    user: Program, data: Path, undisturbed: list[dict[str, Any]]
) -> None:
    folder = user.home / "run"
    command = long_run(data, folder)
    code, _ = interrupted(user, command, lambda: len(metrics(folder)) > 3, signal.SIGKILL)
    assert code == -signal.SIGKILL
    code, _ = interrupted(user, command, lambda: saved_step(folder) >= 30, signal.SIGKILL)
    assert code == -signal.SIGKILL
    step = saved_step(folder)
    assert step % 10 == 0
    assert 30 <= step < STEPS
    done = user(*command)
    assert done.code == 0, done
    assert f"Going on after step {step}, from tinker://" in done.err
    check_same(metrics(folder), undisturbed)


def test_a_server_that_dies_is_told_of_and_waited_for_until_the_user_leaves(
    tmp_path: Path, home: Path, models: dict[str, Path], data: Path, undisturbed: list[dict[str, Any]]
) -> None:
    folder = tmp_path / "run"
    command = long_run(data, folder)
    with ServerProcess(tmp_path / "state", models) as server:
        user = Program(home, **variables_of(server.url, KEY))
        with user.start(*command) as process:
            assert process.stderr is not None
            wait_until(lambda: saved_step(folder) > 0, 60, "it does not train")
            server.kill()
            assert any("Trying again" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            assert any("Ctrl-C again leaves at once." in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        step = saved_step(folder)
        assert (process.returncode, step % 10) == (130, 0)
        assert f"Step {step} is saved; the same command goes on from there." in err
        server.start()
        done = user(*command)
        assert done.code == 0, done
        assert f"Going on after step {step}, from tinker://" in done.err
    check_same(metrics(folder), undisturbed, tolerance=1e-2)  # two processes may round differently


@pytest.fixture
def half_done(user: Program, data: Path) -> Path:
    folder = user.home / "run"
    code, _ = interrupted(user, long_run(data, folder), lambda: saved_step(folder) > 0, signal.SIGINT)
    assert code == 130
    return folder


def test_a_run_goes_on_only_with_what_it_began_with(user: Program, data: Path, half_done: Path) -> None:
    before = metrics(half_done)
    changed = user(*long_run(data, half_done), "--rank", "8", "--seed", "3")
    assert (changed.code, changed.out) == (1, "")
    assert "  rank: 4 then, 8 now\n  seed: 0 then, 3 now\nRun it as it was. Begin anew with --restart" in changed.err
    write_pairs(data, 25)
    changed = user(*long_run(data, half_done))
    assert changed.code == 1
    assert "  data (SHA-256): " in changed.err
    assert metrics(half_done) == before
    restarted = user("-f", "json", *sft(data, "--steps", "2", "--output", half_done, "--restart"))
    assert restarted.json()["steps"] == 2
    assert [record["step"] for record in metrics(half_done)] == [1, 2]


def test_a_state_that_is_gone_is_told(user: Program, data: Path, half_done: Path) -> None:
    path = json.loads((half_done / "state.json").read_text())["state_path"]
    assert user("checkpoint", "delete", path, "--yes").code == 0
    done = user(*long_run(data, half_done))
    assert done.code == 1
    assert f"Error: The run cannot go on from {path}: " in done.err
    assert "begin anew with --restart" in done.err


# What is refused


def test_bad_lines_are_refused_before_anything_is_sent(cli: InProcess, server: FakeServer, data: Path) -> None:
    with data.open("a") as file:
        file.write('{"prompt": "a"}\n')
    done = cli(*sft(data))
    assert (done.code, done.out) == (1, "")
    assert done.err == f"Error: {data}, line 25: completion is missing; it must be a text.\n"
    assert server.requests == []
    assert not (data.parent / "words-sft").exists()


@pytest.mark.parametrize(
    "name", ["", "_mine", "数据", 122 * "x", 1001 * "x"], ids=["", "mark", "letters", "122", "1001"]
)
def test_a_name_that_cannot_name_a_checkpoint_is_refused_before_anything_is_sent(
    cli: InProcess, server: FakeServer, data: Path, name: str
) -> None:
    done = cli(*sft(data, "--name", name))
    assert (done.code, done.out) == (2, "")
    assert "Invalid value for --name: " in done.err
    assert "Use up to 121 letters" in done.err
    assert server.requests == []


def test_what_is_too_long_for_the_model_is_refused_or_cut(user: Program, data: Path) -> None:
    with data.open("a") as file:
        file.write(json.dumps({"prompt": "a", "completion": "fox " * 200}) + "\n")
    done = user(*sft(data, "--steps", "2"))
    assert done.code == 1
    assert f"{data}, line 25: it has " in done.err
    assert (
        f"tokens; the model takes {CONTEXT}. Shorten it, or cut what is too long with --max-length {CONTEXT}."
        in done.err
    )
    assert user(*sft(data, "--steps", "2", "--max-length", str(CONTEXT))).code == 0
    assert "max-length is 999" in user(*sft(data, "--max-length", "999", "-o", "other")).err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--model", "nobody/nothing"), 1, f"cannot train 'nobody/nothing'.\nChoose one with --model: {MODEL}\n"),
        (("--model", "tiny/modle-1"), 1, f"cannot train 'tiny/modle-1'.\nDid you mean '{MODEL}'? Choose one with"),
        (("--steps", "3", "--warmup", "3"), 1, "warmup is 3; it must be less than the 3 steps."),
        (("--eval-split", "0.01"), 1, "An eval-split of 0.01 leaves 24 of 24 examples for training and 0 for"),
        (("--steps", "3", "--epochs", "3"), 2, "Give either --epochs or --steps."),
        (("--eval-split", "0.5", "--eval-data", "words.jsonl"), 2, "Give either --eval-split or --eval-data."),
        (("--lr", "0"), 2, "--learning-rate"),
        (("--schedule", "square"), 2, "--schedule"),
        (("--wandb", "ships"), 1, "--wandb needs the package 'wandb'. Install it with: pip install wandb"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_settings_that_make_no_sense_are_refused(
    user: Program, data: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    done = user(*sft(data, *arguments))
    assert (done.code, done.out) == (code, "")
    assert told in done.err


def test_a_dead_server_is_told_soon(home: Path, data: Path) -> None:
    program = Program(home, **variables_of(NOWHERE))
    done = program("--timeout", "1", *sft(data))
    assert done.code == 1
    assert "Error: Connection failed\n" in done.err


def test_metrics_also_go_to_wandb_and_its_failure_stops_nothing(running: ServerProcess, home: Path, data: Path) -> None:
    packages = home / "packages"
    packages.mkdir()
    (packages / "wandb.py").write_text(
        "calls = open('calls', 'w')\n"
        "def init(**options): print('init', options['project'], file=calls, flush=True)\n"
        "def log(values, step):\n"
        "    print(step, values['loss'], file=calls, flush=True)\n"
        "    if step == 2: raise OSError('no network')\n"
    )
    program = Program(home, PYTHONPATH=str(packages), **variables_of(running.url, KEY))
    done = program(*sft(data, "--steps", "4", "--wandb", "ships"))
    assert done.code == 0, done
    assert done.err.count("wandb failed and gets no more metrics: OSError: no network") == 1
    assert len((home / "calls").read_text().splitlines()) == 3


# The real model


def test_the_embedded_model_learns_to_talk_like_a_pirate(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = session_cache(tmp_path_factory)
    embedded_folder(cache)
    program = Program(
        home,
        TINKER_BASE_URL="local",
        TINSMITH_STATE=str(home / "state"),
        TINSMITH_CACHE=str(cache),
        HF_HOME=str(cache / "hf"),
        HF_ENDPOINT=NOWHERE,
    )
    data = shutil.copy(ROOT / "examples" / "pirate.jsonl", home)
    options = ("--rank", "16", "--learning-rate", "1e-3", "--steps", "5", "--eval-split", "0.1")
    with program.start("-f", "json", "train", "sft", data, *options) as process:
        try:
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["last_eval_loss"] < 0.7 * result["first_eval_loss"]
