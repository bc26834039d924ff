"""GPUs that are not here can run every kernel: it is compiled for them, and asks for no more than they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEMORY = {89: 101376, 90: 232448}
"""Bytes that a program may have, by generation: a GeForce 40, and an H100 or H200."""

MOST_SPILLED = 400
"""Bytes of each thread that found no register. A kernel beyond it takes many times as long."""


@pytest.mark.parametrize(("generation", "rank"), [(89, 256), (90, 32)])
def test_kernels_fit(generation: int, rank: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = ["--models", "qwen3-1.7b", "--ranks", str(rank), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.engine.gpu.other_gpus", str(generation), *options],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout)
    files = {kernel["name"].partition(".")[0] for kernel in kernels}
    assert files >= {"draw", "elementwise", "heads", "lora", "mlp", "one_row", "paged_decode", "slot_lora", "softmax"}
    # Where attention is our own, one adapter goes another way, and there is a deterministic mode.
    of_hopper = {"attention", "joined", "fixed_product"}
    assert files >= of_hopper if generation == 90 else files.isdisjoint(of_hopper)
    for kernel in kernels:
        assert kernel["shared_memory"] <= MEMORY[generation], kernel
        assert kernel["spilled"] <= MOST_SPILLED, kernel
