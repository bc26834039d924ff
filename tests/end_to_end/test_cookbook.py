"""tinker-cookbook, unmodified, against a real server: its loops train, and its tools take our checkpoints."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from tests.end_to_end.cookbook import PACKAGE, Cookbook, Run, begin_from, write_data
from tests.end_to_end.environments import environment
from tests.end_to_end.serving import ServerProcess
from tests.support.embedded import embedded_folder, session_cache
from tests.support.tiny_tokenizer import byte_level_bpe, write_folder

REAL, TINY = "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"
"""The loops know the format of a chat by the name of the model. Ours speak the one that these two do."""

SUPERVISED_DATA, MATHS_DATA = "HuggingFaceH4/no_robots", "openai/gsm8k"
ALPHABET = string.ascii_lowercase * 3 + string.digits + string.punctuation + " " * 15
PIRATE = Path(__file__).parents[2] / "examples" / "pirate.jsonl"

_MERGE = """
import sys
from tinker_cookbook import weights
path, base_model = sys.argv[1:]
weights.download(tinker_path=path, output_dir="adapter")
weights.build_hf_model(base_model=base_model, adapter_path="adapter", output_path="merged")
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.server.tiny_models import save_model

    tokenizer = byte_level_bpe()
    tiny = save_model(
        tmp_path_factory.mktemp("tiny"), "qwen3", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=1024
    )
    return {REAL: embedded_folder(session_cache(tmp_path_factory)), TINY: write_folder(tiny, tokenizer)}


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[Cookbook]:
    python = environment(PACKAGE, on_top_of_ours=True)
    with ServerProcess(tmp_path_factory.mktemp("state"), models) as server:
        yield Cookbook(python, server, models)


@pytest.fixture(scope="module")
def taught(cookbook: Cookbook, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny model answers whatever it is asked with one of four numbers in a box. Trained with our own client."""
    folder, dice = tmp_path_factory.mktemp("taught"), random.Random(0)
    write_data(
        folder, SUPERVISED_DATA, [conversation(*noise(dice), f"\\boxed{{{dice.randint(6, 9)}}}") for _ in range(768)]
    )
    return cookbook.run_recipe(
        "sl_loop",
        folder,
        with_our_client=True,
        model_name=TINY,
        batch_size=16,
        learning_rate=1e-2,
        lora_rank=8,
        train_on_what="last_assistant_message",
    )


def noise(dice: random.Random) -> list[str]:
    """A question, an answer and a question, of no meaning and any length."""
    return ["".join(dice.choices(ALPHABET, k=dice.randint(20, longest))) for longest in (120, 200, 120)]


def conversation(*turns: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * (len(turns) // 2)
    return {"messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]}


def test_the_supervised_loop_lowers_the_loss_of_a_real_model(cookbook: Cookbook, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in PIRATE.read_text().splitlines()]
    write_data(tmp_path, SUPERVISED_DATA, [conversation(line["prompt"], line["completion"]) for line in lines[:12] * 8])
    run = cookbook.run_recipe(
        "sl_loop", tmp_path, model_name=REAL, batch_size=6, learning_rate=2e-3, lora_rank=8, max_steps=6, save_every=3
    )
    losses = run.metric("train_mean_nll")
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0]


def test_the_supervised_loop_runs_with_our_client_too(taught: Run) -> None:
    losses = taught.metric("train_mean_nll")
    assert len(losses) == 48
    assert losses[-1] < 0.2 * losses[0]


def test_the_reinforcement_loop_raises_the_reward(cookbook: Cookbook, taught: Run, tmp_path: Path) -> None:
    sums = [{"question": f"What is {first} + {7 - first}?", "answer": "#### 7"} for first in range(8)]
    write_data(tmp_path, MATHS_DATA, sums * 10)
    begin_from(tmp_path, taught.state_path)
    run = cookbook.run_recipe(
        "rl_loop", tmp_path, model_name=TINY, batch_size=8, group_size=8, learning_rate=4e-3, max_tokens=16
    )
    rewards = run.metric("reward/total")
    assert len(rewards) == 10
    assert mean(rewards[-4:]) > rewards[0] + 0.25


def test_a_checkpoint_of_a_loop_is_downloaded_and_merged_into_its_base_model(
    cookbook: Cookbook, models: dict[str, Path], taught: Run, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    cookbook.run("-c", _MERGE, taught.state_path, TINY, folder=tmp_path)
    base = AutoModelForCausalLM.from_pretrained(models[TINY], dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        untrained = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, adapted, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(untrained, adapted, atol=0.1)
