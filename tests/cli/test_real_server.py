"""The whole way: the real program, a real server, a real (if tiny and random) model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinsmith
from tests.cli.program import Program, variables_of
from tests.end_to_end.scripts import train
from tests.end_to_end.serving import KEY, ServerProcess, wait_until
from tests.server.tiny_models import save_model
from tests.support.tiny_tokenizer import byte_level_bpe

MODEL = "tiny/model-1"
BEGIN, END = 1, 2
"""Tokens that the tokenizer calls <|im_start|> and <|im_end|>; the tiny models end their texts with the second."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose end is the model's name: seen from there, the tokenizer is found by that name."""
    tokenizer = byte_level_bpe()
    folder = tmp_path_factory.mktemp("models") / MODEL
    folder.mkdir(parents=True)
    save_model(folder, "qwen3", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("state"), {MODEL: model}) as server:
        yield server


@pytest.fixture(scope="module")
def checkpoint(running: ServerProcess) -> str:
    with tinsmith.ServiceClient(base_url=running.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client(MODEL, rank=4, seed=1)
        train(tinsmith, trainer, [1])
        trainer.save_weights_for_sampler("taught").result()
        return str(trainer.save_state("taught").result().path)


@pytest.fixture
def user(running: ServerProcess, model: Path) -> Program:
    return Program(model.parents[1], **variables_of(running.url, KEY))


def test_from_the_list_of_runs_to_the_last_checkpoint(user: Program, checkpoint: str, tmp_path: Path) -> None:
    listed = user("-f", "json", "run", "list").json()
    assert (listed["total"], listed["shown"]) == (1, 1)
    run_id = listed["runs"][0]["training_run_id"]
    assert user("-f", "json", "run", "info", run_id).json() == listed["runs"][0]
    assert user("-f", "json", "checkpoint", "list", "--run-id", run_id).json()["total"] == 2
    assert user("checkpoint", "publish", checkpoint) == (0, "", "")
    assert user("checkpoint", "set-ttl", checkpoint, "--ttl", "7200") == (0, "", "")
    shown = user("-f", "json", "checkpoint", "info", checkpoint).json()
    assert shown["public"]
    assert shown["expires_at"].endswith("Z")
    assert shown["lora_rank"] == 4
    fetched = user("-f", "json", "checkpoint", "download", checkpoint, "--output", tmp_path).json()
    files = {path.name: path.stat().st_size for path in Path(fetched["destination"]).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files.keys()
    copy = f"tinker://{run_id}/weights/nix"
    half_done = user("-f", "json", "checkpoint", "delete", checkpoint, copy, "--yes")
    assert half_done.code == 1
    document = json.loads(half_done.out)
    assert document["deleted_count"] == 1
    assert [one["tinker_path"] for one in document["failed"]] == [copy]


def test_models_sessions_and_billing(user: Program, checkpoint: str, running: ServerProcess, tmp_path: Path) -> None:
    (model,) = user("-f", "json", "model", "list", "TINY").json()["models"]
    assert model == {"model_name": MODEL, "max_context_length": 512, "trainable": True, "sampleable": True}
    session_id = checkpoint.removeprefix("tinker://").partition(":")[0]
    done = user("session", "export-trace", session_id, "-o", tmp_path / "trace")
    assert done.code == 0, done
    assert json.loads((tmp_path / "trace").read_text())["otherData"] == {"session_id": session_id}
    assert user("-f", "json", "billing", "usage", "2030-01-01", "2030-01-02").json()["data"] == []
    assert user("-f", "json", "billing", "checkpoint-storage").json()["data"][0]["checkpoint_count"] >= 1


def test_a_model_and_a_checkpoint_continue_a_text(user: Program, checkpoint: str) -> None:
    options = ("--max-tokens", "5", "--seed", "7", "--num-samples", "2")
    first, again = (user("-f", "json", "sample", "A tinsmith", *options).json() for _ in range(2))
    assert first == again, "the same seed gives the same text"
    assert first["prompt"] == "A tinsmith"
    assert [len(sample["tokens"]) for sample in first["samples"]] == [5, 5]
    assert {sample["stop_reason"] for sample in first["samples"]} == {"length"}
    taught = checkpoint.replace("/weights/", "/sampler_weights/")
    from_stdin = user("sample", "-", "--checkpoint", taught, *options, input="A tinsmith")
    assert from_stdin.code == 0
    assert from_stdin.out.startswith("--- 1 of 2 ---\n")


def test_the_token_that_ends_a_text_is_shown_to_those_who_ask_for_it(user: Program) -> None:
    """At a high temperature every token is as likely as the others, so this one comes soon."""
    command = ("sample", "A tinsmith", "--temperature", "100", "--seed", "6", "--max-tokens", "500")
    assert not user(*command).out.endswith("<|im_end|>\n")
    assert user(*command, "--special-tokens").out.endswith("<|im_end|>\n")
    (sample,) = user("-f", "json", *command).json()["samples"]
    assert sample["stop_reason"] == "stop"
    assert not sample["text"].endswith("<|im_end|>")
    assert sample["tokens"][-1] == END, "they are told whole"


def test_a_special_token_that_ended_nothing_is_shown(user: Program) -> None:
    options = ("--temperature", "100", "--seed", "5", "--max-tokens", "1", "--num-samples", "512")
    samples = user("-f", "json", "sample", "A tinsmith", *options).json()["samples"]
    begun = [sample for sample in samples if sample["tokens"] == [BEGIN]]
    assert {(sample["stop_reason"], sample["text"]) for sample in begun} == {("length", "<|im_start|>")}


def test_what_somebody_else_has_published_can_be_looked_at(user: Program, running: ServerProcess) -> None:
    with tinsmith.ServiceClient(base_url=running.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client(MODEL, rank=4, seed=1)
        path = str(trainer.save_state("shared").result().path)
    made = user("-f", "json", "keys", "create", "bob", "--state", running.state).json()
    bobs = Program(user.home, **variables_of(running.url, made["key"]))
    refused = bobs("checkpoint", "info", path)
    assert (refused.code, refused.out) == (1, "")
    assert user("checkpoint", "publish", path).code == 0
    shown = bobs("-f", "json", "checkpoint", "info", path).json()
    assert (shown["tinker_path"], shown["public"]) == (path, True)


def test_a_key_made_for_a_running_server_works_until_it_is_revoked(user: Program, running: ServerProcess) -> None:
    made = user("-f", "json", "keys", "create", "ann", "--state", running.state).json()
    anns = Program(user.home, **variables_of(running.url, made["key"]))
    listed = anns("-f", "json", "run", "list").json()
    assert listed["total"] == 0, "what belongs to another key is not seen"
    assert user("keys", "revoke", str(made["key_id"]), "--yes", "--state", running.state).code == 0
    wait_until(
        lambda: running.call("GET", "/api/v1/training_runs", key=made["key"]).status == 401, 30, "it still works"
    )
    refused = anns("run", "list")
    assert refused.code == 1
    assert refused.err.startswith("Error: Authentication failed\n")
    assert made["key"] not in refused.err
