"""What a worker keeps of the memory it no longer uses, and what it gives back."""

from __future__ import annotations

import os
import subprocess
import sys

from tinsmith.server.process_life import WORKER_ENVIRONMENT

FREED_MB = 400
FREE_AND_GIVE_BACK = f"""
import os, torch
from tinsmith.server.memory import give_back_memory

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

parts = [torch.ones({FREED_MB} // 8, 2**18) for _ in range(8)]
full = resident_mb()
del parts
freed = resident_mb()
give_back_memory()
print(full - freed, full - resident_mb())
"""


def test_a_worker_keeps_freed_tensors_for_reuse_until_it_has_nothing_to_do() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FREE_AND_GIVE_BACK],
        env={**os.environ, **WORKER_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    returned_at_once, returned_when_asked = map(float, ended.stdout.split())
    assert returned_at_once < 0.1 * FREED_MB
    assert returned_when_asked > 0.9 * FREED_MB
