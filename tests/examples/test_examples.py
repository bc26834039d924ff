"""Every example, in few steps, on the real embedded model: it makes its point, and runs with the official package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.end_to_end.serving import COMMAND, KEY, ServerProcess
from tests.examples.running import TRAINING, load
from tests.support.embedded import embedded_folder, session_cache

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STEPS = {"demo": 7, "preference": 5, "reinforcement": 5, "custom_loss": 9, "distillation": 14}
ROUNDING = {"demo": 0.1, "preference": 1.0, "reinforcement": 0.2, "custom_loss": 0.3, "distillation": 0.2}
"""How far the figure of a first step may be off: bfloat16 rounds otherwise when requests meet in other batches."""
SECONDS = 600.0

Figures = dict[str, dict[str, Any]]
Found = Callable[[str], dict[str, Any]]
"""What the example of this name found, in its one run."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = {MODEL: embedded_folder(session_cache(tmp_path_factory))}
    # In the precision and with the threads of local mode, for which the numbers of steps were chosen.
    command = ("env", "-u", "OMP_NUM_THREADS", COMMAND)
    with ServerProcess(tmp_path_factory.mktemp("state"), model, "--dtype=auto", command=command) as running:
        yield running


@pytest.fixture(scope="module")
def ours(server: ServerProcess) -> Iterator[Found]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", KEY)
        yield cache(lambda name: load(name).main(base_url=server.url, steps=STEPS[name]))


@pytest.fixture(scope="module")
def official(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """What each example found in one step. One process for all: to import the official package takes seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKER")}
    environment |= {
        "HOME": str(tmp_path_factory.mktemp("home")),
        "TINKER_API_KEY": KEY,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "tests.examples.running", "tinker", server.url]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_demo_learns_its_answers(ours: Found) -> None:
    found = ours("demo")
    assert found["curve"][-1] < found["curve"][0] / 2
    assert any(word in " ".join(found["answers"]) for word in ("Arr", "Aye", "matey"))


def test_pairs_that_were_held_out_go_the_way_of_the_preference(ours: Found) -> None:
    found = ours("preference")
    assert found["margin"] > 2
    assert found["accuracy"] >= 0.8


def test_the_reward_rises_also_on_sums_that_were_held_out(ours: Found) -> None:
    found = ours("reinforcement")
    assert max(found["curve"][-2:]) > found["curve"][0] + 0.2
    assert found["after"] > found["before"] + 0.2


def test_what_is_to_be_forgotten_is_and_the_rest_stays(ours: Found) -> None:
    before, after = ours("custom_loss")["before"], ours("custom_loss")["after"]
    assert mean(after["forget"]) < mean(before["forget"]) / 2
    assert mean(after["keep"]) > mean(before["keep"])
    assert mean(after["not trained on"]) > 0.6


def test_the_student_comes_nearer_to_its_teacher(ours: Found) -> None:
    found = ours("distillation")
    assert found["after"] < 0.75 * found["before"]


def test_the_evaluation_tells_the_checkpoint_from_the_base_model(ours: Found, server: ServerProcess) -> None:
    scores = load("evaluation").main(base_url=server.url, checkpoint=ours("demo")["checkpoint"])
    (base, low, _), (tuned, _, high) = (scores[name]["perplexity"] for name in ("base model", "checkpoint"))
    assert tuned < base / 2
    assert high < low, "the intervals overlap"


def test_the_interval_of_a_share_has_wilsons_bounds() -> None:
    assert load("evaluation").wilson([True] * 8) == pytest.approx((1.0, 8 / (8 + 1.96**2), 1.0))


@pytest.mark.parametrize("name", TRAINING)
def test_with_the_official_package_the_first_step_finds_the_same(official: Figures, ours: Found, name: str) -> None:
    (figure,) = official[name]["curve"]
    assert figure == pytest.approx(ours(name)["curve"][0], abs=ROUNDING[name])


def test_with_the_official_package_the_evaluation_takes_the_newest_checkpoint(official: Figures) -> None:
    scores = official["evaluation"]
    assert scores["checkpoint"]["perplexity"][0] < scores["base model"]["perplexity"][0]
