"""A PEFT folder names what it holds as other tools expect it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file

from tests.export.making import ORIGIN, export, logits, write_random_adapter
from tests.server.tiny_models import save_model
from tinsmith.errors import InvalidInputError
from tinsmith.export import MERGED, PEFT, Adapter, Story, new_folder
from tinsmith.export.card import Learned, peft_card


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", "qwen3")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return write_random_adapter(tmp_path / "adapter", base)


def test_peft_finds_the_base_by_itself(tmp_path: Path, base: Path, adapter: Path) -> None:
    folder = export(PEFT, adapter, None, tmp_path / "peft", str(base))
    model = AutoPeftModelForCausalLM.from_pretrained(folder)
    assert logits(model).isfinite().all()
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_the_card_says_what_it_is_and_how_to_load_it(tmp_path: Path, adapter: Path) -> None:
    card = (export(PEFT, adapter, None, tmp_path / "peft") / "README.md").read_text()
    assert card.startswith("---\nbase_model: tiny/base\nlibrary_name: peft\n")
    assert f"tinker_path: {ORIGIN}\n" in card
    assert "| rank | 4 |" in card
    assert 'AutoModelForCausalLM.from_pretrained("tiny/base", dtype="auto")' in card
    local = (export(PEFT, adapter, None, tmp_path / "other", "/models/base") / "README.md").read_text()
    assert "base_model:" not in local, "the hub refuses cards whose base is not on the hub"


def test_the_card_of_an_adapter_of_unpacked_weights_says_so(adapter: Path) -> None:
    story = Story("tiny/base", ORIGIN)
    learned = Learned.of(Adapter(adapter))
    plain, unpacked = (peft_card(learned, each) for each in (story, story._replace(is_unpacked=True)))
    said = b"those of `tiny/base` unpacked from 4 bits. They differ a little from those on\nthe hub"
    assert said in b"".join(unpacked.blocks())
    assert said not in b"".join(plain.blocks())


def test_what_others_have_written_does_nothing_on_the_page_of_a_card() -> None:
    note = "<script>x()</script> [link](javascript:x)\r\n```\n\n# Heading" + 40 * " word"
    base = "<script>x()</script>`\n# |_a_|"
    card = b"".join(peft_card(Learned(8, 16, frozenset()), Story(base, ORIGIN, note)).blocks()).decode()
    page = MarkdownIt("commonmark").enable("table").render(card.partition("\n---\n")[2])
    assert not {"script", "a", "em"} & set(re.findall(r"<(\w+)", page))
    assert re.findall(r"<h\d>(.*)</h\d>", page) == [
        "A LoRA adapter for <code>&lt;script&gt;x()&lt;/script&gt;' # |_a_|</code>",
        "Data",
        "Use",
    ]
    assert "<td><code>&lt;script&gt;x()&lt;/script&gt;' # |_a_|</code></td>" in page
    assert "<pre><code>&lt;script&gt;x()&lt;/script&gt; [link](javascript:x)\n```\n\n# Heading word" in page
    assert max(len(line) for line in card.splitlines() if "word" in line) <= 104


def test_settings_that_no_adapter_has_are_not_told() -> None:
    assert Learned.of_config({"r": True, "lora_alpha": 10**400}) == Learned(None, None, frozenset())
    assert Learned.of_config({"r": 10**400, "lora_alpha": True}) == Learned(None, None, frozenset())


def test_names_of_the_hosted_service_become_those_of_published_weights(
    tmp_path: Path, base: Path, adapter: Path
) -> None:
    """There the output matrix has a name of its own, and the modules are not spelt out."""
    export(MERGED, adapter, base, tmp_path / "ours")
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    weights = load_file(file)
    save_file({name.replace("lm_head", "model.unembed_tokens"): weights[name] for name in weights}, file)
    config.write_text(json.dumps({**json.loads(config.read_bytes()), "target_modules": "all-linear"}))
    folder = export(PEFT, adapter, None, tmp_path / "peft", str(base))
    assert load_file(folder / file.name).keys() == weights.keys()
    assert "lm_head" in json.loads((folder / config.name).read_bytes())["target_modules"]
    export(MERGED, adapter, base, tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_replaced_only_by_force_and_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with new_folder(target) as folder:
        (folder / "one").touch()
    with pytest.raises(InvalidInputError, match="exists and is not empty"), new_folder(target):
        raise AssertionError("it was begun")
    with pytest.raises(OSError, match="full"):
        fail_in(target)
    assert [path.name for path in target.iterdir()] == ["one"]
    with new_folder(target, force=True) as folder:
        (folder / "two").touch()
        assert (target / "one").exists()
    assert [path.name for path in target.iterdir()] == ["two"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def fail_in(target: Path) -> None:
    with new_folder(target, force=True) as folder:
        (folder / "two").touch()
        raise OSError("the disk is full")


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(InvalidInputError, match="is a file"), new_folder(tmp_path / "out", force=True):
        raise AssertionError("it was begun")
