"""Uploading to the Hugging Face Hub: the right files, to nobody they are not meant for, and over nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Stock
from tests.cli.hub import Hub
from tests.cli.program import Program, variables_of
from tests.support.server import FakeServer

ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
REPO = "ann/tinker-model-1-session-0001-train-0"


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def uploader(server: FakeServer, hub: Hub, home: Path) -> Iterator[Program]:
    with hub.served() as url:
        hub_variables = {"HF_ENDPOINT": url, "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_TELEMETRY": "1"}
        yield Program(home, HF_HUB_DISABLE_XET="1", NO_PROXY="127.0.0.1", **hub_variables, **variables_of(server.url))


def test_a_checkpoint_becomes_a_private_repository_with_a_card(uploader: Program, hub: Hub, stock: Stock) -> None:
    done = uploader("-f", "json", "checkpoint", "push-hf", stock.exported, "--commit-message", "First")
    assert done.json() == {"checkpoint_path": stock.exported, "repo_id": REPO, "public": False}
    assert hub.repositories[REPO].keys() == {*ADAPTER, "README.md"}
    assert f"tinker_path: {stock.exported}\n" in hub.repositories[REPO]["README.md"].decode()
    assert hub.public == set()
    assert hub.messages == ["First"]


def test_the_card_is_that_of_an_export_as_far_as_the_settings_tell(
    uploader: Program, hub: Hub, stock: Stock, server: FakeServer
) -> None:
    settings = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "<b>"]}
    server.api.external_files["adapter_config.json"] = json.dumps(settings).encode()
    assert uploader("checkpoint", "push-hf", stock.training).code == 0
    card = hub.repositories[REPO]["README.md"].decode()
    assert card.startswith("---\nbase_model: tiny/model-1\nlibrary_name: peft\n")
    assert "| rank | 8 |\n| alpha | 32 |\n| trained modules | `q_proj` |\n| checkpoint | " in card
    assert f'PeftModel.from_pretrained(model, "{REPO}")' in card


def test_what_everybody_sees_needs_public(uploader: Program, hub: Hub, stock: Stock) -> None:
    hub.repositories["ann/mine"] = {}
    hub.public.add("ann/mine")
    refused = uploader("checkpoint", "push-hf", stock.exported, "--repo", "ann/mine")
    assert refused.code == 1
    assert "Add --public" in refused.err
    options = ("--repo", "ann/mine", "--public", "--no-model-card", "--ignore-pattern", "*.json")
    assert uploader("checkpoint", "push-hf", stock.training, *options).code == 0
    assert hub.repositories["ann/mine"].keys() == {"adapter_model.safetensors"}


def test_a_repository_of_another_checkpoint_is_left_alone(uploader: Program, hub: Hub, stock: Stock) -> None:
    card = b"---\ntinker_path: tinker://other/weights/last\n---\n"
    hub.repositories[REPO] = {"README.md": card}
    done = uploader("checkpoint", "push-hf", stock.exported)
    assert done.code == 1
    assert "tinker://other/weights/last" in done.err
    assert hub.repositories[REPO] == {"README.md": card}


def test_what_is_no_adapter_is_not_uploaded(uploader: Program, hub: Hub, server: FakeServer, stock: Stock) -> None:
    server.api.external_files.clear()
    server.api.external_files["weights.age"] = b"encrypted"
    done = uploader("checkpoint", "push-hf", stock.training)
    assert done.code == 1
    assert "its files are weights.age" in done.err
    assert hub.repositories == {}


def test_without_a_token_the_remedy_is_named(server: FakeServer, stock: Stock, home: Path) -> None:
    done = Program(home, HF_ENDPOINT="http://127.0.0.1:9", **variables_of(server.url))(
        "checkpoint", "push-hf", stock.exported
    )
    assert done.code == 1
    assert "Run `hf auth login`, or set HF_TOKEN." in done.err
