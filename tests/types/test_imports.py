"""What importing the types costs: they stay light, and load neither torch nor what the other half needs."""

import subprocess
import sys


def _modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return set(done.stdout.split())


def test_the_types_load_neither_torch_nor_another_validation_library() -> None:
    loaded = _modules_after("import tinsmith.types, tinsmith.wire.json")
    assert not loaded & {"torch", "pydantic", "transformers", "httpx", "rich", "google.protobuf"}


def test_no_plan_is_made_before_it_is_needed() -> None:
    code = "import tinsmith.types; from tinsmith.types._model import plan_of; print(plan_of.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 10
