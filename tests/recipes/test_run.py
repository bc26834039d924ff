"""Recipes stand by themselves, and notice when a run makes no sense any more."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from tinsmith.errors import InvalidInputError
from tinsmith.recipes.run import check_finite
from tinsmith.recipes.steps import Done, Step


@pytest.mark.parametrize(("loss", "eval_loss"), [(math.nan, None), (1.0, math.inf)])
def test_a_loss_that_is_no_number_ends_the_run(loss: float, eval_loss: float | None) -> None:
    with pytest.raises(InvalidInputError, match=r"The loss of step 7 is (nan|inf).* a lower --learning-rate"):
        check_finite(Done(Step(7, (), 0.1), loss, eval_loss, None))


def test_scripts_need_nothing_of_the_command_line() -> None:
    code = (
        "import sys, tinsmith.recipes.sft; print(*{'click', 'rich', 'torch', 'jinja2', 'wandb'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
