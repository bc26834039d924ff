"""The whole way of a checkpoint: trained on a real server, exported by the real program, loaded by other tools."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file

import tinsmith
from tests.cli.conftest import Stock
from tests.cli.program import COMMAND, SECONDS, InProcess, Program, environment, variables_of
from tests.end_to_end.serving import KEY, ServerProcess
from tests.export.making import PROMPT, TIED, greedy, load
from tests.server.tiny_models import FAMILIES, make_model, save_model
from tests.support.server import FakeServer, Hang
from tests.support.tiny_tokenizer import cache_folder

NUM_TOKENS = 24
SHARDED = "qwen3"


class Trained(NamedTuple):
    """Checkpoints of one run, and what the server samples from them."""

    base: Path
    training: str
    sampler: str
    exported: str
    says: list[int]
    base_says: list[int]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    folders = {family: save_model(root / family, family) for family in FAMILIES if family != SHARDED}
    make_model(SHARDED).save_pretrained(root / SHARDED, max_shard_size="40KB")
    return {**folders, SHARDED: root / SHARDED}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, bases: dict[str, Path]) -> Iterator[ServerProcess]:
    served = {f"tiny/{family}": folder for family, folder in bases.items()}
    with ServerProcess(tmp_path_factory.mktemp("state"), served) as server:
        yield server


@pytest.fixture(scope="module")
def trained(running: ServerProcess, bases: dict[str, Path]) -> dict[str, Trained]:
    with tinsmith.ServiceClient(base_url=running.url, api_key=KEY) as client:
        return {family: train(client, family, folder) for family, folder in bases.items()}


def train(client: tinsmith.ServiceClient, family: str, base: Path) -> Trained:
    """A few steps at a high rate, on every kind of layer, so that the adapter has much to say."""
    trainer = client.create_lora_training_client(f"tiny/{family}", rank=4, seed=1)
    datum = tinsmith.types.Datum(
        model_input=tinsmith.types.ModelInput.from_ints(PROMPT),
        loss_fn_inputs={"target_tokens": [40, 41, 42, 43, 44, 45], "weights": [1.0] * 6},
    )
    for _ in range(3):
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(tinsmith.types.AdamParams(learning_rate=0.02))
    sampler = trainer.save_weights_for_sampler("one").result().path
    return Trained(
        base,
        trainer.save_state("one").result().path,
        sampler,
        trainer.save_weights_external("one").result().path,
        said_by(client.create_sampling_client(model_path=sampler)),
        said_by(client.create_sampling_client(base_model=f"tiny/{family}")),
    )


def said_by(sampler: tinsmith.SamplingClient) -> list[int]:
    params = tinsmith.types.SamplingParams(max_tokens=NUM_TOKENS, temperature=0, stop=[])
    prompt = tinsmith.types.ModelInput.from_ints(PROMPT)
    return list(sampler.sample(prompt, 1, params).result().sequences[0].tokens)


@pytest.fixture
def user(running: ServerProcess, home: Path) -> Program:
    return Program(home, **variables_of(running.url, KEY), HF_HUB_OFFLINE="1")


# --- what is exported is what was trained ----------------------------------------------------------------------------


@pytest.mark.filterwarnings(TIED)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_tools_say_what_the_server_says(
    user: Program, trained: dict[str, Trained], home: Path, family: str
) -> None:
    one = trained[family]
    assert one.says != one.base_says, "the adapter changes nothing, so this test would prove nothing"
    document = user("-f", "json", "checkpoint", "export", one.training, "--to", "merged", "-o", "merged").json()
    assert document.pop("size_bytes") > 10_000
    assert document == {
        "checkpoint_path": one.training,
        "format": "merged",
        "destination": str(home / "merged"),
        "base_model": f"tiny/{family}",
    }
    assert greedy(load(home / "merged"), PROMPT, NUM_TOKENS) == one.says
    done = user("checkpoint", "export", one.training, "--to", "peft", "-o", "peft", "--base", one.base)
    assert (done.code, done.err) == (0, "")
    assert greedy(AutoPeftModelForCausalLM.from_pretrained(home / "peft"), PROMPT, NUM_TOKENS) == one.says
    assert sorted(path.name for path in home.iterdir()) == ["merged", "peft"], "nothing is left of the way there"


def test_all_kinds_of_checkpoints_of_our_own_server_can_be_exported(
    user: Program, trained: dict[str, Trained], home: Path
) -> None:
    one = trained["llama"]
    folders = []
    for path in (one.training, one.sampler, one.exported):
        folders.append(home / path.split("/")[3])
        assert user("checkpoint", "export", path, "--to", "peft", "-o", folders[-1]).code == 0
    first, *others = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    for other in others:
        assert all((first[name] == other[name]).all() for name in first.keys() | other.keys())


def test_a_folder_of_peft_comes_back_as_a_checkpoint(
    user: Program, running: ServerProcess, trained: dict[str, Trained], home: Path
) -> None:
    one = trained["llama"]
    note = ("--data-note", "A thousand limericks.")
    assert user("checkpoint", "export", one.training, "--to", "peft", "-o", "peft", *note).code == 0
    card = (home / "peft" / "README.md").read_text()
    assert "A thousand limericks." in card
    assert "| optimizer steps | 3 |" in card
    document = user("-f", "json", "checkpoint", "import", "peft", "--base", "tiny/llama", "--name", "back").json()
    assert document["checkpoint_path"].endswith("/weights/back")
    with tinsmith.ServiceClient(base_url=running.url, api_key=KEY) as client:
        assert said_by(client.create_sampling_client(model_path=document["checkpoint_path"])) == one.says
    refused = user("checkpoint", "import", "peft", "--base", "tiny/smollm2")
    assert refused.code == 1
    assert "The adapter changes" in refused.err


def test_a_base_that_llama_cpp_cannot_use_is_told_by_the_server(
    user: Program, trained: dict[str, Trained], home: Path
) -> None:
    """The models of this file have no tokenizer."""
    done = user("checkpoint", "export", trained["llama"].training, "--to", "gguf", "-o", "gguf")
    assert (done.code, list(home.iterdir())) == (1, [])
    assert "there is no tokenizer.json" in done.err


def test_with_a_base_of_ones_own_the_merge_is_done_here(user: Program, trained: dict[str, Trained], home: Path) -> None:
    one = trained[SHARDED]
    options = ("--to", "merged", "-o", "merged", "--base", one.base)
    document = user("-f", "json", "checkpoint", "export", one.training, *options).json()
    assert (document["base_model"], document["base_folder"]) == (str(one.base), str(one.base))
    assert greedy(load(home / "merged"), PROMPT, NUM_TOKENS) == one.says


# --- the base --------------------------------------------------------------------------------------------------------


def test_the_base_comes_from_the_cache_of_the_hub(user: Program, trained: dict[str, Trained], home: Path) -> None:
    one = trained["llama"]
    snapshot = cache_folder(home / ".cache" / "huggingface" / "hub", "org/other-name")
    shutil.copytree(one.base, snapshot, dirs_exist_ok=True)
    options = ("--to", "merged", "-o", "merged", "--base", "org/other-name")
    document = user("-f", "json", "checkpoint", "export", one.training, *options).json()
    assert (document["base_model"], document["base_folder"]) == ("org/other-name", str(snapshot))
    assert "base_model: org/other-name\n" in (home / "merged" / "README.md").read_text()
    missing = user("checkpoint", "export", one.training, *options[:-1], "org/nowhere", "--force")
    assert missing.code == 1
    assert missing.err.splitlines()[1] == "Error: There are no base weights of 'org/nowhere'"
    assert "hf download org/nowhere" in missing.err
    assert missing.err.endswith("Name a folder or a hub id with --base.\n")


def test_another_base_is_refused_by_the_name_of_what_does_not_fit(
    user: Program, trained: dict[str, Trained], bases: dict[str, Path], home: Path
) -> None:
    options = ("--to", "merged", "-o", "merged", "--base", bases["smollm2"])
    done = user("checkpoint", "export", trained["llama"].training, *options)
    assert (done.code, done.out) == (1, "")
    assert "Error: The adapter changes lm_head as a matrix of [97, 32]" in done.err
    assert "Give the model that the adapter was trained on as the base." in done.err
    assert list(home.iterdir()) == []


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_there_stays_as_it_is_unless_force_is_used(
    user: Program, trained: dict[str, Trained], home: Path
) -> None:
    (home / "out").mkdir()
    (home / "out" / "precious").touch()
    command = ("checkpoint", "export", trained["llama"].training, "--to", "peft", "-o", "out")
    refused = user(*command)
    assert refused.code == 1
    assert "exists and is not empty: replace it with --force, or choose another folder." in refused.err
    failed = user(*command[:2], f"{command[2]}-nix", *command[3:], "--force")
    assert failed.code == 1
    assert [path.name for path in (home / "out").iterdir()] == ["precious"]
    assert user(*command, "--force").code == 0
    assert not (home / "out" / "precious").exists()
    assert [path.name for path in home.iterdir()] == ["out"]


def test_a_write_that_fails_half_way_leaves_nothing_behind(
    running: ServerProcess, trained: dict[str, Trained], home: Path, tmp_path: Path
) -> None:
    """No file may be longer than 256 KB here, and one tensor of this base is."""
    one = trained["llama"]
    base = save_model(tmp_path / "large", "llama", max_position_embeddings=64)
    weights = base / "model.safetensors"
    tensors = {**load_file(weights), "unused.weight": load_file(weights)["lm_head.weight"].repeat(30, 1)}
    save_file(tensors, weights, {"format": "pt"})
    arguments = ("checkpoint", "export", one.training, "--to", "merged", "-o", "out", "--base", str(base))
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 256; exec "$@"', "bash", COMMAND, *arguments],
        env=environment(home, **variables_of(running.url, KEY)),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 1, done
    assert done.stderr.startswith("Error: File too large")
    assert list(home.iterdir()) == []


def test_ctrl_c_leaves_nothing_behind(program: Program, stock: Stock, server: FakeServer, home: Path) -> None:
    server.script("adapter_model.safetensors", Hang())
    with program.start("checkpoint", "export", stock.exported, "--to", "peft", "-o", "out") as process:
        server.wait_for("adapter_model.safetensors", 1, timeout=SECONDS)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert list(home.iterdir()) == []


def test_sampler_weights_of_a_server_that_does_not_hand_them_out_are_refused_with_the_remedy(
    cli: InProcess, stock: Stock, home: Path
) -> None:
    done = cli("checkpoint", "export", stock.sampler, "--to", "peft", "-o", "out")
    assert done.code == 1
    assert done.err.startswith(f"Error: {stock.sampler} cannot be fetched\n")
    assert f"tinsmith checkpoint list --run-id {stock.run_id}" in done.err
    assert list(home.iterdir()) == []


def test_a_checkpoint_that_is_no_adapter_is_refused(cli: InProcess, stock: Stock, home: Path) -> None:
    """The scripted server's file of weights is no safetensors file."""
    done = cli("checkpoint", "export", stock.exported, "--to", "peft", "-o", "out")
    assert done.code == 1
    assert "adapter_model.safetensors is not a safetensors file" in done.err
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("options", [("--to", "onnx", "-o", "x"), ("-o", "x"), ("--to", "peft")])
def test_wrong_usage_is_told_before_anything_is_sent(
    cli: InProcess, stock: Stock, server: FakeServer, options: tuple[Any, ...]
) -> None:
    assert cli("checkpoint", "export", stock.training, *options).code == 2
    assert server.requests == []
