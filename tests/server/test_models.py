"""Base models: names, the folders behind them, and the facts the API needs, all without torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.server.tiny_models import FAMILIES, make_model, save_model
from tests.support.hub import NOWHERE, Hub, run_python
from tinsmith.errors import ConfigError
from tinsmith.server.models import SUPPORTED_ARCHITECTURES, ModelSource, describe, find, parse_source


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A model folder to change."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def source(folder: Path) -> ModelSource:
    return ModelSource("tiny", str(folder))


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Qwen/Qwen3-8B", "gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_a_hub_id_is_its_own_name(text: str) -> None:
    assert parse_source(text) == ModelSource(text, text)
    assert not parse_source(text).is_folder


def test_an_existing_folder_goes_before_a_hub_id_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    assert parse_source("Qwen/Qwen3-8B") == ModelSource("Qwen/Qwen3-8B", str(tmp_path / "Qwen/Qwen3-8B"))


@pytest.mark.parametrize("text", ["./tiny", "tiny", "tiny/", "../{here}/tiny", "{all}/tiny"])
def test_a_folder_is_named_as_it_was_written_and_found_from_anywhere(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    text = text.format(here=tmp_path.name, all=tmp_path)
    parsed = parse_source(text)
    assert parsed == ModelSource(text, str(tmp_path / "tiny"))
    assert parsed.is_folder


def test_a_folder_can_be_given_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a=b").mkdir()
    assert parse_source(f"org/my-model={tmp_path}") == ModelSource("org/my-model", str(tmp_path))
    assert parse_source("mine=~/a=b") == ModelSource("mine", str(tmp_path / "a=b"))
    assert parse_source(str(tmp_path / "a=b")).location == str(tmp_path / "a=b")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is not a model: give a folder, NAME=FOLDER, or a hub id"),
        ("a b", "'a b' is not a model"),
        ("a/b/c", "'a/b/c' is not a model"),
        ("./missing", "The model './missing' is not a folder"),
        ("/missing/model", "The model '/missing/model' is not a folder"),
        ("~/missing", "The model '~/missing' is not a folder"),
        ("weights.gguf", "The model 'weights.gguf' is not a folder"),
        ("=.", "=. is not a model: the name is empty"),
        ("name=", "name= is not a model: there is no folder ''"),
        ("name=missing", "name=missing is not a model: there is no folder 'missing'"),
        ("name=org/model", "name=org/model is not a model: there is no folder 'org/model'"),
    ],
)
def test_what_is_no_model_is_refused(text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ConfigError, match=re.escape(problem)):
        parse_source(text)


# --- facts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_facts_are_those_transformers_knows(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)

    facts = describe(ModelSource("org/tiny", str(tmp_path)))

    assert (facts.name, facts.folder, facts.tokenizer_id) == ("org/tiny", tmp_path, str(tmp_path))
    assert facts.architecture == type(model).__name__
    assert (facts.vocab_size, facts.max_context) == (97, 128)
    assert (facts.bos_token_id, facts.eos_token_ids) == (1, (2,))
    assert facts.num_parameters == model.num_parameters()


def test_every_supported_architecture_is_among_the_tested_families() -> None:
    assert {type(make_model(family)).__name__ for family in FAMILIES} == set(SUPPORTED_ARCHITECTURES)


def test_weights_in_several_files_are_counted_together(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert describe(source(tmp_path)).num_parameters == model.num_parameters()


def test_a_tied_head_that_is_stored_all_the_same_is_not_counted_twice(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    before = describe(source(tmp_path)).num_parameters
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert describe(source(tmp_path)).num_parameters == before


@pytest.mark.parametrize(
    ("generation", "ids"), [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 0}, (0,)), ({}, (2,)), (None, (2,))]
)
def test_the_tokens_that_end_a_text_come_from_the_generation_config_first(
    generation: dict[str, Any] | None, ids: tuple[int, ...], folder: Path
) -> None:
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert describe(source(folder)).eos_token_ids == ids


def test_a_model_may_have_no_such_tokens(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change_json(folder / "config.json", eos_token_id=None, bos_token_id=None)
    facts = describe(source(folder))
    assert (facts.eos_token_ids, facts.bos_token_id) == ((), None)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_another_architecture_is_refused_with_those_that_are_supported(
    architectures: list[str] | None, folder: Path
) -> None:
    change_json(folder / "config.json", architectures=architectures)
    with pytest.raises(ConfigError, match=f"not supported. Supported are: {', '.join(SUPPORTED_ARCHITECTURES)}"):
        describe(source(folder))


def test_quantised_weights_are_refused(folder: Path) -> None:
    change_json(folder / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="quantised with fp8, which cannot be trained here"):
        describe(source(folder))


def test_a_folder_without_its_files_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"The folder {tmp_path} of the model 'tiny' lacks config.json, ")):
        find(source(tmp_path))


def test_a_missing_part_of_the_weights_is_named(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="20KB")
    part = sorted(tmp_path.glob("*.safetensors"))[1]
    part.unlink()
    with pytest.raises(ConfigError, match=f"lacks {re.escape(part.name)}"):
        find(source(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"eos_token_id": "two"}'])
def test_a_damaged_configuration_is_refused_by_name(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{folder / name} cannot be used: ")):
        describe(source(folder))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        (2**40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]" + bytes(8),
        (9).to_bytes(8, "little") + b'{"a": {}}' + bytes(8),
    ],
)
def test_weights_that_are_not_safetensors_are_refused(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file: .* Fetch it again\."):
        describe(source(folder))


def test_weights_cut_short_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ConfigError, match=r"has \d+ bytes, but its head announces \d+. Fetch it again"):
        describe(source(folder))


def test_neither_torch_nor_the_hub_library_is_loaded_for_a_folder(tiny_folder: Path) -> None:
    code = f"""
import sys
from tinsmith.server.models import describe, parse_source
describe(parse_source({str(tiny_folder)!r}))
print(*sys.modules)
"""
    assert not {"torch", "transformers", "safetensors", "huggingface_hub"} & set(run_python(code).split())


# --- the hub ---------------------------------------------------------------------------------------------------------

DESCRIBE = """
from tinsmith.errors import ConfigError
from tinsmith.server.models import describe, parse_source
for name in ["org/tiny"]:
    try:
        facts = describe(parse_source(name))
        print(facts.name, facts.tokenizer_id, facts.vocab_size, facts.folder)
    except ConfigError as error:
        print(error)
"""


@pytest.fixture
def hub(tiny_folder: Path) -> Hub:
    files = {path.name: path.read_bytes() for path in tiny_folder.iterdir()}
    others = ("README.md", "pytorch_model.bin", "onnx/model.safetensors", "original/consolidated.00.pth")
    return Hub("org/tiny", files | dict.fromkeys(others, b"x"))


def test_a_hub_model_is_fetched_once_and_only_in_the_files_it_needs(hub: Hub, tmp_path: Path) -> None:
    with hub.served() as address:
        printed = run_python(DESCRIBE, HF_ENDPOINT=address, HF_HOME=str(tmp_path))
    assert printed == f"org/tiny org/tiny 97 {tmp_path}/hub/models--org--tiny/snapshots/{'5' * 40}"
    assert hub.fetched == {"config.json", "generation_config.json", "model.safetensors"}

    assert run_python(DESCRIBE, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)) == printed
    assert run_python(DESCRIBE, HF_ENDPOINT=NOWHERE, HF_HOME=str(tmp_path)) == printed


def test_offline_the_error_says_which_files_to_put_where(tmp_path: Path) -> None:
    printed = run_python(DESCRIBE, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert printed.startswith("The model 'org/tiny' is not here, and offline nothing is fetched.")
    assert "run `hf download org/tiny --include 'config.json'" in printed
    assert f"copy the folder models--org--tiny from the cache there into {tmp_path}/hub" in printed
    assert printed.endswith("or put the files into any folder and serve org/tiny=FOLDER.")


def test_files_left_by_others_in_the_cache_are_not_taken_for_the_model(hub: Hub, tmp_path: Path) -> None:
    with hub.served() as address:
        fetch_part = "from huggingface_hub import hf_hub_download; hf_hub_download('org/tiny', 'config.json')"
        run_python(fetch_part, HF_ENDPOINT=address, HF_HOME=str(tmp_path))
    printed = run_python(DESCRIBE, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert "of the model 'org/tiny' lacks model.safetensors." in printed


def test_a_hub_that_refuses_or_is_not_there_is_reported_with_the_way_out(hub: Hub, tmp_path: Path) -> None:
    code = DESCRIBE.replace('["org/tiny"]', '["org/gated", "org/none"]')
    with hub.served() as address:
        gated, missing = run_python(code, HF_ENDPOINT=address, HF_HOME=str(tmp_path)).splitlines()
    away = run_python(DESCRIBE, HF_ENDPOINT=NOWHERE, HF_HOME=str(tmp_path))

    assert gated.startswith("The model 'org/gated' cannot be fetched: its repository is gated. Accept the terms")
    assert missing.startswith("The model 'org/none' cannot be fetched: there is no such repository, or it is private.")
    assert away.startswith("The model 'org/tiny' cannot be fetched: ConnectError: ")
    assert "Without a connection: run `hf download org/tiny" in away


def test_a_hub_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        printed = run_python(DESCRIBE, HF_ENDPOINT=address, HF_HOME=str(tmp_path), HF_HUB_ETAG_TIMEOUT="1")
    assert printed.startswith("The model 'org/tiny' cannot be fetched: ReadTimeout: ")
