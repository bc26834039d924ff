"""`tinsmith.compat.install()` makes `import tinker` mean this package, also where the official one is installed."""

import subprocess
import sys
from importlib.metadata import version

from tests.support.server import FakeServer


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_official_package_is_installed_here_so_that_these_tests_mean_something() -> None:
    assert version("tinker") == "0.38.0"


def test_the_import_paths_of_real_code_lead_here() -> None:
    code = """
import tinsmith, tinsmith.compat
tinsmith.compat.install()
import tinker
import tinker.types
import tinker.types.tensor_data
import tinker.lib.public_interfaces
import tinker.lib.public_interfaces.rest_client
import tinker.lib.retry_handler
from tinker import SamplingClient, types
from tinker.auth import tinker_has_credentials
from tinker.lib.public_interfaces import APIFuture, AwaitableConcurrentFuture
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.lib.retry_handler import RetryConfig
from tinker.types.tensor_data import TensorData
import tinker.lib.public_interfaces.rest_client as rest_client
assert tinker.ServiceClient is tinsmith.ServiceClient
assert SamplingClient is tinsmith.SamplingClient
assert types.Datum is tinsmith.types.Datum is tinker.types.Datum
assert TensorData is tinsmith.TensorData
assert RestClient is tinsmith.RestClient is rest_client.RestClient
assert APIFuture is AwaitableConcurrentFuture is tinsmith.APIFuture
assert RetryConfig is tinsmith.RetryConfig
assert tinker.__version__ == tinsmith.__version__
"""
    run(code)


def test_everything_is_there_under_the_other_name() -> None:
    code = """
import sys
import tinsmith.compat
tinsmith.compat.install()
from tinker import *
from tinker.types import *
import tinker, tinsmith
names = set(tinsmith.__all__) - {"auth", "types"}
assert all(getattr(tinker, name) is getattr(tinsmith, name) for name in names)
assert all(getattr(tinker.types, name) is getattr(tinsmith.types, name) for name in tinsmith.types.__all__)
assert ServiceClient is tinsmith.ServiceClient
assert set(tinsmith.__all__) <= set(dir(tinker))
assert not any("tinker/" in (getattr(module, "__file__", None) or "") for module in sys.modules.values())
"""
    run(code)


def test_installing_loads_nothing_and_may_be_repeated() -> None:
    code = """
import sys
import tinsmith.compat
tinsmith.compat.install()
import tinker
first = tinker
tinsmith.compat.install()
import tinker
assert tinker.ServiceClient is first.ServiceClient
print("torch" in sys.modules, "httpx" in sys.modules)
"""
    assert run(code) == "False False"


def test_a_name_that_does_not_exist_is_an_ordinary_import_error() -> None:
    code = """
import tinsmith.compat
tinsmith.compat.install()
for statement in ("import tinker.nonsense", "from tinker import Nonsense", "from tinker.lib import nonsense"):
    try:
        exec(statement)
    except ImportError:
        continue
    raise SystemExit(statement)
"""
    run(code)


def test_it_refuses_when_the_official_package_is_loaded_already() -> None:
    code = """
import warnings
warnings.simplefilter("ignore")
import tinker
import tinsmith.compat
try:
    tinsmith.compat.install()
except ValueError as error:
    print(error)
"""
    assert "call tinsmith.compat.install() before" in run(code)


def test_a_script_written_for_the_official_package_runs() -> None:
    script = """
import tinsmith.compat
tinsmith.compat.install()

import tinker
from tinker import types

service_client = tinker.ServiceClient()
training_client = service_client.create_lora_training_client(base_model="tiny/model-1", rank=8)
datum = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)
losses = []
for step in range(3):
    forward = training_client.forward_backward([datum], "cross_entropy")
    training_client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    losses.append(forward.result().metrics["loss:sum"])
assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
sampling_client = training_client.save_weights_and_get_sampling_client()
sampled = sampling_client.sample(types.ModelInput.from_ints([1, 2, 3]), 2, types.SamplingParams(max_tokens=4)).result()
print([len(sequence.tokens) for sequence in sampled.sequences])
"""
    with FakeServer() as server:
        environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-x"}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment
        )
    assert done.stdout.strip() == "[4, 4]", done.stderr
