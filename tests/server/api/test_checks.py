"""The checks at the door know what the engine knows, and the API process never loads torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.server.api.running import facts
from tinsmith.errors import InvalidInputError
from tinsmith.server import checks
from tinsmith.server.engine.losses import LOSSES
from tinsmith.types import Datum, ForwardBackwardInput, ModelInput, TensorData


def test_both_know_the_same_losses_inputs_and_settings() -> None:
    ours = {name: (loss.needed, loss.optional, set(loss.settings)) for name, loss in checks.LOSSES.items()}
    engine = {name: (loss.inputs, loss.optional_inputs, set(loss.config)) for name, loss in LOSSES.items()}
    assert ours == engine


def test_the_api_is_imported_without_torch() -> None:
    script = "import sys, tinsmith.server.app; sys.exit('torch' in sys.modules or 'tinsmith.client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def examples(**inputs: object) -> ForwardBackwardInput:
    return ForwardBackwardInput([Datum(ModelInput.from_ints([1, 2, 3]), inputs)], "custom", {"loss_id": "x"})


def test_tokens_are_counted() -> None:
    given = ForwardBackwardInput(
        [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [1, 2, 3], "weights": [1.0] * 3})] * 4,
        "cross_entropy",
    )
    assert checks.check_training(given, facts("m"), None) == 12


@pytest.mark.parametrize(
    ("rank", "value", "fits"),
    [
        (0, TensorData([1.0], "float32", [1]), True),
        (0, TensorData([1.0, 2.0], "float32"), False),
        (1, TensorData([1.0, 2.0, 3.0], "float32"), True),
        (1, TensorData([1.0, 2.0], "float32"), False),
        (2, TensorData([[1.0], [2.0], [3.0]], "float32"), True),
        (2, TensorData([1.0, 2.0, 3.0], "float32"), False),
    ],
)
def test_the_inputs_of_a_custom_loss_have_the_rank_it_declares(rank: int, value: TensorData, fits: bool) -> None:
    custom = [checks.CustomInput("logprobs", 1), checks.CustomInput("extra", rank)]
    given = examples(target_tokens=[1, 2, 3], extra=value)
    if fits:
        assert checks.check_training(given, facts("m"), custom) == 3
    else:
        with pytest.raises(InvalidInputError, match="custom loss wants"):
            checks.check_training(given, facts("m"), custom)


def test_a_custom_loss_misses_its_inputs_by_name() -> None:
    with pytest.raises(InvalidInputError, match=r"data\[0\]: loss_fn_inputs lacks 'extra'"):
        checks.check_training(examples(target_tokens=[1, 2, 3]), facts("m"), [checks.CustomInput("extra", 1)])
